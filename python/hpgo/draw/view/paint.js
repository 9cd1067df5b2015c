// Drawing of one frame: axis, boxes or shares, memory, transfers, the critical path.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw() {
  const began = performance.now();
  fitGutter();
  clampView();
  const ink = style("--ink"), faint = style("--faint"), paper = style("--paper"), line = style("--line");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  state.modes = []; state.visible = 0; state.arrows = 0; state.curves = 0; state.critical = 0;
  const ticks = axisTicks();
  context.strokeStyle = line; context.lineWidth = 0.6;
  context.beginPath();
  for (const { x } of ticks) { context.moveTo(x, AXIS); context.lineTo(x, height); }
  context.stroke();
  for (const panel of panels()) drawPanel(panel, ink, faint, paper);
  drawAxis(ticks, ink, paper);
  state.frame_ms = performance.now() - began;
  const density = state.modes.some((mode) => mode === "shares");
  byId("status").textContent = density
    ? `${state.visible.toLocaleString("en")} actions in view: heights are shares of time; zoom in for boxes`
    : `${state.visible.toLocaleString("en")} actions in view`;
  if (hover && hover.pinned) placeTip();
}

function drawPanel({ t, top, bottom }, ink, faint, paper) {
  if (bottom < AXIS || top - HEAD > height) { state.modes.push("hidden"); return; }
  context.textBaseline = "alphabetic"; context.textAlign = "left"; context.fillStyle = ink; context.font = "bold 13px Arial, sans-serif";
  context.fillText(t.label, 12, top - 8);
  const labelPx = context.measureText(t.label).width;
  context.fillStyle = faint; context.font = "12px Arial, sans-serif";
  context.fillText(fitted(t.summary, width - labelPx - 36), 12 + labelPx + 12, top - 8);
  const first = Math.max(0, Math.floor((AXIS - top) / view.rowPx)), last = Math.min(t.ranks, Math.ceil((height - top) / view.rowPx));
  const t0 = Math.max(0, view.t0 / t.tick_s), t1 = view.t1 / t.tick_s;
  let count = 0;
  for (let rank = first; rank < last; rank++) {
    const low = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], t0);
    count += firstEndingAfter(t.start, low, t.bounds[rank + 1], t1) - low;
  }
  state.visible += count;
  const s = strips();
  const boxes = count <= MAX_BOXES && view.rowPx >= 3 && (last - first) * plotPx() >= 1.5 * count;
  state.modes.push(boxes ? "boxes" : "shares");
  context.save();
  context.beginPath(); context.rect(GUTTER, AXIS, plotPx(), height - AXIS); context.clip();
  if (boxes) drawBoxes(t, top, first, last, t0, t1, s); else drawShares(t, top, first, last, t0, t1, s, paper);
  drawSync(t, top, first, last, s);
  if (show.memory) drawMemory(t, top, first, last, s);
  if (show.transfers !== "none") drawTransfers(t, top, first, last, t0, t1, s);
  if (show.critical) drawCritical(t, top, first, last, t0, t1, s, boxes);
  const end = xOf(t.makespan_s);
  context.strokeStyle = ink; context.lineWidth = 1.2; context.setLineDash([3, 2]);
  context.beginPath(); context.moveTo(end, top - 3); context.lineTo(end, bottom + 2); context.stroke();
  context.setLineDash([]);
  if (hover && hover.t === t) drawHover(top, s, ink);
  context.restore();
  const minimum = 13 / view.rowPx, power = 10 ** Math.max(0, Math.floor(Math.log10(minimum)));
  const every = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= minimum);
  context.fillStyle = ink; context.textAlign = "right"; context.font = "11px Arial, sans-serif"; context.textBaseline = "middle";
  for (let rank = Math.ceil(first / every) * every; rank < last; rank += every)
    context.fillText(fitted(nameOf(t, rank), GUTTER - 14), GUTTER - 6, top + rank * view.rowPx + Math.max(s.box, Math.min(view.rowPx, 12)) / 2);
}

