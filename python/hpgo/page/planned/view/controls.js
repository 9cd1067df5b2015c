// How the plan runs: schedule, micro-batch and recomputation are priced as they are changed.
const LIVE = [
  ["schedule", "Schedule", (facts) => [...facts.controls.schedules.map((name) => [name, name]), ["auto", "auto: the best of all"]]],
  ["micro_batch", "Micro-batch, in samples", (facts) => [["", "the best"], ...facts.controls.micro_batches.map((size) => [`${size}`, `${size}: ${several(facts.controls.batch / size, "micro-batch")}`.replace("batchs", "batches")])]],
  ["recompute", "Recompute activations", () => [["no", "no"], ["yes", "yes"], ["auto", "whichever is better"]]],
];

function liveControls() {
  return LIVE.map(([name, label]) => make("label", {}, label, make("select", { id: name, name, "data-key": name, onchange: changedControl })));
}

async function changedControl(event) {
  if (!state.facts) return;
  const control = event.target;
  // A schedule may run other stages on the same devices.
  const done = await change({ [control.name]: control.value, regroup: control.name === "schedule" ? "1" : "" }, control);
  const beside = byId("wrong");
  if (!done && beside && state.facts) {
    beside.append(make("button", { type: "button", "data-key": "search-instead", onclick: () => find() }, "Find a plan for it"));
  }
}

painted((facts) => {
  for (const [name, , choices] of LIVE) {
    const control = byId(name);
    const value = `${facts.controls[name]}`;
    control.replaceChildren(...choices(facts).map(([choice, text]) => make("option", { value: choice }, text)));
    if (![...control.options].some((option) => option.value === value)) control.append(make("option", { value }, value));
    control.value = value;
    control.disabled = isFixed();
  }
});
