// Other plans that were looked at, and what they would give. The optimum's are shown beside a plan that was changed.
paintedAfter(() => paintAlternatives());

function paintAlternatives() {
  const from = state.facts.alternatives.length || !best.facts ? state.facts : best.facts;
  const rows = from.alternatives.map((row) => {
    const figures = [row.step, from === state.facts ? row.to_this : "", row.shape].filter(Boolean).join(" · ");
    const take = row.changes && !state.offline
      ? make("button", { type: "button", "data-key": `alternative-${row.name}`, "aria-label": `Make ${row.name} the plan`, onclick: () => change(row.changes, byId("alternatives")) }, "Make this the plan")
      : make("span", {});
    return make("li", {}, make("span", {}, make("b", {}, row.name), figures ? `: ${figures}` : ""), take, make("span", { class: "note" }, row.is_this && from === state.facts ? "is this plan" : row.why));
  });
  put(byId("alternatives"), rows.length
    ? make("ul", { tabindex: rows.length > 4 ? 0 : null, "aria-label": "Alternatives" }, ...rows)
    : make("p", {}, state.offline ? "The plan was saved without any." : "A search compares the plan with others: find the best plan."));
}
