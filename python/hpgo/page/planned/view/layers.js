// The model as a row of layers above its stages: width is time, height is memory.
const MAX_BLOCKS = 400;

painted((facts) => {
  const columns = facts.layers;
  const timed = columns.forward_s.length > 0;
  const time = (layer) => (timed ? columns.forward_s[layer] + columns.backward_s[layer] : 1);
  const per = Math.ceil(columns.names.length / MAX_BLOCKS);
  const all = state.stages.flatMap(({ layers }, stage) => Array.from({ length: Math.ceil(layers.length / per) }, (_, at) => {
    const some = layers.slice(per * at, per * at + per);
    return { layers: some, stage, width: some.reduce((sum, layer) => sum + time(layer), 0), high: timed ? Math.max(...some.map((layer) => columns.held_bytes[layer])) : 0 };
  }));
  const total = all.reduce((sum, { width }) => sum + width, 0) || 1;
  const { top, maximum } = scaleOf(all);
  state.edges = [0];
  let before = 0;
  const blocks = all.map((one, at) => {
    const box = block(one, before / total);
    before += one.width;
    if (all[at + 1]?.stage !== one.stage) state.edges.push(before / total);
    return box;
  });
  byId("scale").textContent = timed ? `width is time, height is memory, here up to ${bytes(top)} a layer${maximum > top ? `; a bar with a gap holds more, up to ${bytes(maximum)}` : ""}` : "";

  function block({ layers, stage, width, high }, left) {
    const name = layers.length > 1 ? `${columns.names[layers[0]]} … ${columns.names[layers.at(-1)]}` : columns.names[layers[0]];
    const held = layers.reduce((sum, layer) => sum + (columns.held_bytes[layer] ?? 0), 0);
    const button = make("button", {
      type: "button", class: `layer ${fillOf(stage)}${high > top ? " gapped" : ""}`, "data-key": `layer-${layers[0]}`, "data-stages": stage, "data-layer": layers[0], "aria-label": `${name}, stage ${stage}`,
      style: { left: `${100 * left}%`, width: `max(2px, ${(100 * width) / total}%)`, height: `${timed ? Math.max(3, Math.min(100, (100 * high) / top)) : 60}%` },
    });
    return lights(button, () => ({
      title: name,
      rows: [["stage", `${stage}`], ...(timed ? [
        ["forward", seconds(layers.reduce((sum, layer) => sum + columns.forward_s[layer], 0))],
        ["backward", seconds(layers.reduce((sum, layer) => sum + columns.backward_s[layer], 0))],
        ["holds", bytes(held)],
      ] : [])],
    }));
  }

  const row = byId("row") ?? byId("layers").appendChild(make("div", { id: "row", role: "group", "aria-label": "Layers" }));
  const bands = byId("bands") ?? byId("layers").appendChild(make("div", { id: "bands", role: "group", "aria-label": "Stages" }));
  const wide = (state.wide_px = row.clientWidth); // asked before anything changes, when the browser knows it
  put(row, alike(blocks), isFixed() ? [] : state.edges.slice(1, -1).map(handle));
  put(bands, alike(state.stages.map((stage, at) => {
    const [from, to] = [state.edges[at], state.edges[at + 1]];
    const replicas = stage.devices.length;
    const band = make("button", {
      type: "button", class: `band ${fillOf(at)}${(to - from) * wide < 40 ? " tight" : ""}`, "data-key": `stage-${at}`, "data-stages": at, "aria-pressed": `${at === state.selected}`,
      "aria-label": `stage ${at}: ${several(stage.layers.length, "layer")} on ${several(replicas, "device")}`,
      style: { left: `${100 * from}%`, width: `${100 * (to - from)}%` },
      onclick: () => select(at),
    }, labelled((to - from) * wide - 2, at, `stage ${at}: ${several(stage.layers.length, "layer")} × ${replicas}`));
    return lights(band, () => stageWords(at));
  })));
  roving(row, ".layer");
  roving(bands, ".band");
});

// How much memory the row's height stands for. Few tall layers would leave the rest as lines: what is higher than
// layers that make up 95 % of the width, or than three times the middle one, is cut.
function scaleOf(blocks) {
  const rising = [...blocks].sort((one, other) => one.high - other.high);
  const total = blocks.reduce((sum, { width }) => sum + width, 0);
  const highest = (share) => {
    let sum = 0;
    return rising.find(({ width }) => (sum += width) >= share * total)?.high ?? 0;
  };
  const maximum = rising.at(-1).high;
  const top = Math.min(highest(0.95), 3 * highest(0.5)) || maximum || 1;
  return maximum > 2 * top ? { top, maximum } : { top: maximum || 1, maximum: maximum || 1 };
}

// What a stage is called where it has so many pixels.
const labelled = (px, stage, whole) => (px > 7 * whole.length + 28 ? whole : px > 84 ? `stage ${stage}` : px > 18 ? `${stage}` : "");

function select(stage) {
  state.selected = stage;
  byId("bands").querySelectorAll(".band").forEach((band, at) => band.setAttribute("aria-pressed", `${at === stage}`));
  paintStageBar(state.facts);
  paintGiving();
}

// For numbers that the server did not put into words; those of single layers.
function scaled(value, units) {
  if (!value) return `0 ${units[0][1]}`;
  const [factor, unit] = units.find(([minimum]) => value >= minimum) ?? units.at(-1);
  return `${Number((value / factor).toPrecision(3))} ${unit}`;
}
const seconds = (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]);
const bytes = (value) => scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
