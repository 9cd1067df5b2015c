// The state of the page, which its address contains: the planning problem, and one configuration.
const choices = JSON.parse(byId("choices").textContent);
const PROBLEM = ["model", ...choices.shape, "cluster", "devices", "batch", "seq_length", "precision", "framework"];
const OWN = ["gpus", "gpus_per_node", ...choices.configuration];
const SIZE = ["tokens", "days", "max_gpus", "hour_prices"];
const VIEW = ["sort", ...SIZE];
const state = { problem: {}, own: {}, view: {}, facts: null, base: null, baseOf: "", found: null, foundOf: "", titles: {} };
const painters = [];
const painted = (painter) => painters.push(painter);

const picked = (items, names) => Object.fromEntries(names.filter((name) => items[name]).map((name) => [name, items[name]]));
const address = () => ({ ...state.problem, ...state.own });

function readAddress() {
  const items = Object.fromEntries(new URLSearchParams(location.search));
  state.problem = picked(items, PROBLEM);
  state.own = picked(items, OWN);
  state.view = picked(items, VIEW);
}

function writeAddress({ push = true } = {}) {
  const next = `${location.pathname}?${query({ ...address(), ...state.view })}`;
  if (next !== location.pathname + location.search) history[push ? "pushState" : "replaceState"](null, "", next);
}

// Shows an error beside the control that caused it, or above everything else.
function wrong(error, beside) {
  document.querySelectorAll(".wrong").forEach((one) => one.remove());
  byId("trouble").hidden = true;
  if (!error) return;
  const words = [make("b", {}, `${error.message}. `), error.hint ? make("span", {}, `${error.hint}.`) : null];
  if (beside) beside.append(make("div", { class: "wrong", role: "alert" }, ...words.filter(Boolean)));
  else {
    byId("trouble").replaceChildren(...words.filter(Boolean));
    byId("trouble").hidden = false;
  }
}

const OFFLINE = { message: "the server does not answer", hint: "check that `hpgo serve` is still running" };

// Estimates the configuration of the address. Only the last of several requests is shown.
let asking = null;
async function estimate(own, { push = true, isBase = false, beside = null } = {}) {
  if (asking) asking.abort();
  const mine = (asking = new AbortController());
  const items = { ...state.problem, ...own };
  try {
    const answer = await fetch(`/transformers/estimate.json?${query(items)}`, { signal: mine.signal });
    const facts = await answer.json();
    if (mine !== asking) return;
    wrong(facts.error, beside);
    if (facts.error) {
      // The controls show what was asked for, so the refused value can be corrected.
      byId("plan").classList.add("outdated");
      return;
    }
    byId("plan").classList.remove("outdated");
    state.own = facts.items;
    state.facts = facts;
    // A comparison is between configurations of one problem.
    if (isBase || state.baseOf !== query(state.problem)) Object.assign(state, { base: facts, baseOf: query(state.problem) });
    writeAddress({ push });
    paint();
  } catch (error) {
    if (error.name !== "AbortError") wrong(OFFLINE, beside);
  }
}

function paint() {
  const { facts } = state;
  byId("columns").classList.remove("empty");
  byId("plan").hidden = false;
  byId("empty").hidden = true;
  document.title = `${facts.estimate.model} on ${facts.estimate.cluster}: ${facts.words.step}`;
  byId("headline").textContent = `${facts.estimate.model} on ${several(facts.estimate.gpus, "GPU")} of ${facts.estimate.cluster}: ${facts.words.step} per step (estimated)`;
  const key = document.activeElement?.dataset?.key;
  for (const painter of painters) painter(facts);
  if (key) document.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
}

// A number with buttons that lower and raise it. `next` gives the value after a step down or up.
function stepper(name, label, value, next, change) {
  const input = make("input", { type: "number", min: 1, value, inputmode: "numeric", "data-key": `${name}-value`, "aria-label": label, onchange: () => change(input.value) });
  const button = (sign, way) => make("button", {
    type: "button", "data-key": `${name}-${way}`, "aria-label": `${way < 0 ? "Lower" : "Raise"} ${label}`, onclick: () => change(String(next(Number(input.value), way))),
  }, sign);
  return make("div", { class: "stepper", role: "group", "aria-label": label }, make("span", { class: "name", "aria-hidden": "true" }, label), button("−", -1), input, button("+", 1));
}

const doubling = (value, way) => (way > 0 ? value * 2 : Math.max(1, Math.floor(value / 2)));
const byOne = (value, way) => Math.max(1, value + way);
