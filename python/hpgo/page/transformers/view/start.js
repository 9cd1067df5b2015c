// Starts with what the address asks for, and follows it.
async function arrive() {
  readAddress();
  fillForm();
  for (const name of SIZE) byId(name).value = state.view[name] ?? "";
  if (!state.problem.model) return;
  state.problem = askedProblem(); // with the defaults that the address leaves out
  if (Object.keys(state.own).length) {
    const isListed = state.foundOf === query(state.problem);
    if (!isListed) state.found = null;
    await estimate(state.own, { push: false });
    if (!isListed) await find({ choose: false });
  } else await find({ push: false }); // or *Back* would lead to this address again and again
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