function drawBoxes(t, top, first, last, t0, t1, s) {
  const scale = plotPx() / (view.t1 - view.t0) * t.tick_s, origin = GUTTER - view.t0 / t.tick_s * scale;
  const numbers = s.box >= 9;
  context.textAlign = "center"; context.textBaseline = "middle";
  for (let rank = first; rank < last; rank++) {
    const y = top + rank * view.rowPx;
    if (show.bubbles) {
      const idle = t.idle;
      for (let i = firstEndingAfter(idle.end, idle.bounds[rank], idle.bounds[rank + 1], t0); i < idle.bounds[rank + 1] && idle.start[i] < t1; i++) {
        context.fillStyle = patternOf(`idle-${causes[idle.cause[i]]}`);
        context.fillRect(origin + idle.start[i] * scale, y, (idle.end[i] - idle.start[i]) * scale, s.box);
      }
    }
    for (let i = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], t0); i < t.bounds[rank + 1] && t.start[i] < t1; i++) {
      const x = origin + t.start[i] * scale, w = (t.end[i] - t.start[i]) * scale, kind = t.kind[i] & 7;
      if (kind === 4) {
        box(t, "F", t.stage[i], t.batch[i], x, y, w, s.box / 2, numbers);
        box(t, "B", t.backwardStage[i], t.backwardBatch[i], x, y + s.box / 2, w, s.box / 2, numbers);
      } else box(t, kinds[kind], t.stage[i], t.batch[i], x, y, w, s.box, numbers);
    }
  }
}

function box(t, kind, stage, batch, x, y, w, h, numbers) {
  const shown = w - Math.min(0.7, 0.12 * w), virtualStage = t.virtualStageOf[stage] ?? 0;
  context.fillStyle = patternOf(kind);
  context.fillRect(x, y, shown, h);
  // Place all numbers below the bars that mark virtual stages.
  const bar = t.stages > t.ranks ? Math.min(3, h / 4) : 0;
  if (virtualStage) { context.fillStyle = marks.virtual_stage.fill[+dark]; context.fillRect(x, y, shown * virtualStage / t.lastVirtualStage, bar); }
  y += bar; h -= bar;
  const size = Math.min(13, h * 0.75), text = String(batch);
  if (numbers && size >= 7 && w >= text.length * size * 0.58 + 3) {
    context.fillStyle = marks[kind].ink[0]; context.font = `${size}px Arial, sans-serif`;
    // Keep the number visible while a long box is only partly in view.
    const left = Math.max(x, GUTTER), right = Math.min(x + w, width - RIGHT);
    if (right - left > text.length * size * 0.58) context.fillText(text, (left + right) / 2, y + h / 2 + 0.5);
  }
}

function packed(colour) { const v = parseInt(colour.slice(1), 16); return (0xff000000 | ((v & 255) << 16) | (v & 0xff00) | (v >> 16)) >>> 0; }

