// The interactive picture. Columns arrive packed (base64 of deflated bytes of differences) and become typed arrays; a frame draws
// boxes while few are in view and shares of time otherwise, so its cost depends on pixels, not on actions.
"use strict";

const META = JSON.parse(document.getElementById("meta").textContent);
const { kinds, causes, colours, causeNames, kindNames, lines } = META;
const AXIS = 36, GUTTER = META.gutter_px, RIGHT = 14, HEAD = 24, PANEL_GAP = 12;
const CURVE_ROW_PX = 26; // a memory curve is readable from here on; the rows scroll where they no longer fit
const MOST_BOXES = 20000, MOST_ARROWS = 5000, OVERVIEW_CELLS = 2 ** 21;
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), context = canvas.getContext("2d", { alpha: false }), tip = byId("tip");
const show = { ...META.show };
const view = { t0: 0, t1: META.end_s || 1, top: 0, rowPx: 20 };
let width = 0, height = 0, ratio = 1, timelines = [], hover = null, dirty = false, dark = false;

// What the page's tests and the curious read.
const state = window.hpgo = { ready: false, modes: [], visible: 0, frame_ms: 0, hover: null, show, view, zoomTo, place, arrows: 0 };

// Where on the canvas a rank and a time of a timeline are.
function place(number, rank, time_s) { return [xOf(time_s), panels()[number].top + rank * view.rowPx + strips().box / 2]; }

