// The list of configurations, sortable, with a bar for the 90 % range of each step time.
const COLUMNS = [
  { key: "place", label: "#", of: (row) => row.place },
  { key: "step", label: "step time", of: (row) => row.step_s, text: (row) => row.words.step },
  { key: "range", label: "90 % range", of: (row) => row.high_s - row.low_s, bar: true },
  { key: "memory", label: "memory", of: (row) => row.peak_bytes, text: (row) => row.words.memory },
  { key: "mfu", label: "MFU", of: (row) => -row.utilization, text: (row) => row.words.utilization },
  { key: "idle", label: "idle", of: (row) => row.idle_share, text: (row) => row.words.idle },
  { key: "name", label: "configuration", of: (row) => row.name, text: (row) => row.name },
];

function paintList() {
  const { found } = state;
  byId("list-card").hidden = !found;
  if (!found) return;
  const rows = found.rows.map((row, at) => ({ ...row, place: at + 1 }));
  const sort = COLUMNS.find((column) => column.key === (state.view.sort ?? "place")) ?? COLUMNS[0];
  rows.sort((a, b) => (sort.of(a) < sort.of(b) ? -1 : sort.of(a) > sort.of(b) ? 1 : a.place - b.place));
  const low = Math.min(...rows.map((row) => row.low_s)), high = Math.max(...rows.map((row) => row.high_s));
  const at = (time) => `${(100 * (time - low)) / (high - low || 1)}%`;
  const bar = (row) => make("span", { class: "range", role: "img", "aria-label": row.words.range, title: row.words.range },
    make("i", { style: { left: at(row.low_s), right: `calc(100% - ${at(row.high_s)})` } }), make("b", { style: { left: at(row.step_s) } }));
  const cell = (row, column) => {
    if (column.bar) return make("td", {}, bar(row));
    if (column.key === "name") return make("td", { class: "text" }, make("button", { type: "button", class: "choose", "data-key": `row-${row.place}`, onclick: () => estimate(row.items, { isBase: true }) }, row.name), row.is_unvalidated ? make("small", {}, " no published step validates all of its features") : null);
    if (column.key === "place") return make("td", {}, `${row.place}`, row.place === 1 ? make("small", {}, " recommended") : row.is_alike ? make("small", {}, " equally fast") : null);
    return make("td", {}, column.text(row));
  };
  put(byId("list"), make("table", {},
    make("thead", {}, make("tr", {}, ...COLUMNS.map((column) => make("th", { scope: "col", class: column.key === "name" ? "text" : null, "aria-sort": column === sort ? "ascending" : null },
      make("button", { type: "button", "data-key": `sort-${column.key}`, onclick: () => { state.view.sort = column.key === "place" ? "" : column.key; writeAddress({ push: false }); paintList(); } }, column.label, column === sort ? " ▲" : ""))))),
    make("tbody", {}, ...rows.map((row) => make("tr", { class: query(row.items) === query(state.own) ? "this" : null }, ...COLUMNS.map((column) => cell(row, column)))))));
  byId("list-notes").textContent = found.notes.join("; ");
}
painted(paintList);
