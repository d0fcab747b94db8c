// Questions and notes in front of the page. The browser's own dialog keeps the focus inside and gives it back.

import { el } from "./dom.js";

function show(title, body, buttons) {
  const heading = el("h2", { id: "dialog-title" }, title);
  const dialog = el(
    "dialog",
    { "aria-labelledby": "dialog-title" },
    el("form", { method: "dialog" }, heading, ...body, el("div", { class: "dialog-buttons" }, ...buttons)),
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(""); // beside it
    });
    dialog.showModal();
  });
}

export function showDialog(title, body) {
  return show(title, body, [el("button", { value: "close", autofocus: true }, "Close")]);
}

/** True if somebody says yes. What is hard to undo has no default but no. */
export async function confirm(title, body, yes) {
  const answer = await show(title, body, [
    el("button", { value: "", autofocus: true }, "Keep it"),
    el("button", { value: "yes", class: "danger" }, yes),
  ]);
  return answer === "yes";
}
