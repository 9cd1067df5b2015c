// Changing stages by hand: cuts are dragged or moved by arrow keys, replicas come and go, stages are split and joined.
let drag = null;
const cutting = () => drag !== null;

painted(paintStageBar);

// Between stages that leave no room for its knob, a cut is a line alone.
const isTight = (cut) => Math.min(state.edges[cut + 1] - state.edges[cut], state.edges[cut + 2] - state.edges[cut + 1]) * state.wide_px < 40;

function handle(edge, cut) {
  const [left, right] = [state.stages[cut], state.stages[cut + 1]];
  return make("div", {
    class: `cut${drag && drag.cut === cut ? " dragging" : ""}${isTight(cut) ? " tight" : ""}`, role: "slider", tabindex: 0, "data-key": `cut-${cut}`, "aria-label": `cut between stages ${cut} and ${cut + 1}`,
    "aria-orientation": "horizontal", "aria-valuemin": 1, "aria-valuemax": left.layers.length + right.layers.length - 1, "aria-valuenow": left.layers.length,
    "aria-valuetext": `${several(left.layers.length, "layer")} before, ${right.layers.length} behind`, style: { left: `${100 * edge}%` },
    onpointerdown: (event) => begin(event, cut),
    onkeydown: (event) => {
      const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -5, PageUp: 5 }[event.key];
      if (!steps) return;
      event.preventDefault();
      move(cut, left.layers.length + steps);
    },
  });
}

// The stages with so many layers before the cut as `count`.
function cutAt(stages, cut, count) {
  const layers = [...stages[cut].layers, ...stages[cut + 1].layers];
  const before = Math.max(1, Math.min(count, layers.length - 1));
  return stages.map((stage, at) => ({
    devices: stage.devices,
    layers: at === cut ? layers.slice(0, before) : at === cut + 1 ? layers.slice(before) : stage.layers,
  }));
}

const move = (cut, count, options) => change({ stages: stagesText(cutAt(state.stages, cut, count)) }, byId("stage-bar"), options);

function begin(event, cut) {
  if (event.button) return;
  event.preventDefault();
  event.target.focus({ preventScroll: true });
  const { layers: columns } = state.facts;
  const stages = state.stages;
  const mine = [...stages[cut].layers, ...stages[cut + 1].layers];
  const [from, to] = [state.edges[cut], state.edges[cut + 2]];
  const times = mine.map((layer) => columns.forward_s[layer] + columns.backward_s[layer]);
  const total = times.reduce((sum, time) => sum + time, 0) || 1;
  let before = 0;
  const places = times.map((time) => from + ((before += time) / total) * (to - from)).slice(0, -1);
  drag = { cut, stages, places, count: stages[cut].layers.length, first: stages[cut].layers.length, items: current() };
  document.addEventListener("pointermove", dragged);
  document.addEventListener("pointerup", dropped);
  document.addEventListener("pointercancel", left);
  document.addEventListener("keydown", left);
}

function dragged(event) {
  const box = byId("row").getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width;
  let nearest = 0;
  drag.places.forEach((place, number) => { if (Math.abs(place - at) < Math.abs(drag.places[nearest] - at)) nearest = number; });
  if (nearest + 1 === drag.count) return;
  drag.count = nearest + 1;
  price({ ...drag.items, stages: stagesText(cutAt(drag.stages, drag.cut, drag.count)) }, byId("stage-bar"), { push: false });
}

function dropped() {
  const done = end();
  if (done.count !== done.first) price({ ...done.items, stages: stagesText(cutAt(done.stages, done.cut, done.count)) }, byId("stage-bar"));
}

function left(event) {
  if (event.type === "keydown" && event.key !== "Escape") return;
  const done = end();
  price(done.items, null, { push: false });
}

function end() {
  const done = drag;
  drag = null;
  document.removeEventListener("pointermove", dragged);
  document.removeEventListener("pointerup", dropped);
  document.removeEventListener("pointercancel", left);
  document.removeEventListener("keydown", left);
  return done;
}

