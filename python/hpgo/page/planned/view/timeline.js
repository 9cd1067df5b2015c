// The simulated step, as the server draws it, lit from outside; or the picture to zoom and pan in.
const stepOf = { host: null, shadow: null, request: null, timer: 0, zoomed: false, letters: 0 };
const LIGHTING = "text,path{pointer-events:none}svg{display:block;width:100%;height:auto}.lit rect[data-stage]:not(.on){opacity:.22}.lit rect[data-rank].on{stroke:#2f66b3;stroke-width:2}.lit .near{stroke:currentColor;stroke-width:1.6}rect[data-stage]{cursor:pointer}";

painted(() => {
  clearTimeout(stepOf.timer);
  if (stepOf.request) stepOf.request.abort();
  if (state.offline) return held.timeline ? draw(held.timeline) : refuse({ message: held.untimed, hint: "" });
  // A large picture holds the page up while it is built, so it waits until the reader pauses.
  stepOf.timer = setTimeout(fetched, !stepOf.host ? 0 : stepOf.letters > 200_000 ? 600 : 120);
});

async function fetched() {
  const mine = (stepOf.request = new AbortController());
  const width = Math.max(320, Math.round(byId("timeline").clientWidth / 20) * 20);
  try {
    const answer = await fetch(`/plan/timeline.${stepOf.zoomed ? "html" : "svg"}?${query({ ...state.items, width: stepOf.zoomed ? "" : width })}`, { signal: mine.signal });
    const text = await answer.text();
    if (answer.ok) (stepOf.zoomed ? open : draw)(text);
    else refuse(JSON.parse(text).error);
  } catch (error) {
    if (error.name !== "AbortError") refuse({ message: "the server does not answer", hint: "" });
  }
}

function refuse(error) {
  stepOf.host = null;
  byId("timeline").replaceChildren(make("p", {}, `${error.message}. ${error.hint ?? ""}`));
}

function draw(text) {
  if (!stepOf.host) {
    stepOf.host = make("div", { id: "step", tabindex: 0, role: "group", "data-key": "step" });
    stepOf.shadow = stepOf.host.attachShadow({ mode: "open" });
    listen(stepOf.host);
    byId("timeline").replaceChildren(stepOf.host);
  }
  stepOf.shadow.innerHTML = `<style>${LIGHTING}</style>${text}`;
  stepOf.letters = text.length;
  const svg = stepOf.shadow.querySelector("svg");
  stepOf.host.setAttribute("aria-label", `Timeline. ${svg.querySelector("desc")?.textContent ?? ""} Arrow keys go from action to action.`);
  if (state.offline) svg.style.minWidth = "640px"; // it was drawn for a wide page
  stepOf.at = -1;
}

// An edit keeps what is looked at.
function open(text) {
  stepOf.host = null;
  const before = byId("timeline").querySelector("iframe");
  const kept = before?.contentWindow?.hpgo?.kept() ?? null;
  const picture = make("iframe", { title: "The step, to zoom and pan in", srcdoc: text, onload: () => picture.contentWindow.hpgo?.restore(kept) });
  byId("timeline").replaceChildren(picture);
}

byId("zoom").addEventListener("click", () => {
  stepOf.zoomed = !stepOf.zoomed;
  byId("zoom").setAttribute("aria-pressed", `${stepOf.zoomed}`);
  if (!state.offline) fetched();
  else if (stepOf.zoomed) open(held.picture);
  else draw(held.timeline);
});

// The other page draws plans that it holds, so it is given this one.
byId("compare").hidden = state.offline;
byId("compare").addEventListener("click", async () => {
  const plan = await fetch(`/plan/plan.json?${query(state.items)}`);
  const name = await fetch(`/plans?name=${encodeURIComponent(`${state.facts.model}.plan.json`)}`, { method: "POST", body: await plan.blob() });
  if (name.ok) location.assign(`/?plan=${await name.text()}&schedule=${state.facts.controls.schedule}`);
  else wrong(null, { message: "the other page does not take this plan", hint: "save it, and load it there" });
});

const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const actions = () => [...stepOf.shadow.querySelectorAll("rect[data-stage]")];

function listen(host) {
  const over = (event) => {
    const rect = event.composedPath()[0];
    if (rect.dataset && rect.dataset.stage !== undefined) lightAction(rect);
    else if (rect.dataset && rect.dataset.rank !== undefined) lightRow(Number(rect.dataset.rank));
    else if (!event.composedPath().includes(lit.self)) unlight();
  };
  host.addEventListener("pointermove", over);
  host.addEventListener("click", over);
  host.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") unlight(); });
  host.addEventListener("blur", unlight);
  host.addEventListener("keydown", (event) => {
    const all = actions();
    if (!all.length || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const from = all[stepOf.at];
    const along = (rect) => Number(rect.getAttribute("x"));
    const row = (rect) => Number(rect.getAttribute("y"));
    let to = all[0];
    if (from) {
      const forward = event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : -1;
      const same = event.key === "ArrowRight" || event.key === "ArrowLeft";
      const there = same ? all.filter((rect) => row(rect) === row(from) && forward * (along(rect) - along(from)) > 0) : all.filter((rect) => forward * (row(rect) - row(from)) > 0);
      const far = (rect) => (same ? Math.abs(along(rect) - along(from)) : 1e5 * Math.abs(row(rect) - row(from)) + Math.abs(along(rect) - along(from)));
      if (!there.length) return;
      to = there.reduce((best, rect) => (far(rect) < far(best) ? rect : best));
    }
    stepOf.at = all.indexOf(to);
    lightAction(to);
  });
}

function lightAction(rect) {
  const { stage, batch } = rect.dataset;
  rect.dataset.stages = stage;
  const kind = KINDS[(rect.parentNode.getAttribute("class") ?? rect.parentNode.parentNode.getAttribute("class") ?? "F")[0]] ?? "";
  light(rect, { title: `${kind} of micro-batch ${batch}`, rows: [["stage", stage], ...state.facts.stages[stage].said.slice(1, 2)] });
  say(`${kind} of micro-batch ${batch}, stage ${stage}`);
}

function lightRow(rank) {
  const group = state.facts.groups[rank];
  if (!group) return;
  const row = stepOf.shadow.querySelector(`rect[data-rank="${rank}"]`);
  row.dataset.stages = group.stages.join(" ");
  light(row, { title: groupName(group), rows: group.stages.length === 1 ? state.facts.stages[group.stages[0]].said : [["devices", group.name]] });
}

function lightTimeline(stages, batch) {
  if (!stepOf.host) return;
  const svg = stepOf.shadow.querySelector("svg");
  svg.classList.toggle("lit", stages !== null);
  for (const rect of stepOf.shadow.querySelectorAll(".on, .near, .self")) rect.classList.remove("on", "near", "self");
  if (!stages) return;
  for (const rect of actions()) {
    rect.classList.toggle("on", stages.has(rect.dataset.stage));
    if (batch !== undefined && rect.dataset.batch === batch) rect.classList.add("on", "near");
  }
  for (const rect of stepOf.shadow.querySelectorAll("rect[data-rank]")) {
    const group = state.facts.groups[rect.dataset.rank];
    rect.classList.toggle("on", group !== undefined && group.stages.some((stage) => stages.has(`${stage}`)));
  }
}