// --- opening ---------------------------------------------------------------------------------------------------------

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function column(id, Type) {
  const element = byId(id);
  if (!element) return new Type(0);
  const packed = new Blob([bytesOf(element.textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  element.remove();
  const planes = new Uint8Array(await new Response(packed).arrayBuffer()), count = planes.length / 4;
  const column = new Type(count);
  for (let i = 0, sum = 0; i < count; i++) {
    const folded = planes[i] | planes[count + i] << 8 | planes[2 * count + i] << 16 | planes[3 * count + i] << 24;
    column[i] = sum = sum + ((folded >>> 1) ^ -(folded & 1)) | 0;
  }
  return column;
}

async function open() {
  for (const [number, meta] of META.timelines.entries()) {
    const get = (name, Type) => column(`c${number}-${name}`, Type);
    const t = { ...meta };
    byId("status").textContent = `opening ${meta.label}…`;
    t.bounds = await get("bounds", Uint32Array);
    t.kind = await get("kind", Uint8Array);
    t.stage = await get("stage", Uint32Array);
    t.batch = await get("micro_batch", Uint32Array);
    t.backwardStage = meta.fused ? await get("backward_stage", Uint32Array) : t.stage;
    t.backwardBatch = meta.fused ? await get("backward_micro_batch", Uint32Array) : t.batch;
    t.start = await get("start", Uint32Array);
    t.end = await get("duration", Uint32Array);
    for (let i = 0; i < t.end.length; i++) t.end[i] += t.start[i];
    t.slack = await get("slack", Uint32Array);
    t.chunkOf = await get("chunk_of_stage", Uint16Array);
    t.idle = { bounds: await get("idle_bounds", Uint32Array), start: await get("idle_start", Uint32Array),
      end: await get("idle_duration", Uint32Array), cause: await get("idle_cause", Uint8Array) };
    for (let i = 0; i < t.idle.end.length; i++) t.idle.end[i] += t.idle.start[i];
    t.transfer = { from: await get("transfer_from", Uint32Array), to: await get("transfer_to", Uint32Array),
      start: await get("transfer_start", Uint32Array), end: await get("transfer_duration", Uint32Array),
      kind: await get("transfer_kind", Uint8Array), batch: await get("transfer_micro_batch", Uint32Array), longest: 0 };
    for (let i = 0; i < t.transfer.end.length; i++) {
      t.transfer.longest = Math.max(t.transfer.longest, t.transfer.end[i]);
      t.transfer.end[i] += t.transfer.start[i];
    }
    t.sync = { rank: await get("sync_rank", Uint32Array), start: await get("sync_start", Uint32Array), end: await get("sync_duration", Uint32Array) };
    for (let i = 0; i < t.sync.end.length; i++) t.sync.end[i] += t.sync.start[i];
    t.memoryBounds = await get("memory_bounds", Uint32Array);
    t.memoryTime = await get("memory_time", Uint32Array);
    t.memorySize = await get("memory_size", Uint32Array);
    if (t.actions > MOST_BOXES) await overview(t);
    timelines.push(t);
  }
  state.ready = true;
  fit();
}

// For each rank and class, the share of each of a few thousand equal columns: what zoomed-out frames read instead of
// the actions. Classes are F, B, I, W, then the causes of idle time.
async function overview(t) {
  const columns = Math.max(64, Math.min(4096, Math.floor(OVERVIEW_CELLS / t.ranks)));
  const ticks = t.makespan_s / t.tick_s / columns || 1;
  const table = Array.from({ length: 4 + causes.length }, () => null);
  const add = (code, rank, start, end, weight) => {
    const cells = table[code] ??= new Float32Array(t.ranks * columns);
    spread(cells, rank * columns, columns, start / ticks, end / ticks, weight);
  };
  let breath = performance.now();
  for (let rank = 0; rank < t.ranks; rank++) {
    eachInterval(t, rank, 0, Infinity, (code, start, end, weight) => add(code, rank, start, end, weight));
    if (performance.now() - breath > 40) { await new Promise((resume) => setTimeout(resume)); breath = performance.now(); }
  }
  t.overview = { columns, ticks, table };
}

// Adds the interval from..to, in units of cells, to cells[base ..]; each full cell counts `weight`.
function spread(cells, base, count, from, to, weight) {
  const first = Math.max(0, Math.floor(from)), last = Math.min(count - 1, Math.floor(to));
  for (let i = first; i <= last; i++) cells[base + i] += weight * Math.max(0, Math.min(to, i + 1) - Math.max(from, i));
}

function eachInterval(t, rank, t0, t1, take) {
  for (let i = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], t0); i < t.bounds[rank + 1] && t.start[i] < t1; i++) {
    const kind = t.kind[i] & 7;
    if (kind === 4) { take(0, t.start[i], t.end[i], 0.5); take(1, t.start[i], t.end[i], 0.5); } else take(kind, t.start[i], t.end[i], 1);
  }
  const idle = t.idle;
  for (let i = firstEndingAfter(idle.end, idle.bounds[rank], idle.bounds[rank + 1], t0); i < idle.bounds[rank + 1] && idle.start[i] < t1; i++)
    take(4 + idle.cause[i], idle.start[i], idle.end[i], 1);
}

// Index of the first entry of ends[low .. high] greater than `time`; ends ascend there.
function firstEndingAfter(ends, low, high, time) {
  while (low < high) { const middle = (low + high) >> 1; if (ends[middle] > time) high = middle; else low = middle + 1; }
  return low;
}

// --- geometry --------------------------------------------------------------------------------------------------------

const plotPx = () => width - GUTTER - RIGHT;
const xOf = (time_s) => GUTTER + (time_s - view.t0) / (view.t1 - view.t0) * plotPx();
const timeOf = (x) => view.t0 + (x - GUTTER) / plotPx() * (view.t1 - view.t0);
const contentPx = () => timelines.reduce((sum, t) => sum + HEAD + t.ranks * view.rowPx + PANEL_GAP, 0);

function panels() {
  let y = AXIS - view.top;
  return timelines.map((t) => { const top = y + HEAD; y = top + t.ranks * view.rowPx + PANEL_GAP; return { t, top, bottom: top + t.ranks * view.rowPx }; });
}

// The strips of one rank's row: boxes on top, then the lane of transfers, then the memory curve.
function strips() {
  const arrows = show.transfers === "arrows" && !show.memory && view.rowPx > 16; // they need room between the rows
  const gap = arrows ? Math.min(14, view.rowPx * 0.35) : view.rowPx > 9 ? 2 : 0, usable = view.rowPx - gap;
  const memory = show.memory ? usable * 0.45 : 0, lane = show.transfers === "lanes" && usable > 6 ? Math.max(3, usable * 0.18) : 0;
  return { box: usable - memory - lane, lane, memory, usable };
}

function clampView() {
  const end = META.end_s || 1, span = Math.min(Math.max(view.t1 - view.t0, end * 1e-8), end * 1.02);
  view.t0 = Math.min(Math.max(view.t0, -0.01 * end), 1.01 * end - span);
  view.t1 = view.t0 + span;
  view.top = Math.max(0, Math.min(view.top, contentPx() - (height - AXIS)));
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
  return Math.min(show.memory ? 44 : 30, Math.max(0.02, (height - AXIS - timelines.length * (HEAD + PANEL_GAP)) / Math.max(ranks, 1)));
}
function fit() { view.t0 = 0; view.t1 = META.end_s || 1; view.top = 0; view.rowPx = fitRowPx(); redraw(); }
function redraw() { if (state.ready && !dirty) { dirty = true; requestAnimationFrame(() => { dirty = false; draw(); }); } }

// --- drawing ---------------------------------------------------------------------------------------------------------

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw() {
  const began = performance.now();
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
  context.fillText(t.summary, 12 + labelPx + 12, top - 8);
  const first = Math.max(0, Math.floor((AXIS - top) / view.rowPx)), last = Math.min(t.ranks, Math.ceil((height - top) / view.rowPx));
  const t0 = Math.max(0, view.t0 / t.tick_s), t1 = view.t1 / t.tick_s;
  let count = 0;
  for (let rank = first; rank < last; rank++) {
    const low = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], t0);
    count += firstEndingAfter(t.start, low, t.bounds[rank + 1], t1) - low;
  }
  state.visible += count;
  const s = strips();
  const boxes = count <= MOST_BOXES && view.rowPx >= 3 && (last - first) * plotPx() >= 1.5 * count;
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
  const least = 13 / view.rowPx, power = 10 ** Math.max(0, Math.floor(Math.log10(least)));
  const every = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least);
  context.fillStyle = ink; context.textAlign = "right"; context.font = "11px Arial, sans-serif"; context.textBaseline = "middle";
  for (let rank = Math.ceil(first / every) * every; rank < last; rank += every)
    context.fillText(`${t.row} ${rank}`, GUTTER - 6, top + rank * view.rowPx + Math.max(s.box, Math.min(view.rowPx, 12)) / 2);
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
        context.fillStyle = colours[causes[idle.cause[i]]][+dark];
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
  const [fill, ink] = colours[kind][Math.min(t.chunkOf[stage] ?? 0, colours[kind].length - 1)];
  context.fillStyle = fill;
  context.fillRect(x, y, w > 4 ? w - 0.7 : w, h);
  const size = Math.min(12, h * 0.75), text = String(batch);
  if (numbers && size >= 7 && w >= text.length * size * 0.58 + 3) {
    context.fillStyle = ink; context.font = `${size}px Arial, sans-serif`;
    // Keep the number in sight while a long box is only partly in view.
    const left = Math.max(x, GUTTER), right = Math.min(x + w, width - RIGHT);
    if (right - left > text.length * size * 0.58) context.fillText(text, (left + right) / 2, y + h / 2 + 0.5);
  }
}

