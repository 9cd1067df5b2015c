// What to plan: a model, a cluster and a batch, chosen or dropped as files.
const choices = state.offline ? null : JSON.parse(byId("choices").textContent);

function paintAsk() {
  const form = byId("ask");
  if (state.offline) {
    form.replaceChildren(
      make("fieldset", {}, make("legend", {}, "How it runs"), ...liveControls()),
      make("p", {}, "This page holds one plan, to look at. ", make("code", {}, "hpgo serve plan.json"), " opens the page that changes it and searches for better ones."));
    return;
  }
  const text = (name, label, attributes = {}) => make("label", {}, label, make("input", { name, id: name, ...attributes }));
  form.replaceChildren(
    make("fieldset", {}, make("legend", {}, "What to plan"),
      make("label", {}, "Model", make("select", { name: "model", id: "model" }, ...choices.models.map((name) => make("option", { value: name }, name)))),
      text("cluster", "Cluster, like h100:4", { list: "clusters", autocomplete: "off" }),
      make("datalist", { id: "clusters" }, ...choices.clusters.map((name) => make("option", { value: name }))),
      text("batch", "Global batch, in samples", { type: "number", min: 1, step: 1 }),
      text("devices", "Devices, the first of the cluster", { type: "number", min: 1, step: 1, placeholder: "all" }),
      make("details", {}, make("summary", {}, "Files and memory"),
        make("label", {}, "Open a plan, a profile or a cluster", make("input", { type: "file", id: "file", accept: ".json,.yaml,.yml,.txt" })),
        make("label", {}, "Optimizer", make("select", { name: "optimizer", id: "optimizer" }, ...choices.optimizers.map((name) => make("option", { value: name }, name)))),
        make("label", { class: "check" }, make("input", { type: "checkbox", name: "shard", id: "shard", value: "1" }), "Replicas share its state"),
        text("reserve", "Memory to leave alone on each device", { placeholder: "like 2 GB" }))),
    make("fieldset", {}, make("legend", {}, "How it runs"), ...liveControls()),
    make("button", { class: "main", type: "submit", id: "find" }, "Find the best plan"),
    make("div", { class: "progress", id: "progress", hidden: true }),
  );
  for (const [name, , options] of LIVE) {
    const start = { controls: { schedules: choices.schedules, micro_batches: [], batch: 1 } };
    byId(name).replaceChildren(...options(start).map(([value, words]) => make("option", { value }, words)));
  }
  byId("schedule").value = "eager_1f1b";
  fill(state.question);
}

// The form says what the address asks for.
function fill(question) {
  const model = byId("model");
  model.querySelectorAll(".loaded").forEach((option) => option.remove());
  if (question.plan) model.prepend(make("option", { value: "", class: "loaded" }, `${state.facts ? state.facts.model : "model"} of the plan`));
  else if (question.model && !choices.models.includes(question.model)) model.prepend(make("option", { value: question.model, class: "loaded" }, state.titles[question.model] ?? "loaded profile"));
  model.value = question.plan ? "" : question.model ?? "bert-48";
  byId("cluster").value = question.plan ? "" : state.titles[question.cluster] ?? question.cluster ?? "dapple-a";
  byId("cluster").placeholder = question.plan ? "as in the plan" : "";
  byId("batch").value = question.batch ?? (state.facts && question.plan ? state.facts.controls.batch : 64);
  byId("devices").value = question.devices ?? "";
  byId("optimizer").value = question.optimizer ?? choices.optimizers[0];
  byId("shard").checked = question.shard === "1";
  byId("reserve").value = question.reserve ?? "";
}

// The address that the form asks for.
function asked() {
  const named = Object.fromEntries(Object.entries(state.titles).map(([name, title]) => [title, name]));
  const value = (name) => byId(name).value.trim();
  if (!value("model") && state.question.plan) {
    const isOwn = !state.question.batch && Number(value("batch")) === state.facts?.controls.batch;
    return { plan: state.question.plan, batch: isOwn ? "" : value("batch"), devices: value("devices") };
  }
  return {
    model: value("model"), cluster: named[value("cluster")] ?? value("cluster"), batch: value("batch"), devices: value("devices"),
    optimizer: value("optimizer") === choices.optimizers[0] ? "" : value("optimizer"), shard: byId("shard").checked ? "1" : "", reserve: value("reserve"),
  };
}

state.titles = {};
painted((facts) => {
  const now = JSON.stringify([state.question, facts.model, facts.controls.batch]);
  if (!state.offline && now !== state.filled) fill(state.question); // or what a reader is writing would be lost
  state.filled = now;
});

// A file says by itself what it is: a plan opens, a profile or a cluster takes its place in the form.
async function load(file) {
  const text = (await file.slice(0, 4096).text());
  const kind = text.includes('"hpgo.plan"') ? "plan" : text.includes("hpgo_cluster") || /^\s*nodes:/m.test(text) ? "cluster" : "profile";
  const answer = await fetch(kind === "plan" ? `/plans?name=${encodeURIComponent(file.name)}` : `/plan/files?kind=${kind}&name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
  const said = await answer.text();
  if (!answer.ok) {
    const beside = kind === "plan" ? { message: new DOMParser().parseFromString(said, "text/html").querySelector(".error")?.textContent ?? said, hint: "" } : JSON.parse(said).error;
    return wrong(byId("file"), beside);
  }
  wrong(null);
  if (kind === "plan") return price({ plan: said }, byId("file"));
  state.titles[said] = file.name;
  const now = asked();
  if (now.plan) Object.assign(now, { plan: "", model: "bert-48", cluster: "dapple-a", batch: "64" });
  fill({ ...now, plan: undefined, [kind === "profile" ? "model" : "cluster"]: said });
  say(`${kind} ${file.name} is loaded`);
}
