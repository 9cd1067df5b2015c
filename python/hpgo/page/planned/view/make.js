// Elements, from what they are: a tag, its attributes and handlers, and what is in it.
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) {
      element[name] = value;
      (element.handles ??= []).push(name);
    } else if (name === "style") element.setAttribute(name, Object.entries(value).map((pair) => pair.join(":")).join(";"));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Fills an element anew, and keeps what it holds as far as that stays: a browser lays out and paints only the rest.
function put(into, ...children) {
  const wanted = children.flat().filter((child) => child !== null && child !== undefined);
  wanted.forEach((child, at) => {
    const there = into.childNodes[at];
    if (!there) into.append(child);
    else if (!became(there, child)) there.replaceWith(child);
  });
  while (into.childNodes.length > wanted.length) into.lastChild.remove();
}

// Whether one element or text could be made what another is.
function became(there, child) {
  if (there === child) return true;
  if (!(child instanceof Element)) {
    const text = child.data ?? `${child}`;
    if (!(there instanceof Text)) return false;
    if (there.data !== text) there.data = text;
    return true;
  }
  if (there.nodeName !== child.nodeName || there.id !== child.id) return false;
  for (const name of child.getAttributeNames()) if (there.getAttribute(name) !== child.getAttribute(name)) there.setAttribute(name, child.getAttribute(name));
  for (const name of there.getAttributeNames()) if (!child.hasAttribute(name)) there.removeAttribute(name);
  for (const name of there.handles ?? []) there[name] = null;
  for (const name of child.handles ?? []) there[name] = child[name];
  Object.assign(there, { handles: child.handles, words: child.words });
  put(there, ...child.childNodes);
  return true;
}

// "0-2+5" as [0, 1, 2, 5], and back.
function numbersOf(text) {
  const numbers = [];
  for (const run of text.split("+")) {
    const [first, last] = run.split("-").map(Number);
    for (let number = first; number <= (last ?? first); number++) numbers.push(number);
  }
  return numbers;
}

function runsOf(numbers) {
  const runs = [];
  for (const number of numbers) {
    const run = runs[runs.length - 1];
    if (run && number === run[1] + 1) run[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join("+");
}

const stagesText = (stages) => stages.map((stage) => `${runsOf(stage.layers)}@${runsOf(stage.devices)}`).join(",");
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const several = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
const say = (text) => { byId("said").textContent = text; };

// What each pattern means.
const legend = (names) => make("p", { class: "legend" }, ...names.map(([kind, name]) => make("span", {}, make("i", { class: kind === "line" ? kind : `fill is-${kind}` }), name)));

// Of many alike, Tab stops at one, and arrow keys go from one to the next.
function alike(all) {
  all.forEach((one, at) => one.setAttribute("tabindex", at ? -1 : 0));
  return all;
}

function roving(container, selector) {
  const all = () => [...container.querySelectorAll(selector)];
  if (container.roving) return;
  container.roving = true;
  container.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = all().indexOf(event.target);
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const to = step ? all()[at + step] : event.key === "Home" ? all()[0] : event.key === "End" ? all().at(-1) : null;
    if (!to) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
}