function packed(colour) { const v = parseInt(colour.slice(1), 16); return (0xff000000 | ((v & 255) << 16) | (v & 0xff00) | (v >> 16)) >>> 0; }

// Several ranks share a row when rows are thinner than three pixels. Pixels are written one by one: for each row and
// pixel column the classes' shares stack up from the foot of the row.
function drawShares(t, top, first, last, t0, t1, s, paper) {
  const columns = Math.round(plotPx() * ratio), band = Math.max(1, Math.ceil(3 / view.rowPx));
  const yTop = Math.max(AXIS, top), yBottom = Math.min(height, top + t.ranks * view.rowPx), rowsPx = Math.round((yBottom - yTop) * ratio);
  if (rowsPx < 1 || columns < 1) return;
  const classes = 4 + causes.length, image = context.createImageData(columns, rowsPx), pixels = new Uint32Array(image.data.buffer);
  pixels.fill(packed(paper));
  const inks = [...kinds.slice(0, 4).map((kind) => packed(colours[kind][0][0])), ...causes.map((cause) => packed(colours[cause][+dark]))];
  const ticksPerPx = (view.t1 - view.t0) / t.tick_s / columns, from = view.t0 / t.tick_s;
  const under = t.overview && ticksPerPx >= t.overview.ticks * 0.5 ? cellsUnder(t.overview, from, ticksPerPx, columns) : null;
  const acc = Array.from({ length: classes }, () => new Float32Array(columns));
  for (let row = Math.floor(first / band) * band; row < last; row += band) {
    const end = Math.min(row + band, t.ranks);
    for (const cells of acc) cells.fill(0);
    if (under) addOverview(t.overview, row, end, under, acc);
    else for (let rank = row; rank < end; rank++) {
      eachInterval(t, rank, t0, t1, (code, a, b, weight) => spread(acc[code], 0, columns, (a - from) / ticksPerPx, (b - from) / ticksPerPx, weight));
    }
    const foot = top + row * view.rowPx + (band > 1 ? (end - row) * view.rowPx : s.box);
    const y1 = Math.round((foot - yTop) * ratio), y0 = Math.round((top + row * view.rowPx - yTop) * ratio), rowPx = y1 - y0;
    for (let x = 0; x < columns; x++) {
      let sum = 0, y = y1;
      for (let code = 0; code < (show.bubbles ? classes : 4); code++) {
        sum += acc[code][x] / (end - row);
        const upto = Math.max(y0, y1 - Math.round(Math.min(sum, 1) * rowPx));
        for (; y > upto; y--) if (y - 1 >= 0 && y - 1 < rowsPx) pixels[(y - 1) * columns + x] = inks[code];
      }
    }
  }
  context.putImageData(image, Math.round(GUTTER * ratio), Math.round(yTop * ratio));
}

