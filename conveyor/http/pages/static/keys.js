// Move by single keys: j and k through the rows, / to the filter, ? to the help. Enter follows the
// link that has the focus, as ever. Whoever dictates or types by accident turns them off.
const SETTING = "conveyor-keys";

function isOn() {
  try {
    return localStorage.getItem(SETTING) !== "off";
  } catch {
    return true; // storage that the reader forbids keeps no setting
  }
}

function keep(on) {
  try {
    localStorage.setItem(SETTING, on ? "on" : "off");
  } catch {
    // as above: the choice ends with the page
  }
}

function links() {
  const rows = [...document.querySelectorAll("[data-row]")];
  return rows.map((row) => row.querySelector("a, button")).filter((link) => link !== null);
}

function move(step) {
  const all = links();
  if (all.length === 0) return;
  const at = all.findIndex((link) => link.closest("[data-row]").contains(document.activeElement));
  const next = at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step;
  all[Math.min(Math.max(next, 0), all.length - 1)].focus();
}

function isTyping(element) {
  return element.isContentEditable || ["INPUT", "SELECT", "TEXTAREA"].includes(element.tagName);
}

export function startKeys() {
  const help = document.getElementById("keys");
  const box = help.querySelector("[data-keys-on]");
  let on = isOn();
  box.checked = on;
  box.addEventListener("change", () => keep((on = box.checked)));
  const open = document.querySelector("[data-open-keys]");
  open.parentElement.hidden = false;
  open.addEventListener("click", () => help.showModal());

  const actions = {
    j: () => move(1),
    k: () => move(-1),
    "/": () => document.querySelector("[data-filter]")?.focus(),
    "?": () => help.showModal(),
  };
  document.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!on || !action || help.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping(event.target)) return;
    event.preventDefault();
    action();
  });
}
