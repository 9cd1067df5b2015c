// What to plan: model, cluster and batch, chosen or dropped as files.
const DEFAULTS = { model: "llama-3-8b", cluster: "h100:2", batch: "128", seq_length: "8192", precision: "bf16", framework: "megatron" };

function paintForm() {
  const options = (names) => names.map((name) => make("option", { value: name }, name));
  const number = (id, label, attributes = {}) => make("label", {}, label, make("input", { id, type: "number", min: 1, step: 1, ...attributes }));
  const select = (id, label, names) => make("label", {}, label, make("select", { id }, ...options(names)));
  byId("ask").replaceChildren(
    make("fieldset", {}, make("legend", {}, "Model"),
      make("label", {}, "Name, also of the Hugging Face hub", make("input", { id: "model", list: "models", autocomplete: "off", spellcheck: "false" })),
      make("datalist", { id: "models" }, ...choices.models.map((name) => make("option", { value: name }))),
      make("label", {}, "Or a config.json or cluster file", make("input", { type: "file", id: "file", accept: ".json,.yaml,.yml" })),
      make("details", { id: "shape" }, make("summary", {}, "Change its shape"), make("div", { id: "shape-steppers" }))),
    make("fieldset", {}, make("legend", {}, "Cluster"),
      make("div", { class: "two" }, select("kind", "Kind of node", choices.clusters), number("nodes", "Nodes")),
      number("devices", "GPUs to use at most", { placeholder: "all" })),
    make("fieldset", {}, make("legend", {}, "Batch"),
      make("div", { class: "two" }, number("seq_length", "Tokens per sequence"), number("batch", "Sequences per step")),
      make("div", { class: "two" }, select("precision", "Precision", choices.precisions), select("framework", "Framework", choices.frameworks))),
    make("button", { class: "main", type: "submit", id: "find" }, "Find configurations"),
    make("div", { class: "progress", id: "progress", hidden: true }));
  fillForm();
}

// Writes the address into the form. A loaded file has its title there, and its name in the address.
function fillForm() {
  const items = { ...DEFAULTS, ...state.problem };
  byId("model").value = state.titles[items.model] ?? items.model;
  const [kind, nodes] = items.cluster.split(":");
  byId("kind").querySelectorAll(".loaded").forEach((option) => option.remove());
  if (!choices.clusters.includes(kind)) byId("kind").prepend(make("option", { value: kind, class: "loaded" }, state.titles[kind] ?? kind));
  byId("kind").value = kind;
  byId("nodes").value = nodes ?? (choices.clusters.includes(kind) ? "2" : "");
  byId("nodes").disabled = !choices.clusters.includes(kind);
  for (const name of ["devices", "seq_length", "batch", "precision", "framework"]) byId(name).value = items[name] ?? "";
}

function askedProblem() {
  const value = (id) => byId(id).value.trim();
  const named = Object.fromEntries(Object.entries(state.titles).map(([name, title]) => [title, name]));
  const model = named[value("model")] ?? value("model");
  // A changed shape belongs to one model.
  const shape = model === (state.problem.model ?? DEFAULTS.model) ? picked(state.problem, choices.shape) : {};
  const isPreset = choices.clusters.includes(value("kind"));
  const fields = { model, ...shape, cluster: isPreset ? `${value("kind")}:${value("nodes") || 2}` : value("kind") };
  for (const name of ["devices", "seq_length", "batch", "precision", "framework"]) fields[name] = value(name);
  return picked(fields, PROBLEM);
}

const SHAPE_LABELS = { layers: "layers", hidden: "width", heads: "heads", experts: "experts" };
const SHAPE_STEPS = { layers: byOne, hidden: (value, way) => Math.max(128, value + 128 * way), heads: doubling, experts: doubling };
painted((facts) => {
  put(byId("shape-steppers"), ...choices.shape.filter((name) => facts.shape[name]).map((name) => stepper(name, SHAPE_LABELS[name], facts.shape[name], SHAPE_STEPS[name], (value) => {
    const before = state.problem;
    state.problem = { ...askedProblem(), [name]: value };
    Object.assign(state, { found: null, foundOf: "" });
    estimate(state.own, { beside: byId("shape-steppers") }).then(() => { if (byId("shape-steppers").querySelector(".wrong")) state.problem = before; });
  })));
  const isChanged = choices.shape.some((name) => state.problem[name]);
  byId("shape-file").hidden = !isChanged;
  byId("shape-file").href = `/transformers/transformer.json?${query(address())}`;
});

// Searches with progress. *Stop* ends the search, and the page keeps what it showed before.
let finding = null;
async function find({ choose = true, push = true } = {}) {
  if (finding) finding.abort();
  const mine = (finding = new AbortController());
  const words = make("p", {}), began = Date.now();
  let told = "searching…";
  const tick = () => { words.textContent = `${told} (${Math.round((Date.now() - began) / 1000)} s)`; };
  tick();
  const ticking = setInterval(tick, 500);
  let name = null;
  const halt = make("button", { type: "button", id: "halt", disabled: true, onclick: () => { halt.disabled = true; stop(name); } }, "Stop");
  byId("progress").replaceChildren(make("progress", { "aria-label": "The search is running" }), words, halt);
  byId("progress").hidden = false;
  byId("empty").hidden = true;
  wrong(null);
  const problem = askedProblem();
  let error = null;
  try {
    const found = await streamed(`/transformers/search/search?${query(problem)}`, {
      signal: mine.signal,
      named: (given) => { name = given; halt.disabled = false; },
      told: (progress) => { told = progress.words; },
    });
    state.problem = problem;
    Object.assign(state, { found, foundOf: query(problem) });
    if (choose) await estimate(found.rows[0].items, { isBase: true, push });
    else paintList();
    say(`${several(found.rows.length, "configuration")} found`);
  } catch (failure) {
    if (failure.name === "AbortError") return;
    error = failure.said ?? OFFLINE;
  } finally {
    clearInterval(ticking);
  }
  if (mine === finding) {
    finding = null;
    byId("progress").hidden = true;
    byId("empty").hidden = Boolean(state.facts);
    if (error) wrong(error, byId("ask"));
  }
}

// A file is a cluster if it has the key of cluster files, and a transformer otherwise.
async function load(file) {
  const text = await file.slice(0, 4096).text();
  const kind = text.includes("hpgo_cluster") || /^\s*nodes:/m.test(text) ? "cluster" : "config";
  const answer = await fetch(`/plan/files?kind=${kind}&name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
  const said = await answer.text();
  if (!answer.ok) return wrong(JSON.parse(said).error, byId("ask"));
  wrong(null);
  state.titles[said] = file.name;
  state.problem = { ...askedProblem(), [kind === "config" ? "model" : "cluster"]: said };
  for (const name of kind === "config" ? choices.shape : []) delete state.problem[name];
  fillForm();
  say(`${file.name} is loaded`);
}