// Which cells of the overview lie under each pixel column, as half-open ranges.
function cellsUnder({ columns: cells, ticks }, from, ticksPerPx, columns) {
  const first = new Int32Array(columns), last = new Int32Array(columns);
  for (let x = 0; x < columns; x++) {
    const a = Math.floor((from + x * ticksPerPx) / ticks), b = Math.max(a + 1, Math.floor((from + (x + 1) * ticksPerPx) / ticks));
    first[x] = Math.max(0, Math.min(a, cells));
    last[x] = Math.max(0, Math.min(b, cells));
  }
  return { first, last };
}

// Adds the ranks row .. end to the pixel columns: first rank upon rank, cell by cell, then once from cells to pixels.
function addOverview({ columns: cells, table }, row, end, { first, last }, acc) {
  const low = first[0], high = last[last.length - 1];
  for (let code = 0; code < table.length; code++) {
    if (!table[code]) continue;
    const source = table[code], target = acc[code], sums = new Float32Array(cells);
    for (let rank = row; rank < end; rank++) for (let i = low, at = rank * cells + low; i < high; i++, at++) sums[i] += source[at];
    for (let x = 0; x < first.length; x++) {
      let sum = 0;
      for (let i = first[x]; i < last[x]; i++) sum += sums[i];
      if (sum) target[x] = sum / (last[x] - first[x]);
    }
  }
}

function drawSync(t, top, first, last, s) {
  context.fillStyle = lines.sync[+dark];
  for (let i = 0; i < t.sync.start.length; i++) {
    const rank = t.sync.rank[i];
    if (rank < first || rank >= last) continue;
    const x = xOf(t.sync.start[i] * t.tick_s), h = Math.max(2, s.box / 4);
    context.fillRect(x, top + rank * view.rowPx + s.box - h, xOf(t.sync.end[i] * t.tick_s) - x, h);
  }
}

