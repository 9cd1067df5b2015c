// The model as a row of layers above its stages: width is time, height is memory.
const MOST_BLOCKS = 400;

painted((facts) => {
  const columns = facts.layers;
  const timed = columns.forward_s.length > 0;
  const time = (layer) => (timed ? columns.forward_s[layer] + columns.backward_s[layer] : 1);
  const total = state.stages.flatMap((stage) => stage.layers).reduce((sum, layer) => sum + time(layer), 0) || 1;
  const count = columns.names.length;
  const per = Math.ceil(count / MOST_BLOCKS);
  const most = Math.max(...(timed ? columns.held_bytes : [0]), 1);
  const blocks = [];
  state.edges = [0];
  let before = 0;
  state.stages.forEach((stage, at) => {
    for (let first = 0; first < stage.layers.length; first += per) blocks.push(block(stage.layers.slice(first, first + per), at));
    state.edges.push(before / total);
  });

  function block(layers, stage) {
    const width = layers.reduce((sum, layer) => sum + time(layer), 0);
    const high = Math.max(...layers.map((layer) => (timed ? columns.held_bytes[layer] : 1)));
    const name = layers.length > 1 ? `${columns.names[layers[0]]} … ${columns.names[layers.at(-1)]}` : columns.names[layers[0]];
    const left = before / total;
    before += width;
    const held = layers.reduce((sum, layer) => sum + (columns.held_bytes[layer] ?? 0), 0);
    const button = make("button", {
      type: "button", class: "layer", "data-key": `layer-${layers[0]}`, "data-stages": stage, "data-layer": layers[0], "aria-label": `${name}, stage ${stage}`,
      style: { left: `${100 * left}%`, width: `max(2px, ${(100 * width) / total}%)`, height: `${timed ? Math.max(3, (100 * high) / most) : 60}%`, "--c": colourOf(stage) },
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
  row.replaceChildren(...blocks);
  const wide = row.clientWidth;
  bands.replaceChildren(...state.stages.map((stage, at) => {
    const [from, to] = [state.edges[at], state.edges[at + 1]];
    const replicas = stage.devices.length;
    const band = make("button", {
      type: "button", class: "band", "data-key": `stage-${at}`, "data-stages": at, "aria-pressed": `${at === state.selected}`,
      "aria-label": `stage ${at}: ${several(stage.layers.length, "layer")} on ${several(replicas, "device")}`,
      style: { left: `${100 * from}%`, width: `${100 * (to - from)}%`, "--c": colourOf(at) },
      onclick: () => select(at),
    }, labelled((to - from) * wide, at, `stage ${at}: ${several(stage.layers.length, "layer")} × ${replicas}`));
    return lights(band, () => stageWords(at));
  }));
  roving(row, ".layer");
  roving(bands, ".band");
});

// What a stage is called where it has so many pixels.
const labelled = (px, stage, whole) => (px > 7 * whole.length + 28 ? whole : px > 84 ? `stage ${stage}` : px > 28 ? `${stage}` : "");

function select(stage) {
  state.selected = stage;
  byId("bands").querySelectorAll(".band").forEach((band, at) => band.setAttribute("aria-pressed", `${at === stage}`));
  paintStageBar(state.facts);
}

// For numbers that the server did not put into words; those of single layers.
function scaled(value, units) {
  if (!value) return `0 ${units[0][1]}`;
  const [factor, unit] = units.find(([least]) => value >= least) ?? units.at(-1);
  return `${Number((value / factor).toPrecision(3))} ${unit}`;
}
const seconds = (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]);
const bytes = (value) => scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
