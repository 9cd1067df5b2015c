// What belongs together lights together: a layer, its stage, the stage's devices, and what these do in the step.
const lit = { stages: new Set(), self: null };

// `target` says what it stands for: data-stages, and data-layers where it is layers.
function light(target, words) {
  unlight();
  const stages = new Set((target.dataset.stages ?? "").split(" ").filter(Boolean));
  lit.stages = stages;
  document.body.classList.add("lit");
  for (const one of document.querySelectorAll("[data-stages]")) {
    one.classList.toggle("on", one.dataset.stages.split(" ").some((stage) => stages.has(stage)));
  }
  target.classList.add("self");
  lit.self = target;
  lightTimeline(stages, target.dataset.batch);
  tell(target, words);
}

function unlight() {
  document.body.classList.remove("lit");
  for (const one of document.querySelectorAll(".on")) one.classList.remove("on");
  lit.self?.classList.remove("self");
  lit.stages = new Set();
  lit.self = null;
  lightTimeline(null);
  byId("tip").hidden = true;
}

function tell(target, { title, rows }) {
  const tip = byId("tip");
  tip.replaceChildren(make("b", {}, title), make("dl", {}, ...rows.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
  tip.hidden = false;
  const at = target.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left + at.width / 2 - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 8));
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : Math.min(at.bottom + 44, innerHeight - tip.offsetHeight - 8)}px`;
}

// Makes an element light what it stands for when it is pointed at, tapped or focused. The page listens once for all.
function lights(element, words) {
  element.words = words;
  return element;
}

function lighting(event) {
  let element = event.target instanceof Element ? event.target : null;
  while (element && !element.words) element = element.parentElement;
  return element;
}

for (const kind of ["pointerover", "focusin", "click"]) {
  document.addEventListener(kind, (event) => {
    const element = lighting(event);
    if (element && element !== lit.self && !cutting() && !(kind === "pointerover" && event.pointerType === "touch")) light(element, element.words());
  });
}
document.addEventListener("pointerout", (event) => {
  const element = lighting(event);
  if (element && event.pointerType !== "touch" && !element.contains(event.relatedTarget) && document.activeElement !== element) unlight();
});
document.addEventListener("focusout", (event) => { if (lighting(event)) unlight(); });

const stageWords = (stage) => ({ title: `stage ${stage}`, rows: state.facts.stages[stage].said });

addEventListener("keydown", (event) => { if (event.key === "Escape" && !cutting()) unlight(); });
addEventListener("pointerdown", (event) => { if (lit.self && !event.composedPath().includes(lit.self)) unlight(); });