function drawMemory(t, top, first, last, s) {
  if (!t.memoryTime.length || s.memory < 2) return;
  context.lineWidth = 1;
  for (let rank = first; rank < last; rank++) {
    const foot = top + rank * view.rowPx + s.box + s.lane + s.memory, px = (s.memory - 2) / t.memory_top;
    const low = t.memoryBounds[rank], high = t.memoryBounds[rank + 1];
    const start = Math.max(low, firstEndingAfter(t.memoryTime, low, high, view.t0 / t.tick_s) - 1);
    context.fillStyle = lines.memory[+dark];
    let most = 0, mostX = -1;
    for (let i = start; i < high; i++) {
      const x = xOf(t.memoryTime[i] * t.tick_s), next = xOf(i + 1 < high ? t.memoryTime[i + 1] * t.tick_s : t.makespan_s);
      if (x > width) break;
      // Steps thinner than a pixel join; the highest wins, as a cap is broken by peaks.
      const h = t.memorySize[i] * px;
      if (Math.floor(x) === mostX && h <= most) continue;
      mostX = Math.floor(x); most = h;
      context.fillRect(x, foot - h, Math.max(next - x, 1), h);
    }
    state.curves++;
    if (t.caps) {
      context.strokeStyle = lines.cap[+dark]; context.setLineDash([5, 3]);
      const y = foot - t.caps[rank] / t.memory_unit * px;
      context.beginPath(); context.moveTo(xOf(0), y); context.lineTo(xOf(t.makespan_s), y); context.stroke(); context.setLineDash([]);
    }
  }
}

function drawTransfers(t, top, first, last, t0, t1, s) {
  const { from, to, start, end, kind, longest } = t.transfer;
  const low = firstEndingAfter(start, 0, start.length, t0 - longest - 1), high = firstEndingAfter(start, low, start.length, t1);
  const lanes = show.transfers === "lanes";
  if (!lanes && (high - low > MOST_ARROWS * 4 || view.rowPx < 4)) return;
  if (lanes && (!s.lane || high - low > 400000)) return;
  for (let code = 0; code < 2; code++) {
    context.strokeStyle = context.fillStyle = lines[code ? "gradient" : "activation"][+dark];
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
      if (Math.max(a, b) < first || Math.min(a, b) >= last || state.arrows > MOST_ARROWS) continue;
      state.arrows++;
      const down = b > a, ya = top + a * view.rowPx + (down ? s.box : 0), yb = top + b * view.rowPx + (down ? 0 : s.box);
      context.moveTo(xa, ya); context.lineTo(xb, yb);
      const angle = Math.atan2(yb - ya, xb - xa);
      for (const turn of [2.7, -2.7]) { context.moveTo(xb, yb); context.lineTo(xb + 5 * Math.cos(angle + turn), yb + 5 * Math.sin(angle + turn)); }
    }
    if (lanes) context.fill(); else context.stroke();
  }
}

function drawCritical(t, top, first, last, t0, t1, s, boxes) {
  context.strokeStyle = lines.critical[+dark]; context.lineWidth = 2;
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

// --- pointing --------------------------------------------------------------------------------------------------------

function pick(x, y) {
  if (x < GUTTER || y < AXIS) return null;
  for (const { t, top, bottom } of panels()) {
    if (y < top || y >= bottom) continue;
    const rank = Math.floor((y - top) / view.rowPx), time = timeOf(x) / t.tick_s;
    const i = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], time);
    if (i < t.bounds[rank + 1] && t.start[i] <= time) return { t, rank, action: i, x, y };
    const j = firstEndingAfter(t.idle.end, t.idle.bounds[rank], t.idle.bounds[rank + 1], time);
    if (j < t.idle.bounds[rank + 1] && t.idle.start[j] <= time) return { t, rank, idle: j, x, y };
    return null;
  }
  return null;
}

function describe({ t, rank, action: i, idle: j }) {
  const span = (start, end) => `${secondsText(start * t.tick_s)} to ${secondsText(end * t.tick_s)} (${secondsText((end - start) * t.tick_s)})`;
  if (i === undefined) return `${t.row} ${rank}: idle, ${causeNames[causes[t.idle.cause[j]]]}\n${span(t.idle.start[j], t.idle.end[j])}`;
  const kind = t.kind[i] & 7, chunk = t.chunks > 1 ? `, chunk ${t.chunkOf[t.stage[i]]}` : "";
  const what = kind === 4
    ? `F${t.batch[i]} on stage ${t.stage[i]} with B${t.backwardBatch[i]} on stage ${t.backwardStage[i]}`
    : `${kinds[kind]}${t.batch[i]}: ${kindNames[kinds[kind]]} of micro-batch ${t.batch[i]}, stage ${t.stage[i]}${chunk}`;
  const slack = t.slack.length && !(t.kind[i] & 8) ? `\nslack ${secondsText(t.slack[i] * t.tick_s)}` : "";
  return `${t.row} ${rank}: ${what}\n${span(t.start[i], t.end[i])}${slack}${t.kind[i] & 8 ? "\non the critical path" : ""}${memoryAt(t, rank, t.start[i])}`;
}

