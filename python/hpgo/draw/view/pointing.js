// The action or idle time under the pointer, and its description.

function pick(x, y) {
  if (x < GUTTER || y < AXIS) return null;
  const panel = panels().find(({ top, bottom }) => y >= top && y < bottom);
  const found = panel && spot(panel.t, Math.floor((y - panel.top) / view.rowPx), timeOf(x) / panel.t.tick_s);
  return found && { ...found, x, y };
}

// Return the action or the idle time of a rank at a time in ticks.
function spot(t, rank, time) {
  const i = firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], time);
  if (i < t.bounds[rank + 1] && t.start[i] <= time) return { t, rank, action: i };
  const j = firstEndingAfter(t.idle.end, t.idle.bounds[rank], t.idle.bounds[rank + 1], time);
  return j < t.idle.bounds[rank + 1] && t.idle.start[j] <= time ? { t, rank, idle: j } : null;
}

// Return start and end of an action or idle time, in ticks.
function spanOf({ t, action: i, idle: j }) { return i === undefined ? [t.idle.start[j], t.idle.end[j]] : [t.start[i], t.end[i]]; }

function describe({ t, rank, action: i, idle: j }) {
  const span = (start, end) => `${secondsText(start * t.tick_s)} to ${secondsText(end * t.tick_s)} (${secondsText((end - start) * t.tick_s)})`;
  if (i === undefined) return `${nameOf(t, rank)}: idle, ${causeNames[causes[t.idle.cause[j]]]}\n${span(t.idle.start[j], t.idle.end[j])}`;
  const kind = t.kind[i] & 7, virtualStage = t.virtual_stages_per_rank > 1 ? `, virtual stage ${t.virtualStageOf[t.stage[i]]}` : "";
  const what = kind === 4
    ? `F${t.batch[i]} on stage ${t.stage[i]} with B${t.backwardBatch[i]} on stage ${t.backwardStage[i]}`
    : `${kinds[kind]}${t.batch[i]}: ${kindNames[kinds[kind]]} of micro-batch ${t.batch[i]}, stage ${t.stage[i]}${virtualStage}`;
  const slack = t.slack.length && !(t.kind[i] & 8) ? `\nslack ${secondsText(t.slack[i] * t.tick_s)}` : "";
  return `${nameOf(t, rank)}: ${what}\n${span(t.start[i], t.end[i])}${slack}${t.kind[i] & 8 ? "\non the critical path" : ""}${memoryAt(t, rank, t.start[i])}`;
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
    x = Math.max(GUTTER, xOf(spanOf(hover)[0] * hover.t.tick_s)); y = panel.top + (hover.rank + 1) * view.rowPx;
  }
  tip.style.left = `${Math.max(4, Math.min(x + 14, width - tip.offsetWidth - 6))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, height - tip.offsetHeight - 6))}px`;
}

function drawHover(top, s, ink) {
  const { t, rank } = hover, [start, end] = spanOf(hover);
  const x = xOf(start * t.tick_s);
  context.strokeStyle = ink; context.lineWidth = 2;
  context.strokeRect(x, top + rank * view.rowPx + 1, Math.max(xOf(end * t.tick_s) - x, 1), Math.max(s.box - 2, 1));
}

// Go to the next or previous action of the rank, for readers without a mouse. The view follows.
function step(by) {
  const t = hover?.t ?? timelines[0], rank = hover?.rank ?? 0;
  const from = hover?.action ?? firstEndingAfter(t.end, t.bounds[rank], t.bounds[rank + 1], hover ? spanOf(hover)[0] : 0) - (by > 0 ? 1 : 0);
  hold({ t, rank, action: Math.min(t.bounds[rank + 1] - 1, Math.max(t.bounds[rank], from + by)) });
}

// Go to the action or idle time before or after this one.
function walk(by) {
  const [start, end] = spanOf(hover), found = spot(hover.t, hover.rank, by > 0 ? end : start - 1);
  if (found) hold(found);
}

// Go to the row above or below, or to the next timeline after the last row, at the time at which this item was reached.
function walkRows(by) {
  const number = timelines.indexOf(hover.t), next = hover.rank + by;
  const t = timelines[number + (next < 0 ? -1 : next >= hover.t.ranks ? 1 : 0)];
  if (!t) return;
  const rank = t === hover.t ? next : by > 0 ? 0 : t.ranks - 1, time = hover.time_s / t.tick_s;
  const last = t.bounds[rank + 1] - 1;
  hold(spot(t, rank, time) ?? { t, rank, action: Math.min(last, firstEndingAfter(t.end, t.bounds[rank], last, time)) }, hover.time_s);
}

// Describe an item, and keep it and its row in view. `time_s` is the time at which `walkRows` continues.
function hold(found, time_s) {
  const [start, end] = spanOf(found).map((ticks) => ticks * found.t.tick_s), span = view.t1 - view.t0;
  if (start < view.t0 || end > view.t1) { view.t0 = start - span / 3; view.t1 = view.t0 + span; }
  const top = panels().find(({ t }) => t === found.t).top + found.rank * view.rowPx;
  view.top += Math.min(0, top - HEAD - AXIS) || Math.max(0, top + view.rowPx - height);
  point({ ...found, pinned: true, time_s: time_s ?? (start + end) / 2, x: 0, y: 0 });
}
