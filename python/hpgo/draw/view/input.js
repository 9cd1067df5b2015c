// Mouse, keys, switches, color theme, and the start of the page.

// One finger or the mouse pans, two fingers zoom, and a tap shows what hovering shows.
const held = new Map();
let tapping = false, printing = false;
const at = (event) => ({ x: event.offsetX, y: event.offsetY });
canvas.addEventListener("pointerdown", (event) => {
  held.set(event.pointerId, at(event));
  tapping = held.size === 1;
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("dragging");
});
canvas.addEventListener("pointermove", (event) => {
  const before = held.get(event.pointerId), now = at(event);
  if (!before) { if (event.pointerType === "mouse") point(pick(now.x, now.y)); return; }
  if (tapping && Math.hypot(now.x - before.x, now.y - before.y) < 6) return;
  tapping = false;
  const other = [...held].find(([id]) => id !== event.pointerId)?.[1];
  if (other) zoom(Math.min(2, Math.max(0.5, apart(before, other) / apart(now, other))), (now.x + other.x) / 2);
  else { const by = (now.x - before.x) / plotPx() * (view.t1 - view.t0); view.t0 -= by; view.t1 -= by; view.top -= now.y - before.y; redraw(); }
  held.set(event.pointerId, now);
});
const apart = (a, b) => Math.max(10, Math.hypot(a.x - b.x, a.y - b.y));
for (const ends of ["pointerup", "pointercancel"]) canvas.addEventListener(ends, (event) => {
  held.delete(event.pointerId);
  if (!held.size) canvas.classList.remove("dragging");
  if (tapping && ends === "pointerup") point(pick(event.offsetX, event.offsetY));
  tapping = false;
});
canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && !hover?.pinned) point(null); });
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
  keys: () => help(byId("help").hidden),
};
function help(open) { byId("help").hidden = !open; byId("keys").setAttribute("aria-expanded", open); }
for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
const pan = (share) => () => { const by = share * (view.t1 - view.t0); view.t0 += by; view.t1 += by; redraw(); };
const scroll = (px) => () => { view.top += px; redraw(); };
const walking = (walks, pans) => () => (hover?.pinned ? walks : pans)();
const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, "0": fit, Home: fit, 
  ArrowLeft: walking(() => walk(-1), pan(-0.15)), ArrowRight: walking(() => walk(1), pan(0.15)),
  ArrowUp: walking(() => walkRows(-1), scroll(-60)), ArrowDown: walking(() => walkRows(1), scroll(60)),
  "[": () => zoomRows(0.8, AXIS), "]": () => zoomRows(1.25, AXIS), n: () => step(1), p: () => step(-1),
  b: actions.bubbles, t: actions.transfers, m: actions.memory, c: actions.critical, "?": actions.keys,
  Escape: () => (hover ? point(null) : help(false)),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || !state.ready) return;
  if (byId("foot").contains(event.target) && /^(Arrow|Home)/.test(event.key)) return; // these keys scroll the footer
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

// List only entries that the timelines contain and the switches show.
function legend() {
  const entries = META.present.kinds.map((kind) => [kindNames[kind], swatch(kind)]);
  if (META.present.bar) entries.push([META.present.bar, swatch("F", (paint) => { paint.fillStyle = marks.virtual_stage.fill[+dark]; paint.fillRect(0, 0, 16, 3); })]);
  if (show.bubbles) entries.push(...META.present.causes.map((cause) => [causeNames[cause], swatch(`idle-${cause}`)]));
  if (META.present.sync) entries.push(["gradient reduction", swatch("sync")]);
  if (show.transfers === "arrows") entries.push(...META.present.transfers.map((name) => [`${name} transfer`, swatch("", dashed(name, 5))]));
  if (show.transfers === "lanes") entries.push(...META.present.transfers.map((name) => [`sending ${name}s`, swatch(`lane-${name}`)]));
  if (show.memory) { entries.push(["memory in use", swatch("memory")]); if (META.present.caps) entries.push(["memory cap", swatch("free", dashed("cap", 5))]); }
  if (show.critical) entries.push(["critical path", swatch("", (paint) => { paint.strokeStyle = lines.critical.colour[+dark]; paint.lineWidth = 2; paint.strokeRect(1, 1, 14, 8); })]);
  byId("legend").replaceChildren(...entries.map(([name, picture]) => {
    const entry = document.createElement("span");
    entry.append(picture, name);
    return entry;
  }));
}

function resize() {
  const refit = state.ready && Math.abs(view.rowPx - fitRowPx()) < 1e-6;
  const area = byId("stage").getBoundingClientRect();
  width = printing ? PAPER_PX : area.width;
  height = printing ? Math.min(area.height, AXIS + contentPx()) : area.height;
  ratio = printing ? 3 : Math.min(2, devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  if (refit && !printing) view.rowPx = fitRowPx();
  if (state.ready) redraw();
}

function theme() {
  document.documentElement.className = printing ? "light" : META.theme;
  dark = !printing && (META.theme === "dark" || (META.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches));
  legend();
  if (state.ready) redraw();
}

// Print in light colors, as wide as a page and in finer pixels. Draw at once, because the browser does not wait for a frame.
for (const [moment, on] of [["beforeprint", true], ["afterprint", false]]) addEventListener(moment, () => {
  printing = on;
  theme();
  resize();
  if (state.ready) draw();
});

// An embedding page already has the title and the definitions, so hide them here.
const within = self !== top;
byId("title").hidden = within;
byId("title").textContent = META.title;
byId("notes").textContent = META.notes.slice(0, within ? -1 : undefined).join(" ");
byId("foot").hidden = within && META.notes.length < 2 && !META.table.length;
if (META.table.length) byId("table").replaceChildren(...META.table.map((cells, number) => {
  const row = document.createElement("tr");
  row.append(...cells.map((text, at) => number && at
    ? Object.assign(document.createElement("td"), { textContent: text })
    : Object.assign(document.createElement("th"), { textContent: text || "schedule", scope: number ? "row" : "col" })));
  return row;
}));
if (!META.present.transfers.length) byId("transfers").disabled = true;
if (!META.present.memory) byId("memory").disabled = true;
if (!META.present.critical) byId("critical").disabled = true;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
new ResizeObserver(resize).observe(byId("stage"));
theme();
chosen();
resize();
if (typeof DecompressionStream === "undefined") byId("status").textContent = "This browser is too old to open the picture: it lacks DecompressionStream (2023).";
else open().catch((error) => { byId("status").textContent = `can't open the picture: ${error.message}`; state.error = String(error); });
