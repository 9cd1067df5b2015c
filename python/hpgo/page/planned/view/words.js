// The report, in its own words.
function table(columns, rows, texts = []) {
  const kind = (at) => (texts.includes(at) ? "text" : null);
  return make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": `Table: ${columns.filter(Boolean).slice(0, 3).join(", ")}…` }, make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map((name, at) => (name ? make("th", { scope: "col", class: kind(at) }, name)  : make("td", { class: "empty" }))))),
    make("tbody", {}, ...rows.map((cells) => make("tr", { class: cells.mark }, ...cells.map((cell, at) => make("td", { class: kind(at) }, cell)))))));
}

paintedAfter((facts) => {
  put(
    byId("words"),
    make("dl", {}, ...facts.report.summary.flatMap(([name, fact]) => [make("dt", {}, name), make("dd", {}, fact)])),
    facts.report.tables.flatMap(({ title, columns, rows }) => [make("p", {}, make("b", {}, title)), table(columns, rows, [columns.indexOf("layers")])]),
  );
});
