// Time by term, memory by column, and the picture of one simulated step.
const FILL_OF_COLUMN = { weights: "weights", gradients: "gradients", optimizer: "optimizer", activations: "activations", logits: "sync" };
const fillOfColumn = (key) => FILL_OF_COLUMN[key] ?? "buffers";

const strip = (name, parts, amount, { cap = null, isBad = false } = {}) => make("div", { class: `strip${isBad ? " over" : ""}` },
  make("span", { class: "name" }, name),
  make("span", { class: "stack" }, ...parts.map(({ kind, share, title }) => make("i", { class: `fill is-${kind}`, style: { width: `${100 * share}%` }, title })), cap === null ? null : make("span", { class: "cap", style: { left: `calc(${100 * cap}% - 2px)` } })),
  make("span", { class: `amount${isBad ? " bad" : ""}` }, amount));

painted((facts) => {
  const most = facts.terms[0].share;
  put(byId("terms"), make("div", { class: "strips still", tabindex: 0, role: "region", "aria-label": "Time by term", style: { "--amount": "17ch" } },
    ...facts.terms.filter((term) => term.share > 5e-4).map((term) => strip(term.label, [{ kind: term.kind, share: term.share / most }], `${term.text}, ${percent(term.share)}`))),
  legend([["F", "computes"], ["sync", "communicates"], ["waits", "waits"]]));
});

painted((facts) => {
  const most = Math.max(1, ...facts.ranks.map((rank) => rank.share));
  const kinds = new Map();
  for (const rank of facts.ranks) for (const column of rank.columns) kinds.set(fillOfColumn(column.key), column.label);
  kinds.set("buffers", "buffers and overhead");
  put(byId("memory"), make("div", { class: "strips still", tabindex: 0, role: "region", "aria-label": "Memory by pipeline rank", style: { "--amount": "9ch" } },
    ...facts.ranks.map((rank, at) => strip(`rank ${at}`, rank.columns.map((column) => ({ kind: fillOfColumn(column.key), share: column.share / most, title: `${column.label}: ${column.text}` })), rank.total, { cap: 1 / most, isBad: rank.share > 1 }))),
  legend([...kinds, ["line", `${facts.capacity} of the GPU`]]),
  make("details", {}, make("summary", {}, "Numbers"), make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Memory by column" }, make("table", {},
    make("thead", {}, make("tr", {}, ...["rank", "layers", ...facts.ranks[0].columns.map((column) => column.label), "total"].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...facts.ranks.map((rank, at) => make("tr", {}, make("td", {}, `${at}`), make("td", {}, rank.layers), ...facts.ranks[0].columns.map(({ key }) => make("td", {}, rank.columns.find((column) => column.key === key)?.text ?? "0")), make("td", {}, rank.total))))))));
});

// The estimate comes first: the picture waits until the reader pauses.
let drawing = null, pausing = 0;
painted(() => {
  clearTimeout(pausing);
  if (drawing) drawing.abort();
  pausing = setTimeout(async () => {
    const mine = (drawing = new AbortController());
    const width = Math.max(320, Math.round(byId("timeline").clientWidth / 20) * 20);
    try {
      const answer = await fetch(`/transformers/timeline.svg?${query({ ...address(), width })}`, { signal: mine.signal });
      if (answer.ok) byId("timeline").innerHTML = await answer.text();
      else byId("timeline").replaceChildren(make("p", {}, `${(await answer.json()).error.message}.`));
    } catch (error) {
      if (error.name !== "AbortError") byId("timeline").replaceChildren(make("p", {}, `${OFFLINE.message}.`));
    }
  }, 120);
});