function memoryAt(t, rank, time) {
  if (!t.memoryTime.length) return "";
  const i = firstEndingAfter(t.memoryTime, t.memoryBounds[rank], t.memoryBounds[rank + 1], time) - 1;
  return i < t.memoryBounds[rank] ? "" : `\nmemory ${bytesText(t.memorySize[i] * t.memory_unit)}`;
}

function point(found) {
  hover = found;
  state.hover = found ? { text: describe(found), rank: found.rank, action: found.action ?? null } : null;
  if (found) { tip.textContent = state.hover.text; tip.style.display = "block"; placeTip(); } else tip.style.display = "none";
  redraw();
}

function placeTip() {
  if (!hover) return;
  let { x, y } = hover;
  if (hover.pinned) {
    const panel = panels().find(({ t }) => t === hover.t);
    x = Math.max(GUTTER, xOf(hover.t.start[hover.action] * hover.t.tick_s)); y = panel.top + (hover.rank + 1) * view.rowPx;
  }
  tip.style.left = `${Math.max(4, Math.min(x + 14, width - tip.offsetWidth - 6))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, height - tip.offsetHeight - 6))}px`;
}

function drawHover(top, s, ink) {
  const { t, rank, action: i, idle: j } = hover;
  const [start, end] = i === undefined ? [t.idle.start[j], t.idle.end[j]] : [t.start[i], t.end[i]];
  const x = xOf(start * t.tick_s);
  context.strokeStyle = ink; context.lineWidth = 2;
  context.strokeRect(x, top + rank * view.rowPx + 1, Math.max(xOf(end * t.tick_s) - x, 1), Math.max(s.box - 2, 1));
}

// To the next or previous action of the rank, for readers without a mouse; the view follows.
function step(by) {
  const t = hover?.t ?? timelines[0], rank = hover?.rank ?? 0;
  let i = hover?.action ?? t.bounds[rank] - (by > 0 ? 1 : 0);
  i = Math.min(t.bounds[rank + 1] - 1, Math.max(t.bounds[rank], i + by));
  const start = t.start[i] * t.tick_s, end = t.end[i] * t.tick_s, span = view.t1 - view.t0;
  if (start < view.t0 || end > view.t1) { view.t0 = start - span / 3; view.t1 = view.t0 + span; }
  point({ t, rank, action: i, pinned: true, x: 0, y: 0 });
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, y: event.offsetY }; canvas.setPointerCapture(event.pointerId); canvas.classList.add("dragging"); });
canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("dragging"); });
canvas.addEventListener("pointermove", (event) => {
  if (drag) {
    const by = (event.offsetX - drag.x) / plotPx() * (view.t1 - view.t0);
    view.t0 -= by; view.t1 -= by; view.top -= event.offsetY - drag.y;
    drag = { x: event.offsetX, y: event.offsetY };
    redraw();
  } else point(pick(event.offsetX, event.offsetY));
});
canvas.addEventListener("pointerleave", () => { if (!hover?.pinned) point(null); });
canvas.addEventListener("dblclick", fit);
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const amount = (event.deltaY || event.deltaX) * (event.deltaMode === 1 ? 30 : 1);
  if (event.shiftKey) { const by = amount / plotPx() * (view.t1 - view.t0); view.t0 += by; view.t1 += by; redraw(); }
  else if (event.altKey) zoomRows(Math.exp(-amount * 0.002), event.offsetY);
  else zoom(Math.exp(Math.max(-300, Math.min(300, amount)) * 0.002), event.offsetX);
}, { passive: false });

