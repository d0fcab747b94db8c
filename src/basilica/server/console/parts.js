// Small things that several pages show.

import { el, setAttribute, setText } from "./dom.js";
import { clean } from "./format.js";
import { phaseOf } from "./words.js";

/** A phase as a sign and a word; `update(name)` changes it. */
export function phaseBadge() {
  const sign = el("span", { class: "sign", "aria-hidden": "true" });
  const word = el("span", {});
  const element = el("span", { class: "phase" }, sign, word);
  element.update = (name) => {
    const { sign: shown, tone } = phaseOf(name);
    setText(sign, shown);
    setText(word, clean(name));
    setAttribute(element, "data-tone", tone);
  };
  return element;
}

/** The world as a bar from 0 to max: filled as far as ranks are up, with a mark at min and one at target; grey when the
 * run has ended. */
export function worldBar() {
  const count = el("span", { class: "world-count" });
  const fill = el("span", { class: "world-fill" });
  const low = el("span", { class: "world-min" });
  const aim = el("span", { class: "world-target" });
  const bar = el("span", { class: "world-bar" }, fill, low, aim);
  const bounds = el("span", { class: "world-bounds dim" });
  const element = el("span", { class: "world", role: "img" }, count, bar, bounds);
  element.update = (world, ended) => {
    const share = (n) => `${(100 * n) / Math.max(world.max, world.ready, 1)}%`;
    setText(count, `${world.ready}/${world.target}`);
    setText(bounds, world.min === world.max ? `${world.max}` : `${world.min}…${world.max}`);
    fill.style.width = share(world.ready);
    low.style.left = share(world.min);
    aim.style.left = share(world.target);
    const tone = world.ready < world.min ? "warn" : world.ready < world.target ? "wait" : "good";
    setAttribute(element, "data-tone", ended ? "idle" : tone);
    const label = `${world.ready} of ${world.target} ranks up, between ${world.min} and ${world.max}`;
    setAttribute(element, "aria-label", label);
    setAttribute(element, "title", label);
  };
  return element;
}

/** The colour of a cause of time; the word stands beside it. */
export function causeMark(cause) {
  return el("span", { class: "cause-mark", "data-cause": cause, "aria-hidden": "true" });
}

/** A button that copies a command, and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "quiet copy", title: "Copy the command" }, label);
  button.addEventListener("click", async () => {
    const given = text();
    try {
      await navigator.clipboard.writeText(given);
    } catch {
      copyBySelection(given); // over plain HTTP from another machine there is no clipboard to ask for
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

function copyBySelection(text) {
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A heading with a body, which `show(false)` hides while there is nothing to say. */
export function section(title, ...body) {
  const id = `h-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  const side = el("div", { class: "section-side" });
  const element = el(
    "section",
    { class: "section", "aria-labelledby": id },
    el("div", { class: "section-head" }, el("h2", { id }, title), side),
    ...body,
  );
  element.side = side;
  element.show = (wanted) => (element.hidden = !wanted);
  return element;
}

/** One of several choices. */
export function choices(label, options, chosen, onChange) {
  const group = el("div", { class: "choices", role: "group", "aria-label": label });
  const buttons = options.map(([value, text]) => {
    const button = el("button", { type: "button", "aria-pressed": String(value === chosen) }, text);
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      onChange(value);
    });
    return button;
  });
  group.append(...buttons);
  return group;
}
