// What a device of each group holds, against its cap.
function strips(into, label, rows, after) {
  const longest = Math.max(...rows.map((row) => row.querySelector(".amount").textContent.length));
  const box = make("div", { class: "strips", role: "group", "aria-label": label, style: { "--amount": `${longest}ch` } }, alike(rows));
  put(into, box, after);
  roving(into.firstChild, ".strip");
}

const groupName = (group) => (group.stages.length > 4 ? `stages ${group.stages[0]}…${group.stages.at(-1)}` : `stage${group.stages.length > 1 ? "s" : ""} ${group.stages.join(", ")}`);

paintedAfter((facts) => {
  const maximum = Math.max(...facts.groups.map((group) => Math.max(group.total_bytes, group.capacity_bytes))) || 1;
  strips(byId("memory"), "Memory", facts.groups.map((group, at) => {
    const strip = make("button", {
      type: "button", class: `strip${group.fits ? "" : " over"}`, "data-key": `memory-${at}`, "data-stages": group.stages.join(" "),
      "aria-label": `${groupName(group)}: ${group.total} of ${group.capacity}${group.fits ? "" : `, ${group.free}`}`,
    },
    make("span", { class: "name" }, groupName(group)),
    make("span", { class: "stack" },
      ...group.terms.map((term) => make("i", { class: `fill is-${term.name}${term.bytes ? "" : " nothing"}`, style: { width: `${(100 * term.bytes) / maximum}%` } })),
      make("span", { class: "cap", style: { left: `calc(${(100 * group.capacity_bytes) / maximum}% - 2px)` } })),
    make("span", { class: `amount${group.fits ? "" : " bad"}` }, group.fits ? `${group.total} of ${group.capacity}` : group.free));
    return lights(strip, () => ({ title: `${groupName(group)}: devices ${group.name}`, rows: [...group.terms.map((term) => [term.name, term.text]), ["all", `${group.total} of ${group.capacity}`], ["free", group.free]] }));
  }), [legend([["weights", "weights"], ["gradients", "gradients"], ["optimizer", "optimizer"], ["activations", "activations"], ["buffers", "buffers"], ["line", "the device's memory"]])]);
});
