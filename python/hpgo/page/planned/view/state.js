// What is shown, and the address that says it. Undoing, redoing and sharing are going to an address.
const QUESTION = ["plan", "model", "cluster", "batch", "devices", "optimizer", "shard", "reserve"];
const CHANGES = ["stages", "micro_batch", "schedule", "recompute"];
const held = JSON.parse(byId("held").textContent);
const state = { question: {}, items: {}, facts: null, stages: [], selected: 0, offline: held !== null, painters: [], followers: [] };

const isFixed = () => state.offline || Boolean(state.facts.controls.why_fixed);
const painted = (painter) => state.painters.push(painter);
const paintedAfter = (painter) => state.followers.push(painter); // what stands below, a frame later

function itemsOf(search) {
  const found = {};
  for (const [name, text] of new URLSearchParams(search)) if (text && [...QUESTION, ...CHANGES].includes(name)) found[name] = text;
  return found;
}

const questionOf = (items) => Object.fromEntries(Object.entries(items).filter(([name]) => QUESTION.includes(name)));

// The plan that is shown with all that can be changed of it; `state.items` is the address that it was asked for by.
const current = () => ({ ...state.question, ...(state.facts ? state.facts.changes : {}) });

// Takes a plan's facts, and paints all that shows them: of a change first its price and its stages.
function show(facts) {
  const isFirst = state.facts === null;
  state.facts = facts;
  state.stages = facts.stages.map((stage) => ({ layers: numbersOf(stage.layers), devices: numbersOf(stage.devices) }));
  state.selected = Math.min(state.selected, facts.stages.length - 1);
  document.title = `${facts.model} on ${facts.cluster}: ${facts.step}`;
  byId("headline").textContent = facts.headline;
  byId("plan").hidden = false;
  byId("empty").hidden = true;
  byId("columns").classList.remove("empty");
  paint(state.painters);
  if (isFirst) paint(state.followers);
  else follow(facts);
}

function follow(facts) {
  byId("columns").ariaBusy = "true"; // so that nobody is read what is about to change
  requestAnimationFrame(() => setTimeout(() => {
    if (facts !== state.facts) return;
    paint(state.followers);
    byId("columns").ariaBusy = "false";
  }));
}

// Focus and light stay where they were.
function paint(painters) {
  const key = document.activeElement?.dataset?.key;
  const pointed = lit.self;
  unlight();
  for (const painter of painters) painter(state.facts);
  if (pointed?.words && pointed.isConnected) light(pointed, pointed.words());
  if (key) {
    const again = document.querySelector(`[data-key="${key}"]`);
    if (again) again.focus({ preventScroll: true });
  }
}

// Colour and pattern of a stage; a number tells those apart that share them.
const fillOf = (stage) => `fill is-stage-${stage % STAGE_FILLS}`;

// Prices what an address asks for. Only the last of several that follow each other is shown.
let asking = null;
async function price(items, control, { push = true } = {}) {
  if (asking) asking.abort();
  const mine = (asking = new AbortController());
  try {
    const answer = await fetch(`/plan/facts.json?${query(items)}`, { signal: mine.signal });
    const said = await answer.json();
    if (mine !== asking) return false;
    if (said.error) {
      wrong(control, said.error);
      return false;
    }
    wrong(null);
    state.question = questionOf(items);
    const isWhole = CHANGES.some((name) => items[name]); // or it is the plan of a file, as it is
    state.items = isWhole ? { ...state.question, ...said.changes } : items;
    if (push) remember(state.items);
    show(said);
    return true;
  } catch (error) {
    if (error.name !== "AbortError") wrong(control, { message: "the server does not answer", hint: "is `hpgo serve` still running?" });
    return false;
  }
}

// What is changed stands beside the rest of the plan; a value of null leaves the choice to hpgo.
const change = (changes, control, options) => price({ ...current(), ...changes }, control, options);

// Says what is wrong beside the control that asked for it, and takes back what was said before.
function wrong(control, error, ...more) {
  document.querySelectorAll(".wrong").forEach((one) => one.remove());
  document.querySelectorAll("[aria-invalid]").forEach((one) => { one.removeAttribute("aria-invalid"); one.removeAttribute("aria-describedby"); });
  byId("trouble").hidden = true;
  if (!error) return;
  const words = [make("b", {}, error.message), error.hint ? make("span", {}, error.hint) : null, ...more];
  if (!control) {
    byId("trouble").replaceChildren(...words.filter(Boolean));
    byId("trouble").hidden = false;
    return;
  }
  const folded = control.closest("details");
  if (folded) folded.open = true;
  const beside = make("div", { class: "wrong", id: "wrong", role: "alert" }, ...words);
  if (control.matches("input, select")) {
    control.setAttribute("aria-invalid", "true");
    control.setAttribute("aria-describedby", "wrong");
    control.closest("label").after(beside);
  } else control.append(beside);
}

let depth = 0;
let deepest = 0;
function remember(items) {
  const address = `${location.pathname}?${query(items)}`;
  if (address === location.pathname + location.search) return;
  if (!state.facts) {
    history.replaceState({ depth }, "", address); // the first plan, before which there is nothing to undo
    return;
  }
  depth += 1;
  deepest = depth;
  history.pushState({ depth }, "", address);
  ends();
}

function ends() {
  byId("undo").disabled = depth === 0;
  byId("redo").disabled = depth === deepest;
}
