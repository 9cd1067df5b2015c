// Positions of times and ranks on the canvas, and the visible part of them.

const nameOf = (t, rank) => t.names.length ? t.names[rank] : `${t.row} ${rank}`;
// Names get the width they need, but are cut if they would leave too little width for the rows.
function fitGutter() {
  if (guttered === width) return;
  guttered = width;
  context.font = "11px Arial, sans-serif";
  const maximum = Math.max(64, width * 0.3) - 18;
  const wide = timelines.reduce((so_far, t) => (t.names.length ? t.names : [nameOf(t, t.ranks - 1)]).reduce((px, name) => Math.max(px, context.measureText(fitted(name, maximum)).width), so_far), 46);
  GUTTER = Math.ceil(wide + 18);
}
const cut = new Map();
function fitted(text, px) {
  const key = `${px} ${text}`;
  if (!cut.has(key)) {
    const fits = (words) => context.measureText(words).width <= px;
    let whole = text; // parts in parentheses are dropped first, from the end
    while (!fits(whole) && /\)$/.test(whole)) whole = whole.includes(", ", whole.indexOf(" (")) ? whole.replace(/, [^,]*\)$/, ")") : whole.slice(0, whole.indexOf(" ("));
    let shown = whole;
    while (shown.length > 1 && !fits(shown === whole ? shown : `${shown}…`)) shown = shown.slice(0, -1);
    cut.set(key, shown === whole ? whole : `${shown.trimEnd()}…`);
  }
  return cut.get(key);
}
const plotPx = () => width - GUTTER - RIGHT;
const xOf = (time_s) => GUTTER + (time_s - view.t0) / (view.t1 - view.t0) * plotPx();
const timeOf = (x) => view.t0 + (x - GUTTER) / plotPx() * (view.t1 - view.t0);
const contentPx = () => timelines.reduce((sum, t) => sum + HEAD + t.ranks * view.rowPx + PANEL_GAP, 0);

function panels() {
  let y = AXIS - view.top;
  return timelines.map((t) => { const top = y + HEAD; y = top + t.ranks * view.rowPx + PANEL_GAP; return { t, top, bottom: top + t.ranks * view.rowPx }; });
}

// Return the heights of a row's strips: boxes on top, then the lane of transfers, then the memory curve.
function strips() {
  const arrows = show.transfers === "arrows" && !show.memory && view.rowPx > 16; // arrows need space between the rows
  const gap = arrows ? Math.min(14, view.rowPx * 0.35) : view.rowPx > 9 ? 2 : 0, usable = view.rowPx - gap;
  const memory = show.memory ? Math.max(usable * 0.4, Math.min(12, usable - 4)) : 0, lane = show.transfers === "lanes" && usable > 6 ? Math.max(3, usable * 0.18) : 0;
  return { box: usable - memory - lane, lane, memory, usable };
}

function clampView() {
  const end = META.end_s || 1, span = Math.min(Math.max(view.t1 - view.t0, end * 1e-8), end * 1.02);
  view.t0 = Math.min(Math.max(view.t0, -0.01 * end), 1.01 * end - span);
  view.t1 = view.t0 + span;
  const below = contentPx() - (height - AXIS);
  view.top = Math.max(0, Math.min(view.top, below));
  canvas.style.touchAction = below > 1 ? "none" : "pan-y"; // if all rows fit, a finger scrolls the page instead
}

function zoomTo(t0, t1) { view.t0 = t0; view.t1 = t1; redraw(); }
function zoom(factor, x) { const at = timeOf(x), s = view.t1 - view.t0; view.t0 = at - (at - view.t0) * factor; view.t1 = view.t0 + s * factor; redraw(); }
function zoomRows(factor, y) {
  const before = view.rowPx, at = y - AXIS + view.top;
  view.rowPx = Math.min(120, Math.max(fitRowPx(), before * factor));
  view.top = at * view.rowPx / before - (y - AXIS);
  redraw();
}
function fitRowPx() {
  const ranks = timelines.reduce((sum, t) => sum + t.ranks, 0);
  return Math.min(show.memory ? 140 : 80, Math.max(show.memory ? CURVE_ROW_PX : 0.02, (height - AXIS - timelines.length * (HEAD + PANEL_GAP)) / Math.max(ranks, 1)));
}
function fit() { fitGutter(); view.t0 = 0; view.t1 = META.end_s || 1; view.top = 0; view.rowPx = fitRowPx(); redraw(); }
// Return the reader's zoom and switches, for a picture that replaces this one.
function kept() {
  if (!state.ready) return waiting;
  const isWhole = view.t0 <= 0 && view.t1 >= (META.end_s || 1);
  return {
    times: isWhole ? null : [view.t0, view.t1], rows: view.rowPx / fitRowPx(), top: view.top,
    switched: Object.fromEntries(Object.entries(show).filter(([name, value]) => value !== META.show[name])),
  };
}
let waiting = null;
function restore(what) {
  waiting = what;
  if (!what || !state.ready) return;
  for (const [name, value] of Object.entries(what.switched)) if (!byId(name).disabled) show[name] = value;
  view.rowPx = what.rows > 1.001 ? Math.min(120, what.rows * fitRowPx()) : fitRowPx();
  view.top = what.top;
  if (what.times && what.times[0] < (META.end_s || 1)) [view.t0, view.t1] = what.times;
  chosen();
}
function redraw() { if (state.ready && !dirty) { dirty = true; requestAnimationFrame(() => { dirty = false; draw(); }); } }