function idleDevices() {
  const used = new Set(state.stages.flatMap((stage) => stage.devices));
  return [...Array(state.facts.controls.devices).keys()].filter((device) => !used.has(device));
}

// One replica more: of idle devices the nearest, or one of a neighbouring stage that has several. Stages that share
// devices keep sharing them.
function withReplica(stage) {
  const own = state.stages[stage].devices;
  const from = [stage + 1, stage - 1].map((at) => state.stages[at]).filter((other) => other && other.devices.length > 1 && `${other.devices}` !== `${own}`);
  const idle = idleDevices();
  const offered = idle.length ? idle : from.flatMap((other) => other.devices);
  if (!offered.length) return null;
  const near = (device) => Math.min(...own.map((mine) => Math.abs(mine - device)));
  return stagesText(placedOn(stage, [...own, offered.reduce((best, device) => (near(device) < near(best) ? device : best))]));
}

// The stages with `stage`, and those that share its devices, on these, which no other has then.
function placedOn(stage, devices) {
  const own = `${state.stages[stage].devices}`;
  const taken = new Set(devices);
  const rising = [...taken].sort((a, b) => a - b);
  return state.stages.map((other) => ({ layers: other.layers, devices: `${other.devices}` === own ? rising : other.devices.filter((device) => !taken.has(device)) }));
}

function split(stage) {
  const { layers, devices } = state.stages[stage];
  const [half, some] = [Math.ceil(layers.length / 2), Math.ceil(devices.length / 2)];
  const idle = idleDevices();
  const behind = devices.length > 1 ? devices.slice(some) : idle.slice(0, 1);
  const parts = [{ layers: layers.slice(0, half), devices: devices.length > 1 ? devices.slice(0, some) : devices }, { layers: layers.slice(half), devices: behind }];
  return stagesText(state.stages.flatMap((other, at) => (at === stage ? parts : [other])));
}

function joined(stage) {
  const [one, next] = [state.stages[stage], state.stages[stage + 1]];
  const both = { layers: [...one.layers, ...next.layers], devices: [...new Set([...one.devices, ...next.devices])].sort((a, b) => a - b) };
  return stagesText(state.stages.flatMap((other, at) => (at === stage ? [both] : at === stage + 1 ? [] : [other])));
}

function paintStageBar(facts) {
  const bar = byId("stage-bar");
  const kept = bar.querySelector(".wrong");
  const at = state.selected;
  const stage = state.stages[at];
  const chip = make("span", { class: `chip ${fillOf(at)}` }, `stage ${at}`);
  const what = make("span", {}, `${several(stage.layers.length, "layer")} on ${several(stage.devices.length, "device")}`);
  if (isFixed()) {
    put(bar, chip, what, make("span", { class: "note" }, state.offline ? "" : facts.controls.why_fixed));
    return;
  }
  const edit = (key, label, stages, title) => make("button", {
    type: "button", "data-key": key, title, disabled: stages === null, "aria-label": title, onclick: () => change({ stages }, bar),
  }, label);
  const last = at === state.stages.length - 1;
  const shared = facts.groups[facts.stages[at].group].stages.length > 1;
  const lone = stage.layers.length < 2 || (stage.devices.length < 2 && !idleDevices().length);
  put(
    bar, chip, what,
    make("span", { class: "step" }, "replicas",
      edit("fewer", "−", stage.devices.length > 1 ? stagesText(placedOn(at, stage.devices.slice(0, -1))) : null, "One replica fewer"),
      make("span", { class: "count", id: "replicas" }, `${stage.devices.length}`),
      edit("more", "+", withReplica(at), "One replica more")),
    make("button", { type: "button", "data-key": "choose", "aria-pressed": `${giving.on}`, title: "Say which devices this stage runs on", onclick: () => choosing(!giving.on) }, "Choose devices"),
    edit("split", "Split", lone || shared ? null : split(at), "Split this stage in two"),
    edit("join", "Join with next", last || shared ? null : joined(at), "Join this stage with the next one"),
    kept,
  );
}
