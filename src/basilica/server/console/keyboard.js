// Single keys: what they do now, and a list of them behind `?`.

import { el } from "./dom.js";
import { showDialog } from "./dialog.js";

const TYPING = "input, textarea, select, [contenteditable]";

export class Keys {
  constructor() {
    this.layers = []; // the newest first: a page's keys come before those that are always there
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
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
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
    showDialog("Keys", [el("dl", { class: "keys" }, ...rows.flat())]);
  }
}
