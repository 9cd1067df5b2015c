// The configuration on its cluster: nodes with their GPUs, and on pointing at one, its groups.
const GROUPS = [
  ["tp", "divides each matrix with", (a, b) => a[1] === b[1] && a[2] === b[2] && a[3] === b[3]],
  ["cp", "divides each sequence with", (a, b) => a[0] === b[0] && a[2] === b[2] && a[3] === b[3]],
  ["ep", "divides the experts with", (a, b) => a[4] === b[4] && a[3] === b[3]],
  ["dp", "reduces gradients with", (a, b) => a[0] === b[0] && a[1] === b[1] && a[3] === b[3]],
  ["pp", "exchanges activations with", (a, b) => a[0] === b[0] && a[1] === b[1] && a[2] === b[2]],
];

function membersOf(facts, gpu) {
  const config = facts.estimate.parallelism, own = facts.places[gpu];
  return GROUPS.filter(([name]) => config[name] > 1).map(([name, words, isSame]) => {
    const all = facts.places.map((place, at) => (isSame(place, own) ? at : -1)).filter((at) => at >= 0);
    return { name, words, all, others: all.filter((at) => at !== gpu) };
  });
}

function light(facts, element, gpu) {
  unlight();
  const groups = membersOf(facts, gpu);
  byId("placement").classList.add("lit");
  for (const { name, all } of groups) for (const at of all) byId("placement").querySelector(`[data-gpu="${at}"]`).classList.add("on", `in-${name}`);
  element.classList.add("on", "self");
  const rank = facts.places[gpu][3];
  const shown = (numbers) => { const text = runsOf(numbers).replaceAll("+", ", "); return text.length > 60 ? `${text.slice(0, 57)}… (${numbers.length} GPUs)` : `GPU${numbers.length > 1 ? "s" : ""} ${text}`; };
  byId("tip").replaceChildren(make("b", {}, `GPU ${gpu}: pipeline rank ${rank}, layers ${facts.ranks[rank].layers}`),
    make("dl", {}, ...groups.flatMap(({ name, words, others }) => [make("dt", {}, `${name}: ${words}`), make("dd", {}, shown(others))])));
  const box = element.getBoundingClientRect();
  byId("tip").hidden = false;
  byId("tip").style.left = `${Math.max(8, Math.min(box.left, innerWidth - 440))}px`;
  byId("tip").style.top = `${box.bottom + 130 > innerHeight ? Math.max(8, box.top - byId("tip").offsetHeight - 8) : box.bottom + 8}px`;
}

function unlight() {
  byId("tip").hidden = true;
  byId("placement").classList.remove("lit");
  byId("placement").querySelectorAll(".on").forEach((one) => one.classList.remove("on", "self", ...GROUPS.map(([name]) => `in-${name}`)));
}

painted((facts) => {
  let first = 0;
  const size = facts.places.length > 128 ? 14 : 26;
  const gpus = [];
  const nodes = facts.nodes.map((count, node) => {
    const from = first;
    first += count;
    const own = facts.places.slice(from, first).map((place, at) => {
      const gpu = from + at;
      const show = (event) => light(state.facts, event.currentTarget, gpu);
      const button = make("button", { type: "button", class: `device fill is-stage-${place[3] % STAGE_FILLS}`, "data-gpu": gpu, "aria-label": `GPU ${gpu}, pipeline rank ${place[3]}`, onmouseenter: show, onfocus: show, onclick: show, onmouseleave: unlight, onblur: unlight }, `${place[3]}`);
      gpus.push(button);
      return button;
    });
    return own.length ? make("div", { class: "node" }, make("p", {}, `node ${node}`), make("div", { class: "devices" }, ...own)) : null;
  });
  alike(gpus);
  const rest = facts.estimate.gpus - facts.places.length;
  put(byId("placement"), make("div", { class: `nodes${size < 20 ? " small" : ""}`, style: { "--size": `${size}px` }, tabindex: 0, role: "region", "aria-label": "GPUs of the cluster" }, ...nodes),
    make("p", { class: "rates" }, `The number on a GPU is its pipeline rank.${rest ? ` ${rest} more GPUs are not drawn.` : ""}`));
  roving(byId("placement"), ".device");
});
