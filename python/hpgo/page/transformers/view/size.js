// Days of a whole run against GPUs and cost, for each kind of node. A point becomes the configuration of the page.
const sizes = { found: null, finding: null };

function paintSize() {
  const text = (id, label, attributes) => make("label", {}, label, make("input", { id, autocomplete: "off", ...attributes }));
  put(byId("size"),
    make("form", { id: "size-form", onsubmit: (event) => { event.preventDefault(); findSizes(); } },
      text("tokens", "Tokens of the run", { placeholder: "like 1T" }), text("days", "Days at most", { placeholder: "any" }),
      text("max_gpus", "GPUs at most", { type: "number", min: 1, placeholder: "16384" }),
      text("hour_prices", "Price of a GPU-hour by kind", { placeholder: `like ${choices.kinds[0]}=2.5,${choices.kinds[1]}=3.5` }),
      make("button", { type: "submit", id: "find-sizes" }, "Compare clusters")),
    make("div", { class: "progress", id: "size-progress", hidden: true }), make("div", { id: "size-found" }));
  for (const name of SIZE) byId(name).value = state.view[name] ?? "";
}

async function findSizes() {
  if (sizes.finding) sizes.finding.abort();
  const mine = (sizes.finding = new AbortController());
  for (const name of SIZE) state.view[name] = byId(name).value.trim();
  const problem = askedProblem();
  let name = null;
  const words = make("p", {}, "searching…"), bar = make("progress", { max: 1, "aria-label": "Share of the sizes that are done" });
  const halt = make("button", { type: "button", disabled: true, onclick: () => { halt.disabled = true; stop(name); } }, "Stop");
  byId("size-progress").replaceChildren(bar, words, halt);
  byId("size-progress").hidden = false;
  wrong(null);
  try {
    sizes.found = await streamed(`/transformers/search/size?${query({ ...problem, ...picked(state.view, SIZE) })}`, {
      signal: mine.signal,
      named: (given) => { name = given; halt.disabled = false; },
      told: (progress) => { bar.value = progress.share; words.textContent = progress.words; },
    });
    state.problem = { ...state.problem, ...problem };
    writeAddress({ push: false });
    paintSizes();
  } catch (error) {
    if (error.name !== "AbortError") wrong(error.said ?? OFFLINE, byId("size-found"));
  }
  if (mine === sizes.finding) byId("size-progress").hidden = true;
}

// Takes a point into the planner: its cluster and batch become the problem, and its configuration the chosen one.
function take(point) {
  state.problem = { ...state.problem, ...picked(point.items, PROBLEM) };
  delete state.problem.devices;
  Object.assign(state, { found: null, foundOf: "" });
  fillForm();
  byId("main").scrollIntoView();
  return estimate(picked(point.items, OWN), { isBase: true });
}

const MARKS = ["M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "M-5,-5h10v10h-10z", "M0,-6L6,5H-6z", "M0,-6L6,0L0,6L-6,0z"];

// Both axes are logarithmic, since doubling the GPUs about halves the days.
function chart(found, title, of) {
  const width = 520, height = 280, left = 64, bottom = 36;
  const span = (values) => { const low = Math.log(Math.min(...values)), high = Math.log(Math.max(...values)); return (value) => (high > low ? (Math.log(value) - low) / (high - low) : 0.5); };
  const x = span(found.points.map((point) => point.days)), y = span(found.points.map(of));
  const at = (point) => [left + x(point.days) * (width - left - 20), height - bottom - y(of(point)) * (height - bottom - 20)];
  const end = (values, compare) => values.reduce((a, b) => (compare(a, b) ? a : b));
  const brief = (value) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
  const days = found.points.map((point) => point.days), amounts = found.points.map(of);
  const label = (text, place) => make("svg:text", place, text);
  return make("figure", {}, make("figcaption", {}, title), make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}; the table below has the numbers` },
    make("svg:path", { d: `M${left},10V${height - bottom}H${width - 10}`, class: "axis" }),
    label(brief(end(amounts, (a, b) => a > b)), { x: left - 8, y: 24, "text-anchor": "end" }), label(brief(end(amounts, (a, b) => a < b)), { x: left - 8, y: height - bottom, "text-anchor": "end" }),
    label(`${brief(end(days, (a, b) => a < b))} days`, { x: left, y: height - 14 }), label(`${brief(end(days, (a, b) => a > b))} days`, { x: width - 10, y: height - 14, "text-anchor": "end" }),
    ...found.points.map((point) => {
      const kind = found.kinds.indexOf(point.kind);
      const mark = make("svg:path", { d: MARKS[kind % MARKS.length], transform: `translate(${at(point)})`, class: `point is-stage-${kind % STAGE_FILLS}${point.is_answer ? " answer" : ""}`, onclick: () => take(point) });
      mark.append(make("svg:title", {}, `${point.gpus} GPUs of ${point.kind}: ${point.words.days} days, ${point.words.cost} ${found.priced ? "cost" : "GPU-hours"}`));
      return mark;
    })));
}

function paintSizes() {
  const { found } = sizes;
  const cost = found.priced ? "cost" : "GPU-hours";
  if (!found.points.length) return put(byId("size-found"), make("p", {}, "No configuration fits in memory on the clusters that were tried. Try other kinds of nodes."));
  const marks = found.kinds.map((kind, at) => make("span", {}, make("svg:svg", { viewBox: "-7 -7 14 14", width: 14, height: 14, "aria-hidden": "true" }, make("svg:path", { d: MARKS[at % MARKS.length], class: `point is-stage-${at % STAGE_FILLS}` })), kind));
  const rows = found.points.filter((point) => point.is_answer);
  const columns = ["kind", "GPUs", "days", "90 % range", cost, "batch", "configuration"];
  put(byId("size-found"),
    make("div", { class: "pair charts" }, chart(found, "GPUs against days", (point) => point.gpus), chart(found, `${cost} against days`, (point) => point.cost)),
    make("p", { class: "legend" }, ...marks, "outlined points are in the table"),
    make("p", {}, "The command of these clusters: ", make("code", {}, found.command)),
    rows.length ? make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Clusters" }, make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col", class: name === "configuration" ? "text" : null }, name)))),
      make("tbody", {}, ...rows.map((point) => make("tr", {},
        ...[point.kind, point.gpus.toLocaleString("en"), point.words.days, point.words.range, point.words.cost, point.items.batch].map((value) => make("td", {}, value)),
        make("td", { class: "text" }, make("button", { type: "button", class: "choose", onclick: () => take(point) }, point.words.name)))))))
      : make("p", {}, "No cluster that was tried is within the limit. Allow more days, or other kinds of nodes."));
}
