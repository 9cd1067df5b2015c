// Where the step goes: in the words of the report, and for each group of devices.
const SHARES = { forward: "F", backward: "B", "gradients sync": "sync", waits: "waits" };
paintedAfter((facts) => {
  const rows = facts.time.groups.map((terms, at) => {
    const group = facts.groups[at];
    const busy = terms[0].share + terms[1].share;
    const strip = make("button", {
      type: "button", class: "strip", "data-key": `time-${at}`, "data-stages": group.stages.join(" "), "aria-label": `${groupName(group)} computes for ${percent(busy)} of the step`,
    },
    make("span", { class: "name" }, groupName(group)),
    make("span", { class: "stack" }, ...terms.map((term) => make("i", { class: `fill is-${SHARES[term.name]}${term.share ? "" : " nothing"}`, style: { width: `${100 * term.share}%` } }))),
    make("span", { class: "amount" }, `computes ${percent(busy)}`));
    return lights(strip, () => ({ title: groupName(group), rows: terms.map((term) => [term.name, `${term.text}, ${percent(term.share)}`]) }));
  });
  strips(byId("time"), "Time", rows, [
    legend([["F", "forward"], ["B", "backward"], ["sync", "gradients sync after it"], ["waits", "waits"]]),
    make("p", {}, make("b", {}, "Bottleneck: "), `${facts.time.limit}.`),
    make("p", {}, make("b", {}, "Suggestion: "), `${facts.time.advice}.`),
  ]);
});
