// Single keys: what they do now, and a list of them behind `?`.

import { el } from "./dom.js";
import { showDialog } from "./dialog.js";

const TYPING = "input, textarea, select, [contenteditable]";
const OFF = "basilica-keys-off";

export class Keys {
  constructor() {
    this.layers = []; // the newest first: a page's keys come before those that are always there
    this.on = stored(OFF) === null;
    document.addEventListener("keydown", (event) => this.press(event));
  }

  /** `{key: [what it does, function]}`; one without words is not listed. Returns a function that takes them back. */
  add(bindings) {
    this.layers.unshift(bindings);
    return () => {
      this.layers = this.layers.filter((layer) => layer !== bindings);
    };
  }

  press(event) {
    if (!this.on || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]") || event.target.matches?.(TYPING)) return;
    if (event.target.closest?.("[role=listbox]") && event.key.startsWith("Arrow")) return;
    const found = this.layers.find((layer) => layer[event.key]);
    // A button or a link has a use for these itself.
    if (!found || (event.key === " " && event.target.closest?.("button, a, summary"))) return;
    event.preventDefault();
    found[event.key][1]();
  }

  help() {
    const rows = this.layers.flatMap((layer) =>
      Object.entries(layer)
        .filter(([, [words]]) => words)
        .map(([key, [words]]) => [el("dt", {}, el("kbd", {}, key === " " ? "space" : key)), el("dd", {}, words)]),
    );
    // Who dictates to the browser says letters all the time: for them the keys can be turned off.
    const box = el("input", { type: "checkbox" });
    box.checked = this.on;
    box.addEventListener("change", () => {
      this.on = box.checked;
      store(OFF, this.on ? null : "yes");
    });
    showDialog("Keys", [
      el("dl", { class: "keys" }, ...rows.flat()),
      el("label", { class: "check" }, box, "Use single keys"),
    ]);
  }
}

function stored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    // It holds for as long as the page is open.
  }
}
