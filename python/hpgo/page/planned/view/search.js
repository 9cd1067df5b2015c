// Searching: progress with bound and gap, a stop that takes the best so far, and the optimum beside the plan.
const best = { key: "", facts: null, search: null, progress: null, error: null };

// Resolves to the facts of what a search finds.
const searchFor = (items, options) => streamed(`/plan/search?${query(items)}`, options);
const progressWords = ({ best: step, bound, gap }) => (step ? `best ${step}, ${bound ? `bound ${bound}, gap ${gap}` : "no bound yet"}` : "no plan yet");

let finding = null;
async function find() {
  if (finding) finding.abort();
  const mine = (finding = new AbortController());
  const box = byId("progress");
  const bar = make("progress", { max: 1, "aria-label": "Share of the best step that is proven" });
  const words = make("p", {}, "searching…");
  let name = null;
  const halt = make("button", { type: "button", id: "halt", disabled: true, onclick: () => stop(name) }, "Stop, take the best so far");
  box.replaceChildren(bar, words, halt);
  box.hidden = false;
  wrong(null);
  const question = asked();
  const items = { ...question, schedule: byId("schedule").value, recompute: byId("recompute").value, micro_batch: state.facts ? "" : byId("micro_batch").value };
  try {
    const found = await searchFor(items, {
      signal: mine.signal,
      named: (given) => { name = given; halt.disabled = false; },
      told: (progress) => { bar.value = progress.share; words.textContent = progressWords(progress); },
    });
    state.question = Object.fromEntries(Object.entries(question).filter(([, text]) => text));
    Object.assign(best, { key: keyOf(found), facts: found, progress: null, error: null });
    state.items = { ...state.question, ...found.changes };
    remember(state.items);
    show(found);
    say(found.headline);
  } catch (error) {
    if (error.name !== "AbortError") wrong(fieldOf(error.said) ?? byId("progress"), error.said ?? { message: "the server does not answer", hint: "" });
  }
  if (mine === finding) {
    finding = null;
    box.replaceChildren(...[byId("wrong")].filter((one) => one && box.contains(one)));
    box.hidden = !box.childElementCount;
  }
}

// The field that an error is about, if it names one.
function fieldOf(error) {
  if (!error) return null;
  const fields = [["cluster", /cluster/], ["micro_batch", /micro.batch/], ["batch", /batch/], ["devices", /devices, not/], ["reserve", /reserve|`[^`]*` is no size/], ["model", /model|profile/]];
  const found = fields.find(([, words]) => words.test(error.message));
  return found ? byId(found[0]) : null;
}

const keyOf = (facts) => query({ ...state.question, schedule: facts.changes.schedule, recompute: facts.changes.recompute });

// The optimum for the same question, schedule and recomputation; looked for once the reader pauses.
let pause = 0;
painted((facts) => {
  const key = keyOf(facts);
  if (facts.proof.bound_s !== null) Object.assign(best, { key, facts, progress: null, error: null });
  if (key !== best.key) {
    if (best.search) best.search.abort();
    Object.assign(best, { key, facts: null, search: null, progress: null, error: null });
    clearTimeout(pause);
    if (!isFixed()) pause = setTimeout(() => optimum(key), 500);
  }
  paintFigures(facts);
});

async function optimum(key) {
  const mine = (best.search = new AbortController());
  const { schedule, recompute } = state.facts.changes;
  const settle = (news) => {
    if (best.key !== key || best.search !== mine) return;
    Object.assign(best, news);
    paintFigures(state.facts);
    paintAlternatives();
  };
  best.progress = "searching…";
  paintFigures(state.facts);
  try {
    const facts = await searchFor({ ...state.question, schedule, recompute }, { signal: mine.signal, told: (progress) => settle({ progress: progressWords(progress) }) });
    settle({ facts, progress: null });
  } catch (error) {
    settle({ progress: null, error: error.said ? error.said.message : "no answer" });
  }
}

function paintFigures(facts) {
  const figure = (name, value, note, kind = "", ...more) => make("dl", { class: `figure ${kind}`, "data-name": name }, make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", { class: "note" }, note, ...more));
  const tiles = facts.figures.map(({ name, value, note }) => figure(name, value, note, !facts.fits && name === "fullest device" ? "bad" : ""));
  const found = best.facts;
  const ratio = found ? facts.step_s / found.step_s - 1 : 0;
  const here = found && stagesText(numbered(found)) === stagesText(state.stages) && found.changes.micro_batch === facts.changes.micro_batch;
  let optimumTile;
  if (found) {
    const how = found.proof.gap ?? "best found, no bound";
    const apart = here ? "this plan" : ratio > 5e-7 ? `this plan is ${percent(ratio)} slower` : ratio < -5e-7 ? `this plan is ${percent(-ratio)} quicker` : "as quick as this plan";
    const take = here || state.offline ? null : make("button", { type: "button", "data-key": "take", onclick: () => change(found.changes, byId("figures")) }, "Make it the plan");
    optimumTile = figure(found.proof.is_optimal ? "optimum" : "best found", found.step, `${how}; ${apart}`, found.proof.is_optimal ? "good" : "", ...(take ? [make("br"), take] : []));
  } else optimumTile = figure("optimum", "–", best.error ?? best.progress ?? (facts.proof.bound_s === null && state.offline ? "not searched" : ""), best.error ? "bad" : "");
  tiles.splice(1, 0, optimumTile);
  put(byId("figures"), tiles);
}

const numbered = (facts) => facts.stages.map((stage) => ({ layers: numbersOf(stage.layers), devices: numbersOf(stage.devices) }));
