// What if: settings of the configuration, and what a change of them does to step and memory.
const DEGREES = [
  ["tp", "tp", doubling], ["cp", "cp", doubling], ["pp", "pp", doubling], ["vpp", "vpp", byOne], ["ep", "ep", doubling],
  ["dp", "dp", doubling], ["micro_batch_size", "micro-batch", doubling],
];
// Settings that describe one pipeline or one choice of recomputation, and mean nothing for another.
const FOLLOWS = {
  pp: ["first_rank_layers", "last_rank_layers", "pipeline_layout", "recompute_num_layers"],
  vpp: ["first_rank_layers", "last_rank_layers", "pipeline_layout", "recompute_num_layers"],
  recompute: ["recompute_num_layers", "recompute_modules"],
};

function changeSetting(name, value) {
  const config = state.facts.estimate.parallelism;
  const own = { ...state.own, [name]: value };
  for (const other of FOLLOWS[name] ?? []) delete own[other];
  if (name === "dp") {
    delete own.dp;
    delete own.gpus_per_node;
    own.gpus = String(config.tp * config.cp * config.pp * Number(value));
  }
  if ((name === "pp" && value === "1") || (name === "vpp" && value === "1")) for (const other of ["vpp", "pp_schedule"]) delete own[other];
  if (name === "recompute" && value === "none") delete own.recompute;
  return estimate(own, { beside: byId("effects") });
}

painted((facts) => {
  const config = facts.estimate.parallelism;
  const shown = DEGREES.filter(([name]) => name !== "ep" || facts.shape.experts);
  put(byId("settings"),
    ...shown.map(([name, label, next]) => stepper(name, label, config[name], next, (value) => changeSetting(name, value))),
    make("label", { class: "recompute" }, "recomputation", make("select", { "data-key": "recompute", onchange: (event) => changeSetting("recompute", event.target.value) },
      ...choices.recomputations.map((name) => make("option", { value: name, selected: name === config.recompute }, name)))));
  byId("settings").querySelector("select").value = config.recompute;
  for (const [name] of shown) byId("settings").querySelector(`[data-key="${name}-value"]`).value = config[name];
  byId("what-name").textContent = facts.words.name;
  put(byId("effects"), ...effects(facts));
  figures(facts);
});

const signed = (share) => `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(1)} %`;

function effects(facts) {
  const { base } = state;
  const said = facts.why ? [make("p", { class: "why" }, facts.why)] : [];
  if (base.words.name !== facts.words.name) {
    const step = facts.estimate.step_s / base.estimate.step_s - 1;
    const before = Object.fromEntries(base.terms.map((term) => [term.label, term]));
    const after = Object.fromEntries(facts.terms.map((term) => [term.label, term]));
    const moves = [...new Set([...Object.keys(before), ...Object.keys(after)])]
      .map((label) => ({ label, from: before[label], to: after[label], by: (after[label]?.share ?? 0) * facts.estimate.step_s - (before[label]?.share ?? 0) * base.estimate.step_s }))
      .sort((a, b) => Math.abs(b.by) - Math.abs(a.by)).slice(0, 3).filter((move) => Math.abs(move.by) > 5e-4 * base.estimate.step_s);
    said.push(make("p", {}, make("b", {}, `${signed(step)} step time`), ` and memory ${base.words.memory} → ${facts.words.memory}, against ${base.words.name}. `,
      moves.length ? `Largest changes: ${moves.map((move) => `${move.label} ${move.from?.text ?? "0 s"} → ${move.to?.text ?? "0 s"}`).join(", ")}. ` : "",
      make("button", { type: "button", "data-key": "back", onclick: () => estimate(base.items) }, "Back to it")));
  }
  for (const text of facts.caveats) said.push(make("p", { class: "caveat" }, text));
  return said;
}

function figures(facts) {
  const figure = (name, value, note, kind = "") => make("dl", { class: `figure ${kind}`, "data-name": name }, make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", { class: "note" }, note));
  put(byId("figures"),
    figure("step time", facts.words.step, `90 % range ${facts.words.range}`),
    figure("throughput", facts.words.throughput, "tokens/s per GPU"),
    figure("MFU", facts.words.utilization, facts.estimate.parallelism.pp > 1 ? `${facts.words.idle} of the step idle` : facts.words.micro_batches),
    figure("memory", facts.words.memory, facts.why ? `of ${facts.capacity}: does not fit` : `of ${facts.capacity}, ${facts.words.free} free`, facts.why ? "bad" : ""),
    figure("GPUs", String(facts.estimate.gpus), `stack ${facts.words.stack}`));
}