// Several ranks share a row when rows are thinner than three pixels. Pixels are written one by one: for each row and
// pixel column, the shares of the classes are stacked from the bottom of the row.
function drawShares(t, top, first, last, t0, t1, s, paper) {
  const columns = Math.round(plotPx() * ratio), band = Math.max(1, Math.ceil(3 / view.rowPx));
  const yTop = Math.max(AXIS, top), yBottom = Math.min(height, top + t.ranks * view.rowPx), rowsPx = Math.round((yBottom - yTop) * ratio);
  if (rowsPx < 1 || columns < 1) return;
  const classes = 4 + causes.length, image = context.createImageData(columns, rowsPx), pixels = new Uint32Array(image.data.buffer);
  pixels.fill(packed(paper));
  const fills = [...kinds.slice(0, 4), ...causes.map((cause) => `idle-${cause}`)].map(tile), side = fills[0].side;
  // Precompute each pixel's position in the tile of its pattern, because a division per pixel would take most of a frame.
  const ofRow = Int32Array.from({ length: rowsPx }, (_, y) => (y % side) * side), ofColumn = Int32Array.from({ length: columns }, (_, x) => x % side);
  const ticksPerPx = (view.t1 - view.t0) / t.tick_s / columns, from = view.t0 / t.tick_s;
  const under = t.overview && ticksPerPx >= t.overview.ticks * 0.5 ? cellsUnder(t.overview, from, ticksPerPx, columns) : null;
  // Columns with only a few actions would make a moiré pattern with the pixels, so average over more pixels.
  const calmPx = Math.min(columns >> 2, Math.round(6 * t.makespan_s / t.tick_s * t.ranks / Math.max(t.actions, 1) / ticksPerPx));
  const acc = Array.from({ length: classes }, () => new Float32Array(columns));
  for (let row = Math.floor(first / band) * band; row < last; row += band) {
    const end = Math.min(row + band, t.ranks);
    for (const cells of acc) cells.fill(0);
    if (under) addOverview(t.overview, row, end, under, acc);
    else for (let rank = row; rank < end; rank++) {
      eachInterval(t, rank, t0, t1, (code, a, b, weight) => spread(acc[code], 0, columns, (a - from) / ticksPerPx, (b - from) / ticksPerPx, weight));
    }
    calm(acc, calmPx);
    const foot = top + row * view.rowPx + (band > 1 ? (end - row) * view.rowPx : s.box);
    const y1 = Math.round((foot - yTop) * ratio), y0 = Math.round((top + row * view.rowPx - yTop) * ratio), rowPx = y1 - y0;
    for (let x = 0; x < columns; x++) {
      let sum = 0, y = y1;
      for (let code = 0; code < (show.bubbles ? classes : 4); code++) {
        const share = acc[code][x];
        if (!share) continue;
        sum += share / (end - row);
        const upto = Math.max(y0, y1 - ((Math.min(sum, 1) * rowPx + 0.5) | 0)), last = Math.max(upto, 0), { pixels: own } = fills[code];
        for (let at = Math.min(y, rowsPx) - 1; at >= last; at--) pixels[at * columns + x] = own[ofRow[at] + ofColumn[x]];
        y = Math.min(y, upto);
      }
    }
  }
  context.putImageData(image, Math.round(GUTTER * ratio), Math.round(yTop * ratio));
}

// Replace each column by the mean of the `px` columns around it that exist.
function calm(acc, px) {
  if (px < 2) return;
  const half = px >> 1, count = acc[0].length;
  // At the start and the end of the step, only one side has columns.
  const from = Math.max(0, Math.round(xOf(0) - GUTTER) * ratio), to = Math.min(count, Math.round((xOf(META.end_s) - GUTTER) * ratio));
  const sums = new Float64Array(count + 1);
  for (const cells of acc) {
    for (let x = 0; x < count; x++) sums[x + 1] = sums[x] + cells[x];
    if (!sums[count]) continue;
    const mean = (x, a, b) => { cells[x] = (sums[b] - sums[a]) / (b - a); };
    const inner = Math.min(from + half, to), outer = Math.max(inner, to - half);
    for (let x = from; x < inner; x++) mean(x, from, Math.min(to, x + half + 1));
    for (let x = inner, whole = 2 * half + 1; x < outer; x++) cells[x] = (sums[x + half + 1] - sums[x - half]) / whole;
    for (let x = outer; x < to; x++) mean(x, Math.max(from, x - half), to);
  }
}

// Return the cells of the overview under each pixel column, as half-open ranges.
function cellsUnder({ columns: cells, ticks }, from, ticksPerPx, columns) {
  const first = new Int32Array(columns), last = new Int32Array(columns);
  for (let x = 0; x < columns; x++) {
    const a = Math.floor((from + x * ticksPerPx) / ticks), b = Math.max(a + 1, Math.floor((from + (x + 1) * ticksPerPx) / ticks));
    first[x] = Math.max(0, Math.min(a, cells));
    last[x] = Math.max(0, Math.min(b, cells));
  }
  return { first, last };
}

