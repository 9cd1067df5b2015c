// What lies under the pointer, and what is said about it.

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
