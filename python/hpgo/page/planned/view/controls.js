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
    const offered = choices(facts);
    if (!offered.some(([choice]) => choice === value)) offered.push([value, value]);
    if (JSON.stringify(offered) !== control.offered) control.replaceChildren(...offered.map(([choice, text]) => make("option", { value: choice }, text)));
    control.offered = JSON.stringify(offered);
    control.value = value;
    control.disabled = isFixed();
  }
});
