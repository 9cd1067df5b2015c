// Begins with what the address asks for, and follows it.
async function arrive() {
  const items = itemsOf(location.search);
  state.question = questionOf(items);
  if (!items.plan && !items.model) {
    byId("empty").hidden = false;
    byId("columns").classList.add("empty");
    fill(state.question);
    return;
  }
  fill(state.question);
  if (items.plan || items.stages) await price(items, null, { push: false });
  else {
    for (const name of ["schedule", "recompute"]) if (items[name]) byId(name).value = items[name];
    await find();
  }
}

paintAsk();
painted(() => {
  if (state.offline) return;
  byId("share").disabled = false;
  byId("save").hidden = false;
  byId("save").href = `/plan/plan.json?${query(state.items)}`;
});

if (state.offline) {
  document.querySelectorAll("header nav a:not(:first-child), #undo, #redo, #share").forEach((one) => { one.hidden = true; });
  show(held.facts);
} else {
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); find(); });
  byId("file").addEventListener("change", (event) => { if (event.target.files.length) load(event.target.files[0]); });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files.length) load(event.dataTransfer.files[0]); });
  byId("undo").addEventListener("click", () => history.back());
  byId("redo").addEventListener("click", () => history.forward());
  addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.target.matches("input")) return;
    const redo = event.key === "y" || (event.shiftKey && event.key.toLowerCase() === "z");
    if (!redo && event.key !== "z") return;
    event.preventDefault();
    byId(redo ? "redo" : "undo").click();
  });
  byId("share").addEventListener("click", async () => {
    const address = `${location.origin}/plan?${query(state.items)}`;
    try {
      await navigator.clipboard.writeText(address);
      say("The address is copied");
      byId("share").textContent = "Copied";
      setTimeout(() => { byId("share").textContent = "Copy address"; }, 1500);
    } catch {
      prompt("The address of this plan", address);
    }
  });
  addEventListener("popstate", (event) => {
    depth = event.state ? event.state.depth : 0;
    ends();
    arrive();
  });
  arrive();
}

// Labels and the step's picture are set for a width.
let shownWidth = innerWidth, resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    if (state.facts && innerWidth !== shownWidth && !cutting()) show(state.facts);
    shownWidth = innerWidth;
  }, 200);
});
window.hpgoPlan = state;
