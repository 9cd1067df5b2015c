// Stages on the cluster: each device has the colour of its stage, and links say what crosses them.
painted((facts) => {
  const stageOf = new Map();
  facts.groups.forEach((group) => numbersOf(group.devices).forEach((device) => stageOf.set(device, group.stages)));
  const count = facts.machines.reduce((sum, machine) => sum + machine.count, 0);
  const size = count <= 32 ? 34 : count <= 144 ? 25 : 13;
  const machines = facts.machines.map((machine) => make("div", { class: "machine" },
    make("p", {}, size > 13 ? `${machine.name}: ${machine.count} × ${machine.device}` : machine.name.replace("machine ", "")),
    make("div", { class: "devices" }, ...Array.from({ length: machine.count }, (_, at) => device(machine.first + at)))));

  function device(number) {
    const stages = stageOf.get(number);
    const name = stages ? stages.join("·") : "–";
    const button = make("button", {
      type: "button", class: `device${stages ? "" : " idle"}`, "data-key": `device-${number}`, "data-device": number, "data-stages": stages ? stages.join(" ") : "",
      "aria-label": `device ${number}: ${stages ? `stage ${stages.join(", ")}` : "idle"}`, style: { "--c": stages ? colourOf(stages[0]) : "transparent" },
    }, name);
    return lights(button, () => ({
      title: `device ${number}${stages ? "" : ": idle"}`,
      rows: stages ? [["stage", stages.join(", ")], ["holds", facts.groups[facts.stages[stages[0]].group].total], ["free", facts.groups[facts.stages[stages[0]].group].free], ...(stages.length === 1 ? facts.stages[stages[0]].said.slice(2, 6) : [])] : [],
    }));
  }

  const box = make("div", { class: `machines${size === 13 ? " small" : ""}`, role: "group", "aria-label": "Devices", style: { "--size": `${size}px` } }, ...machines);
  const links = facts.links.map((link) => make("li", { "data-stages": `${link.from} ${link.to}` },
    make("span", {}, `stage ${link.from} → ${link.to}`),
    make("span", { class: "meter", title: `busy for ${percent(link.busy)} of the step` }, make("i", { style: { width: `${100 * Math.min(1, link.busy)}%` } })),
    make("span", {}, `${[link.bytes, link.time].filter(Boolean).join(" in ")} ${link.rate ? `at ${link.rate}, ` : ""}${link.between_machines ? "between machines" : "in a machine"}`)));
  byId("placed").replaceChildren(...[
    box,
    facts.rates.length ? make("p", { class: "rates" }, "Links: ", facts.rates.map(([where, rate]) => `${rate} ${where}`).join("; "), ".") : null,
    links.length ? make("ul", { class: "links", tabindex: links.length > 7 ? 0 : null, "aria-label": "What stages send on, each micro-batch" }, ...links) : null,
  ].filter(Boolean));
  roving(box, ".device");
});