const actions = {
  fit, in: () => zoom(0.6, GUTTER + plotPx() / 2), out: () => zoom(1 / 0.6, GUTTER + plotPx() / 2),
  bubbles: () => toggle("bubbles"), memory: () => toggle("memory"), critical: () => toggle("critical"),
  transfers: () => { const choices = ["none", "arrows", "lanes"]; show.transfers = choices[(choices.indexOf(show.transfers) + 1) % 3]; chosen(); },
  keys: () => { const help = byId("help"), open = help.style.display !== "block"; help.style.display = open ? "block" : "none"; byId("keys").setAttribute("aria-expanded", open); resize(); },
};
for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
const pan = (share) => () => { const by = share * (view.t1 - view.t0); view.t0 += by; view.t1 += by; redraw(); };
const scroll = (px) => () => { view.top += px; redraw(); };
const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, "0": fit, Home: fit, ArrowLeft: pan(-0.15), ArrowRight: pan(0.15), ArrowUp: scroll(-60), ArrowDown: scroll(60),
  "[": () => zoomRows(0.8, AXIS), "]": () => zoomRows(1.25, AXIS), n: () => step(1), p: () => step(-1),
  b: actions.bubbles, t: actions.transfers, m: actions.memory, c: actions.critical, "?": actions.keys, Escape: () => point(null),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || !keys[event.key] || !state.ready) return;
  event.preventDefault();
  keys[event.key]();
});

function toggle(name) { if (!byId(name).disabled) { show[name] = !show[name]; chosen(); if (name === "memory" && show.memory) view.rowPx = Math.max(view.rowPx, CURVE_ROW_PX); } }

function chosen() {
  for (const name of ["bubbles", "memory", "critical"]) byId(name).setAttribute("aria-pressed", show[name]);
  byId("transfers").setAttribute("aria-pressed", show.transfers !== "none");
  byId("transfers").textContent = show.transfers === "none" ? "Transfers" : `Transfers: ${show.transfers}`;
  legend();
  redraw();
}

// Only what the timelines contain and the switches show.
function legend() {
  const entries = META.present.kinds.map((kind) => [colours[kind][0][0], kindNames[kind]]);
  if (META.present.lighter) entries.push([colours.F.at(-1)[0], META.present.lighter]);
  if (show.bubbles) entries.push(...META.present.causes.map((cause) => [colours[cause][+dark], causeNames[cause]]));
  if (META.present.sync) entries.push([lines.sync[+dark], "gradient synchronisation"]);
  if (show.transfers !== "none") entries.push(...META.present.transfers.map((name) => [lines[name][+dark], `${name} transfer`]));
  if (show.memory) { entries.push([lines.memory[+dark], "memory in use"]); if (META.present.caps) entries.push([lines.cap[+dark], "memory cap"]); }
  if (show.critical) entries.push([lines.critical[+dark], "critical path"]);
  byId("legend").replaceChildren(...entries.map(([colour, name]) => {
    const entry = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = colour;
    entry.append(swatch, name);
    return entry;
  }));
}

function resize() {
  const refit = state.ready && Math.abs(view.rowPx - fitRowPx()) < 1e-6;
  const area = byId("stage").getBoundingClientRect();
  width = area.width; height = area.height; ratio = Math.min(2, devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  if (refit) view.rowPx = fitRowPx();
  if (state.ready) redraw();
}

function theme() { dark = META.theme === "dark" || (META.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches); legend(); if (state.ready) redraw(); }

document.documentElement.className = META.theme;
byId("title").textContent = META.title;
byId("notes").textContent = META.notes.join(" ");
if (META.table.length) byId("table").replaceChildren(...META.table.map((cells, number) => {
  const row = document.createElement("tr");
  row.append(...cells.map((text) => Object.assign(document.createElement(number ? "td" : "th"), { textContent: text })));
  return row;
}));
if (!META.present.transfers.length) byId("transfers").disabled = true;
if (!META.present.memory) byId("memory").disabled = true;
if (!META.present.critical) byId("critical").disabled = true;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
addEventListener("resize", resize);
theme();
chosen();
resize();
if (typeof DecompressionStream === "undefined") byId("status").textContent = "This browser is too old to open the picture: it lacks DecompressionStream (2023).";
else open().catch((error) => { byId("status").textContent = `can't open the picture: ${error.message}`; state.error = String(error); });