// Add the ranks row .. end to the pixel columns: first sum the ranks cell by cell, then convert cells to pixels once.
function addOverview({ columns: cells, table }, row, end, { first, last }, acc) {
  const low = first[0], high = last[last.length - 1], sums = new Float32Array(cells);
  for (let code = 0; code < table.length; code++) {
    if (!table[code]) continue;
    const source = table[code], target = acc[code];
    sums.fill(0, low, high);
    for (let rank = row; rank < end; rank++) for (let i = low, at = rank * cells + low; i < high; i++, at++) sums[i] += source[at];
    for (let x = 0; x < first.length; x++) {
      let sum = 0;
      for (let i = first[x]; i < last[x]; i++) sum += sums[i];
      if (sum) target[x] = sum / (last[x] - first[x]);
    }
  }
}

function drawSync(t, top, first, last, s) {
  context.fillStyle = patternOf("sync");
  context.strokeStyle = marks.virtual_stage.fill[+dark]; context.lineWidth = 0.6;
  for (let i = 0; i < t.sync.start.length; i++) {
    const rank = t.sync.rank[i];
    if (rank < first || rank >= last) continue;
    const x = xOf(t.sync.start[i] * t.tick_s), h = Math.max(2, s.box / 4);
    const box = [x, top + rank * view.rowPx + s.box - h, xOf(t.sync.end[i] * t.tick_s) - x, h];
    context.fillRect(...box);
    if (box[2] > 2) context.strokeRect(...box);
  }
}

function drawMemory(t, top, first, last, s) {
  if (!t.memoryTime.length || s.memory < 2) return;
  context.lineWidth = 1;
  for (let rank = first; rank < last; rank++) {
    const foot = top + rank * view.rowPx + s.box + s.lane + s.memory, px = (s.memory - 2) / t.memory_top;
    const low = t.memoryBounds[rank], high = t.memoryBounds[rank + 1];
    const start = Math.max(low, firstEndingAfter(t.memoryTime, low, high, view.t0 / t.tick_s) - 1);
    context.fillStyle = marks.free.fill[+dark];
    context.fillRect(xOf(0), foot - s.memory + 2, xOf(t.makespan_s) - xOf(0), s.memory - 2);
    context.fillStyle = patternOf("memory");
    let maximum = 0, maximumX = -1;
    for (let i = start; i < high; i++) {
      const x = xOf(t.memoryTime[i] * t.tick_s), next = xOf(i + 1 < high ? t.memoryTime[i + 1] * t.tick_s : t.makespan_s);
      if (x > width) break;
      // Join steps thinner than a pixel and keep the highest, because peaks exceed a memory limit.
      const h = t.memorySize[i] * px;
      if (Math.floor(x) === maximumX && h <= maximum) continue;
      maximumX = Math.floor(x); maximum = h;
      context.fillRect(x, foot - h, Math.max(next - x, 1), h);
    }
    state.curves++;
    if (t.caps) {
      context.strokeStyle = lines.cap.colour[+dark]; context.setLineDash(lines.cap.dash);
      const y = foot - t.caps[rank] / t.memory_unit * px;
      context.beginPath(); context.moveTo(xOf(0), y); context.lineTo(xOf(t.makespan_s), y); context.stroke(); context.setLineDash([]);
    }
  }
}

function drawTransfers(t, top, first, last, t0, t1, s) {
  const { from, to, start, end, kind, longest } = t.transfer;
  const low = firstEndingAfter(start, 0, start.length, t0 - longest - 1), high = firstEndingAfter(start, low, start.length, t1);
  const lanes = show.transfers === "lanes";
  if (!lanes && (high - low > MAX_ARROWS * 4 || view.rowPx < 4)) return;
  if (lanes && (!s.lane || high - low > 400000)) return;
  for (let code = 0; code < 2; code++) {
    const name = code ? "gradient" : "activation", heads = new Path2D();
    context.strokeStyle = lines[name].colour[+dark]; context.fillStyle = patternOf(`lane-${name}`);
    context.lineWidth = 1;
    context.beginPath();
    for (let i = low; i < high; i++) {
      if (kind[i] !== code || end[i] < t0) continue;
      const a = from[i], b = to[i], xa = xOf(start[i] * t.tick_s), xb = xOf(end[i] * t.tick_s);
      if (lanes) {
        if (a < first || a >= last) continue;
        context.rect(xa, top + a * view.rowPx + s.box + 0.5 + code * (s.lane / 2), Math.max(xb - xa, 0.5), s.lane / 2 - 0.5);
        state.arrows++;
        continue;
      }
      if (Math.max(a, b) < first || Math.min(a, b) >= last || state.arrows > MAX_ARROWS) continue;
      state.arrows++;
      const down = b > a, ya = top + a * view.rowPx + (down ? s.box : 0), yb = top + b * view.rowPx + (down ? 0 : s.box);
      context.moveTo(xa, ya); context.lineTo(xb, yb);
      const angle = Math.atan2(yb - ya, xb - xa);
      for (const turn of [2.7, -2.7]) { heads.moveTo(xb, yb); heads.lineTo(xb + 5 * Math.cos(angle + turn), yb + 5 * Math.sin(angle + turn)); }
    }
    if (lanes) { context.fill(); continue; }
    context.setLineDash(lines[name].dash); context.stroke();
    context.setLineDash([]); context.stroke(heads);
  }
}

