// Sweeps: the best plan for each of several batches or numbers of devices, as a curve with the plan behind each point.
const sweeping = { points: [], over: "batch", control: null };

paintedAfter(() => {
  if (isFixed()) {
    byId("sweep-card").hidden = true;
    return;
  }
  byId("sweep-card").hidden = false;
  if (byId("sweep-over")) return;
  const over = make("select", { id: "sweep-over", onchange: () => { values.value = usual(over.value); } }, make("option", { value: "batch" }, "global batch"), make("option", { value: "devices" }, "devices"));
  const values = make("input", { id: "sweep-values", value: usual("batch") });
  const run = make("button", { id: "sweep-run", type: "submit" }, "Sweep");
  byId("sweep").replaceChildren(
    make("form", { onsubmit: (event) => { event.preventDefault(); sweep(over.value, values); } }, make("label", {}, "Over", over), make("label", {}, "Values, with commas", values), run),
    make("div", { id: "sweep-out", "aria-live": "polite" }));
});

function usual(over) {
  const { batch, devices } = state.facts.controls;
  const all = over === "batch" ? [batch / 4, batch / 2, batch, 2 * batch, 4 * batch, 8 * batch] : [devices / 8, devices / 4, devices / 2, devices];
  return all.filter((value) => value >= 1 && Number.isInteger(value)).join(", ");
}

async function sweep(over, input) {
  if (sweeping.control) {
    sweeping.control.abort();
    return;
  }
  const { question } = state;
  wrong(null);
  const values = input.value.split(",").map((text) => text.trim()).filter(Boolean);
  if (!values.length || values.length > 24 || values.some((text) => !/^[0-9]{1,9}$/.test(text))) return wrong(input, { message: "that is no list of whole numbers", hint: "give at most 24 with commas, like 32, 64, 128" });
  const mine = (sweeping.control = new AbortController());
  byId("sweep-run").textContent = "Stop";
  Object.assign(sweeping, { points: [], over });
  const { schedule, recompute } = state.facts.changes;
  for (const value of [...new Set(values)].sort((a, b) => a - b)) {
    const asked = { ...question, [over]: value };
    try {
      const facts = await searchFor({ ...asked, schedule, recompute }, { signal: mine.signal, told: () => {} });
      sweeping.points.push({ value: Number(value), facts, items: { ...asked, ...facts.changes } });
    } catch (error) {
      if (error.name === "AbortError") break;
      sweeping.points.push({ value: Number(value), error: error.said ?? { message: "no answer" } });
    }
    paintSweep();
  }
  sweeping.control = null;
  byId("sweep-run").textContent = "Sweep";
  paintSweep();
}

function paintSweep() {
  const there = sweeping.points.filter((point) => point.facts);
  const rate = (point) => Number(point.value && point.facts ? point.facts.samples_per_s : 0);
  const rows = sweeping.points.map((point) => (point.facts
    ? [`${point.value}`, point.facts.step, point.facts.figures[1].value, point.facts.proof.gap ?? "no bound", several(point.facts.stages.length, "stage"), make("button", { type: "button", "aria-label": `Make the plan for ${point.value} the plan`, onclick: () => price(point.items, byId("sweep")) }, "Make this the plan")]
    : [`${point.value}`, "–", "", point.error.message, "", ""]));
  byId("sweep-out").replaceChildren(...[there.length > 1 ? curve(there, rate) : null, table([sweeping.over === "batch" ? "global batch" : "devices", "step", "throughput", "proof", "plan", ""], rows, [3, 4])].filter(Boolean));
}

function curve(points, rate) {
  const width = Math.max(300, Math.min(860, byId("sweep").clientWidth));
  const [height, left, bottom] = [240, 48, 34];
  const [low, high] = [Math.log2(points[0].value), Math.log2(points.at(-1).value)];
  const top = Math.max(...points.map(rate)) * 1.08;
  const x = (point) => left + ((Math.log2(point.value) - low) / (high - low || 1)) * (width - left - 30);
  const y = (value) => height - bottom - (value / top) * (height - bottom - 14);
  const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => Number((share * top).toPrecision(2)));
  return make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Samples a second over the sweep" },
    ...steps.flatMap((value) => [
      make("svg:line", { class: "grid", x1: left, x2: width - 10, y1: y(value), y2: y(value) }),
      make("svg:text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, `${value}`),
    ]),
    make("svg:text", { x: left, y: 10 }, "samples/s"),
    make("svg:path", { class: "curve", d: points.map((point, at) => `${at ? "L" : "M"}${x(point)} ${y(rate(point))}`).join("") }),
    ...points.flatMap((point) => [
      make("svg:text", { x: x(point), y: height - 12, "text-anchor": "middle" }, `${point.value}`),
      make("svg:a", {
        href: `/plan?${query(point.items)}`, "aria-label": `${point.value}: ${point.facts.step}, ${point.facts.figures[1].value}`,
        onclick: (event) => { if (!event.ctrlKey && !event.metaKey) { event.preventDefault(); price(point.items, byId("sweep")); } },
      }, make("svg:circle", { cx: x(point), cy: y(rate(point)), r: 7 })),
    ]));
}
