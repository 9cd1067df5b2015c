"use strict";
// Works without this script too; with it, changes draw at once, and only what they change is replaced.
const byId = (id) => document.getElementById(id);
const form = byId("settings"), fields = byId("fields"), words = byId("words"), view = byId("view");
const wide = matchMedia("(min-width: 801px)");
let waiting = 0, asked = new AbortController(), typing = null;

// What the fields say; the plan's own they leave to it.
function address() {
  const query = new URLSearchParams();
  for (const field of form.elements) {
    if (!field.name || field.disabled || (field.type === "checkbox" && !field.checked)) continue;
    const text = field.validity.badInput ? "?" : field.value;  // what is no number has no value, and would be the default
    if (text) query.append(field.name, text);
  }
  if (!query.has("schedule") && !query.has("plan")) query.append("schedule", "");
  return "/?" + query;
}

// Going back undoes one change, not one letter.
function go(url, again) {
  if (url !== location.pathname + location.search) history[again ? "replaceState" : "pushState"](null, "", url);
  draw(url);
}

async function draw(url, asking) {
  clearTimeout(waiting);
  asked.abort();  // so that the server ends work that nobody waits for
  const { signal } = asked = new AbortController();
  words.classList.add("busy");
  try {
    const answer = await fetch(url, { signal, ...asking }), text = await answer.text();
    if (signal.aborted) return null;
    if (asking && answer.ok) return text;
    show(new DOMParser().parseFromString(text, "text/html"), asking ? "file" : "");
  } catch (error) {
    if (signal.aborted) return null;
    words.innerHTML = '<p class="error" role="alert"><b>hpgo no longer answers.</b><br>Start <code>hpgo serve</code> again.</p>';
  }
  words.classList.remove("busy");
  return null;
}

// Takes over a page that was answered; of one about a file, what is wrong with that alone.
function show(page, only) {
  for (const id of only ? ["words"] : ["words", "more", "said"]) byId(id).innerHTML = page.getElementById(id).innerHTML;
  picture(page.querySelector("#view iframe"), page.getElementById("view").style.cssText);
  if (!only) document.title = page.title;
  for (const fresh of page.querySelectorAll(only ? `#${only}` : "form input, form select")) {
    const field = byId(fresh.id);
    for (const name of ["disabled", "title", "aria-invalid", "placeholder"])
      if (fresh.hasAttribute(name)) field.setAttribute(name, fresh.getAttribute(name)); else field.removeAttribute(name);
    if (field.type === "checkbox") field.checked = fresh.checked;
    else if (field.type !== "file") {
      if (field.options) field.innerHTML = fresh.innerHTML;
      if (field.value !== fresh.value) field.value = fresh.value;
    }
  }
  for (const fresh of page.querySelectorAll(only ? `#${only}-note` : "form .note")) byId(fresh.id).replaceWith(fresh);
}

// The last picture stays until the next is there; while something is wrong, faintly.
function picture(fresh, style) {
  for (const late of view.querySelectorAll(".coming")) late.remove();
  const now = byId("picture");
  view.classList.toggle("stale", !fresh);
  view.classList.remove("busy");
  if (!fresh || now?.getAttribute("src") === fresh.getAttribute("src")) return;
  const next = document.createElement("iframe");
  for (const name of ["src", "title"]) next.setAttribute(name, fresh.getAttribute(name));
  next.className = "coming";
  next.addEventListener("load", () => {
    next.contentWindow.hpgo?.restore(now?.contentWindow?.hpgo?.kept() ?? null); // an edit keeps what is looked at
    now?.remove(); next.className = ""; next.id = "picture"; view.classList.remove("busy"); });
  view.classList.add("busy");
  view.style.cssText = style;
  view.append(next);
}

form.addEventListener("submit", (event) => { event.preventDefault(); go(address()); });
form.addEventListener("input", ({ target }) => {
  if (target.type === "file") return;
  asked.abort();
  words.classList.add("busy");  // what it shows is no longer what the fields say
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    go(address(), target === typing);
    typing = /text|number/.test(target.type) ? target : null;
  }, 300);
});
form.addEventListener("focusout", () => { typing = null; });
form.addEventListener("change", async ({ target }) => {
  if (target.type !== "file" || !target.files.length) return;
  const file = target.files[0];
  const plan = await draw("/plans?name=" + encodeURIComponent(file.name), { method: "POST", body: file });
  target.value = "";  // so that the same file can be chosen again, changed
  if (plan) go("/?" + new URLSearchParams({ plan }));
});
addEventListener("popstate", () => { typing = null; draw(location.href); });

addEventListener("click", async ({ target }) => {
  if (target.id === "copy") {
    await navigator.clipboard.writeText(location.href);
    byId("said").textContent = target.textContent = "Address copied";
    setTimeout(() => { target.textContent = "Copy address"; }, 2000);
  }
});
addEventListener("click", (event) => {
  if (!event.target.matches(".to")) return;
  event.preventDefault();
  const field = byId(event.target.hash.slice(1));
  if (fields.contains(field)) fields.open = true;
  field.focus();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const open = event.target.closest("details.about[open]") ?? (wide.matches ? null : fields);
  if (!open?.open) return;
  open.open = false;
  open.querySelector("summary").focus();
});

// On a narrow screen the picture comes first, and the settings when they are asked for.
const fold = () => { fields.open = wide.matches; };
wide.addEventListener("change", fold);
fold();
document.documentElement.classList.toggle("copies", Boolean(navigator.clipboard));
