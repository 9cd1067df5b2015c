// The simulated step, as the server draws it, lit from outside; or the picture to zoom and pan in.
const stepOf = { host: null, shadow: null, request: null, timer: 0, zoomed: false, actions: null, at: -1 };
const LIGHTING = "svg{display:block;width:100%;height:auto}svg *{pointer-events:none}[data-stage],[data-rank]{pointer-events:auto}[data-stage]{cursor:pointer}.lit :is([data-stage],[data-rank]):not(.on){fill-opacity:.22}.lit .row .on{stroke:#2f66b3;stroke-width:2}.near{stroke:currentColor;stroke-width:1.6}.lit .number:not(.on) text:not(.on){fill:currentColor}";

painted(() => {
  clearTimeout(stepOf.timer);
  if (stepOf.request) stepOf.request.abort();
  if (state.offline) return held.timeline ? draw(held.timeline) : refuse({ message: held.untimed, hint: "" });
  // The price comes first: the picture waits until the reader pauses.
  stepOf.timer = setTimeout(fetched, stepOf.host ? 120 : 0);
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
  const svg = stepOf.shadow.querySelector("svg");
  svg.append(make("svg:g", { id: "near" }), ...svg.querySelectorAll(".virtual_stage, .number")); // which stay above what is lit
  stepOf.host.setAttribute("aria-label", `Timeline. ${svg.querySelector("desc")?.textContent ?? ""} Arrow keys go from action to action.`);
  if (state.offline) svg.style.minWidth = "640px"; // it was drawn for a wide page
  Object.assign(stepOf, { actions: null, at: -1 });
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

// Each action of the picture, in which a stage's boxes of one kind are one path, when they are first asked for.
const actions = () => (stepOf.actions ??= [...stepOf.shadow.querySelectorAll("[data-stage]")].flatMap((path) => {
  const batches = path.dataset.batches.split(" ");
  const corners = [...path.getAttribute("d").matchAll(/M([^ ]+) ([^h]+)h([^v]+)v([^h]+)/g)];
  return corners.map(([, ...numbers], at) => {
    const [x, y, width, height] = numbers.map(Number);
    return { path, stage: path.dataset.stage, batch: batches[at], kind: path.parentNode.getAttribute("class"), x, y, width, height };
  });
}));

// An action's own box, which is there while its micro-batch is lit.
const boxOf = (action) => (action.box ??= make("svg:rect", {
  class: `${action.kind} near`, "data-stages": action.stage, "data-batch": action.batch, x: action.x, y: action.y, width: action.width, height: action.height,
}));

function actionAt(path, event) {
  const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(path.getScreenCTM().inverse());
  return actions().find((one) => one.path === path && x >= one.x && x <= one.x + one.width && y >= one.y && y <= one.y + one.height);
}

function listen(host) {
  const over = (event) => {
    const on = event.composedPath()[0];
    const action = on.dataset?.stage === undefined ? null : actionAt(on, event);
    if (action) lightAction(action);
    else if (on.dataset?.rank !== undefined) lightRow(on.dataset.rank);
    else unlight();
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
    let to = all[0];
    if (from) {
      const forward = event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : -1;
      const same = event.key === "ArrowRight" || event.key === "ArrowLeft";
      const there = all.filter((one) => (same ? one.y === from.y && forward * (one.x - from.x) > 0 : forward * (one.y - from.y) > 0));
      const far = (one) => (same ? 0 : 1e5 * Math.abs(one.y - from.y)) + Math.abs(one.x - from.x);
      if (!there.length) return;
      to = there.reduce((best, one) => (far(one) < far(best) ? one : best));
    }
    stepOf.at = all.indexOf(to);
    lightAction(to);
  });
}

function lightAction(action) {
  if (boxOf(action) === lit.self) return;
  const { stage, batch } = action;
  const kind = KINDS[action.kind] ?? "";
  light(boxOf(action), { title: `${kind} of micro-batch ${batch}`, rows: [["stage", stage], ...state.facts.stages[stage].said.slice(1, 2)] });
  say(`${kind} of micro-batch ${batch}, stage ${stage}`);
}

function lightRow(rank) {
  const row = stepOf.shadow.querySelector(`.row [data-rank="${rank}"]`);
  const group = state.facts.groups[rank];
  if (!group || row === lit.self) return;
  row.dataset.stages = group.stages.join(" ");
  light(row, { title: groupName(group), rows: group.stages.length === 1 ? state.facts.stages[group.stages[0]].said : [["devices", group.name]] });
}

function lightTimeline(stages, batch) {
  if (!stepOf.host) return;
  const svg = stepOf.shadow.querySelector("svg");
  svg.classList.toggle("lit", stages !== null);
  for (const path of svg.querySelectorAll("[data-stage]")) path.classList.toggle("on", stages !== null && stages.has(path.dataset.stage));
  for (const path of svg.querySelectorAll("[data-rank]")) {
    const group = state.facts.groups[path.dataset.rank];
    path.classList.toggle("on", stages !== null && group !== undefined && group.stages.some((stage) => stages.has(`${stage}`)));
  }
  for (const numbers of svg.querySelectorAll(".number")) {
    numbers.classList.toggle("on", stages !== null && stages.has(numbers.dataset.of));
    for (const number of numbers.children) number.classList.toggle("on", number.textContent === batch);
  }
  svg.querySelector("#near").replaceChildren(...(batch === undefined ? [] : actions().filter((one) => one.batch === batch).map(boxOf)));
}