function drawCritical(t, top, first, last, t0, t1, s, boxes) {
  context.strokeStyle = lines.critical.colour[+dark]; context.lineWidth = 2;
  context.beginPath();
  for (let rank = first; rank < last; rank++) {
    const y = top + rank * view.rowPx;
    let lastX = -1;
    for (let i = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], t0); i < t.bounds[rank + 1] && t.start[i] < t1; i++) {
      if (!(t.kind[i] & 8)) continue;
      state.critical++;
      const x = xOf(t.start[i] * t.tick_s), end = xOf(t.end[i] * t.tick_s);
      if (boxes) context.rect(x + 1, y + 1, Math.max(end - x - 2.5, 0.5), s.box - 2);
      else if (end > lastX + 0.5) { context.moveTo(Math.max(x, lastX), y + s.box / 2); context.lineTo(Math.max(end, x + 0.5), y + s.box / 2); lastX = end; }
    }
  }
  context.stroke();
}

function axisTicks() {
  const span = view.t1 - view.t0, rough = span / Math.max(2, plotPx() / 95), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * (1 - 1e-9));
  const [unit, unit_s] = unitOf(span), digits = Math.max(0, -Math.floor(Math.log10(step / unit_s) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(view.t0 / step - 1e-9) + 0; i * step <= view.t1 + step * 1e-9; i++)
    ticks.push({ x: xOf(i * step), text: (i * step / unit_s + 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }), unit });
  return ticks.filter((tick) => tick.x >= GUTTER - 1 && tick.x <= width);
}

function drawAxis(ticks, ink, paper) {
  context.fillStyle = paper; context.fillRect(0, 0, width, AXIS);
  context.strokeStyle = context.fillStyle = ink; context.lineWidth = 1;
  context.beginPath(); context.moveTo(GUTTER, AXIS - 0.5); context.lineTo(width - RIGHT, AXIS - 0.5);
  for (const { x } of ticks) { context.moveTo(x, AXIS - 5); context.lineTo(x, AXIS); }
  context.stroke();
  context.font = "11px Arial, sans-serif"; context.textBaseline = "alphabetic"; context.textAlign = "center";
  for (const { x, text } of ticks) { const half = context.measureText(text).width / 2; context.fillText(text, Math.min(x, width - half - 2), AXIS - 9); }
  context.textAlign = "right";
  context.fillText(`time (${ticks.length ? ticks[0].unit : "s"})`, GUTTER - 6, 13);
  state.axis = { unit: ticks.length ? ticks[0].unit : "", texts: ticks.map((tick) => tick.text) };
}

function unitOf(span_s) { return [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]].find(([, s]) => span_s >= s * (1 - 1e-12)) ?? ["ns", 1e-9]; }
function secondsText(time_s) { const [name, s] = unitOf(Math.abs(time_s) || 1); return `${Number((time_s / s).toPrecision(7)).toLocaleString("en", { maximumFractionDigits: 6 })} ${name}`; }
function bytesText(bytes) { const units = ["B", "kB", "MB", "GB", "TB"]; let i = 0; while (bytes >= 1000 && i < 4) { bytes /= 1000; i++; } return `${Number(bytes.toPrecision(4))} ${units[i]}`; }
