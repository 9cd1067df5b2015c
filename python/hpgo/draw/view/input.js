// Mouse, keys, switches, the reader's theme, and the start of it all.

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
