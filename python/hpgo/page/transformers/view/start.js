// Starts with what the address asks for, and follows it.
async function arrive() {
  readAddress();
  fillForm();
  for (const name of SIZE) byId(name).value = state.view[name] ?? "";
  if (!state.problem.model) return;
  if (Object.keys(state.own).length) {
    await estimate(state.own, { push: false, isBase: !state.base });
    // The list belongs to the problem, so another configuration of it keeps the list.
    if (!state.found) await find({ choose: false });
  } else await find();
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    const label = button.textContent;
    button.textContent = "Copied";
    say("copied");
    setTimeout(() => { button.textContent = label; }, 1500);
  } catch {
    prompt("Copy this text", text);
  }
}

readAddress();
paintForm();
paintSize();
painted((facts) => {
  byId("share").disabled = byId("command").disabled = false;
  byId("command").title = facts.command;
  for (const [id, part] of [["plan-file", "llm-plan.json"], ["job", "job.zip"]]) {
    byId(id).hidden = Boolean(facts.why);
    byId(id).href = `/transformers/${part}?${query(address())}`;
  }
});
byId("share").addEventListener("click", () => copy(byId("share"), location.href));
byId("command").addEventListener("click", () => copy(byId("command"), state.facts.command));
byId("ask").addEventListener("submit", (event) => { event.preventDefault(); find(); });
byId("file").addEventListener("change", (event) => { if (event.target.files.length) load(event.target.files[0]); });
byId("kind").addEventListener("change", () => { byId("nodes").disabled = !choices.clusters.includes(byId("kind").value); byId("nodes").value ||= 2; });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files.length) load(event.dataTransfer.files[0]); });
addEventListener("keydown", (event) => { if (event.key === "Escape") unlight(); });
addEventListener("popstate", arrive);
arrive();
window.hpgoTransformers = state;
