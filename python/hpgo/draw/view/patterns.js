// Fills of marks: a color, and a pattern that distinguishes them in gray. Each tile is painted once.

const tiles = new Map();

// Return one tile of a mark's fill, in screen pixels.
function tile(name) {
  const key = `${name} ${+dark} ${+printing} ${ratio}`;
  if (!tiles.has(key)) {
    const { fill, ink, hatch } = marks[name], side = Math.round(META.hatches.side_px * ratio), scale = side / META.hatches.side_px;
    const made = document.createElement("canvas"), paint = made.getContext("2d");
    made.width = made.height = side;
    paint.fillStyle = fill[+dark];
    paint.fillRect(0, 0, side, side);
    if (hatch) {
      paint.scale(scale, scale);
      paint.strokeStyle = ink[+dark]; paint.globalAlpha = printing ? META.hatches.print_opacity : META.hatches.opacity; paint.lineWidth = META.hatches.line_px;
      paint.stroke(new Path2D(META.hatches.paths[hatch]));
    }
    const pattern = hatch ? context.createPattern(made, "repeat") : fill[+dark];
    if (hatch) pattern.setTransform(new DOMMatrix().scale(1 / scale));
    tiles.set(key, { made, pattern, side, pixels: new Uint32Array(paint.getImageData(0, 0, side, side).data.buffer) });
  }
  return tiles.get(key);
}

const patternOf = (name) => tile(name).pattern;

// Return a swatch for the legend: a box with the fill, on which `over` draws.
function swatch(name, over) {
  const made = document.createElement("canvas"), paint = made.getContext("2d");
  made.style.cssText = "position:static;width:16px;height:10px";
  made.width = 16 * ratio; made.height = 10 * ratio;
  paint.scale(ratio, ratio);
  if (name) { paint.fillStyle = patternOf(name); paint.fillRect(0, 0, 16, 10); }
  if (over) over(paint);
  return made;
}

function dashed(name, at, wide) {
  return (paint) => {
    paint.strokeStyle = lines[name].colour[+dark]; paint.lineWidth = wide ?? 1.2; paint.setLineDash(lines[name].dash);
    paint.beginPath(); paint.moveTo(0, at); paint.lineTo(16, at); paint.stroke();
  };
}
