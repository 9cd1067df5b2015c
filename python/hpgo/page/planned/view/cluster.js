// Stages on the cluster: each device has the colour of its stage, and links say what crosses them.
const placed = { nodes: "", devices: [] };
// Whether devices are being given to the chosen stage, and which was the last.
const giving = { on: false, last: null };

paintedAfter((facts) => {
  // Devices stay from one change to the next: there may be thousands, and few change.
  const nodes = JSON.stringify(facts.nodes);
  if (nodes !== placed.nodes) buildNodes(facts);
  placed.nodes = nodes;
  const groupOf = new Map();
  facts.groups.forEach((group, at) => numbersOf(group.devices).forEach((device) => groupOf.set(device, at)));
  placed.devices.forEach((button, number) => {
    const group = groupOf.get(number);
    const stages = group === undefined ? [] : facts.groups[group].stages;
    const now = stages.join(" ");
    if (button.dataset.stages === now) return;
    button.dataset.stages = now;
    button.className = stages.length ? `device ${fillOf(stages[0])}` : "device idle";
    button.setAttribute("aria-label", `device ${number}: ${stages.length ? `stage ${stages.join(", ")}` : "idle"}`);
    button.textContent = stages.length ? stages.join("·") : "–";
  });
  paintLinks(facts);
  paintGiving();
});

function choosing(on) {
  Object.assign(giving, { on, last: null });
  paintStageBar(state.facts);
  paintGiving();
  if (on) byId("cluster-card").scrollIntoView({ block: "nearest" });
}

function paintGiving() {
  const own = new Set(giving.on ? state.stages[state.selected].devices : []);
  byId("nodes").classList.toggle("giving", giving.on);
  placed.devices.forEach((button, number) => (giving.on ? button.setAttribute("aria-pressed", own.has(number)) : button.removeAttribute("aria-pressed")));
  byId("giving").hidden = !giving.on;
  put(byId("giving"), giving.on ? [
    `Click devices, or press Enter on them, to give them to stage ${state.selected} or to take them away; with Shift, all from the last one on.`,
    make("button", { type: "button", "data-key": "chosen", onclick: () => { choosing(false); document.querySelector("[data-key=choose]").focus(); } }, "Done"),
  ] : []);
}

// Gives a device to the chosen stage, or takes it away; or all from the last one on.
function give(device, many) {
  const own = state.stages[state.selected].devices;
  const from = many && giving.last !== null ? giving.last : device;
  const some = Array.from({ length: Math.abs(device - from) + 1 }, (_, at) => Math.min(device, from) + at);
  giving.last = device;
  const stages = placedOn(state.selected, own.includes(device) ? own.filter((one) => !some.includes(one)) : [...own, ...some]);
  const empty = stages.findIndex((stage) => !stage.devices.length);
  if (empty >= 0) return wrong(byId("giving"), { message: `stage ${empty} would have no device`, hint: "give it another one before" });
  return change({ stages: stagesText(stages) }, byId("giving"));
}

addEventListener("keydown", (event) => { if (event.key === "Escape" && giving.on && !cutting()) choosing(false); });

function deviceWords(number) {
  const { facts } = state;
  const group = facts.groups.find((one) => numbersOf(one.devices).includes(number));
  if (!group) return { title: `device ${number}: idle`, rows: [] };
  const rows = [["stage", group.stages.join(", ")], ["holds", group.total], ["free", group.free]];
  return { title: `device ${number}`, rows: group.stages.length === 1 ? [...rows, ...facts.stages[group.stages[0]].said.slice(2, 6)] : rows };
}

function buildNodes(facts) {
  const count = facts.nodes.reduce((sum, node) => sum + node.count, 0);
  const size = count <= 32 ? 34 : count <= 144 ? 25 : 13;
  placed.devices = alike(Array.from({ length: count }, (_, number) => lights(
    make("button", { type: "button", class: "device", "data-key": `device-${number}`, "data-device": number, "data-stages": "none" }), () => deviceWords(number))));
  const nodes = facts.nodes.map((node) => make("div", { class: "node" },
    make("p", {}, size > 13 ? `${node.name}: ${node.count} × ${node.device}` : node.name.replace("node ", "")),
    make("div", { class: "devices" }, ...placed.devices.slice(node.first, node.first + node.count))));
  const box = make("div", { id: "nodes", class: `nodes${size === 13 ? " small" : ""}`, role: "group", "aria-label": "Devices", style: { "--size": `${size}px` } }, ...nodes);
  box.addEventListener("click", (event) => {
    const button = event.target.closest(".device");
    if (button && giving.on) give(Number(button.dataset.device), event.shiftKey);
  });
  byId("placed").replaceChildren(make("p", { id: "giving", hidden: true }), box, make("div", { id: "sent" }));
  roving(box, ".device");
}

function paintLinks(facts) {
  const links = facts.links.map((link) => make("li", { "data-stages": `${link.from} ${link.to}` },
    make("span", {}, `stage ${link.from} → ${link.to}`),
    make("span", { class: "meter", title: `busy for ${percent(link.busy)} of the step` }, make("i", { style: { width: `${100 * Math.min(1, link.busy)}%` } })),
    make("span", {}, `${[link.bytes, link.time].filter(Boolean).join(" in ")} ${link.rate ? `at ${link.rate}, ` : ""}${link.between_nodes ? "between nodes" : "within a node"}`)));
  put(
    byId("sent"),
    facts.rates.length ? make("p", { class: "rates" }, "Links: ", facts.rates.map(([where, rate]) => `${rate} ${where}`).join("; "), ".") : null,
    links.length ? make("ul", { class: "links", tabindex: links.length > 7 ? 0 : null, "aria-label": "What stages send on, each micro-batch" }, ...links) : null,
  );
}
