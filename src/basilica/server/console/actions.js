// What can be done to a run, each with the command that does the same in a terminal.

import { pathOf, post, remove } from "./api.js";
import { confirm } from "./dialog.js";
import { announce, el, setAttribute, setText } from "./dom.js";
import { clean, plural } from "./format.js";
import { copyButton } from "./parts.js";
import { isEnded } from "./words.js";

const scaleCommand = (run, target) => `basilica train scale ${run.instanceName} --target ${target}`;
const cancelCommand = (run) => `basilica train cancel ${run.instanceName}`;
const deleteCommand = (run) => `basilica train down ${run.instanceName}`;

export function actions(app, name) {
  const target = el("input", { type: "number", id: "target", inputmode: "numeric", required: true });
  const apply = el("button", { type: "submit" }, "Scale");
  const copyScale = copyButton(() => scaleCommand(run, target.value), "Copy command");
  copyScale.setAttribute("aria-label", "Copy the command that scales");
  const form = el(
    "form",
    { class: "scale" },
    el("label", { for: "target", class: "dim" }, "Ranks"),
    target,
    apply,
    copyScale,
  );
  const cancel = el("button", { type: "button" }, "Cancel…");
  const drop = el("button", { type: "button", class: "danger" }, "Delete…");
  const said = el("p", { class: "said", role: "alert", hidden: true });
  const element = el("div", { class: "actions", hidden: true }, form, cancel, drop);
  let run = null;
  let shown = null; // the target that the field was filled with: what somebody typed is left alone
  let busy = false;

  /** One thing at a time. The buttons only look disabled meanwhile: one that really is loses the focus. */
  async function act(work, done) {
    said.hidden = true;
    busy = true;
    for (const button of [apply, cancel, drop]) setAttribute(button, "aria-disabled", "true");
    try {
      await work();
      announce(done);
    } catch (error) {
      setText(said, clean(error.message));
      said.hidden = false;
    } finally {
      busy = false;
      for (const button of [apply, cancel, drop]) setAttribute(button, "aria-disabled", null);
      if (run) update(run);
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (busy) return;
    const wanted = Number(target.value);
    shown = wanted;
    act(() => post(`${pathOf(name)}/scale-distributed`, { target: wanted }), `scaling to ${plural(wanted, "rank")}`);
  });

  cancel.addEventListener("click", async () => {
    if (busy) return;
    const text = "Its ranks are stopped. The record, the logs and the checkpoints stay.";
    if (
      await confirm(
        `Cancel ${clean(run.friendlyName)}?`,
        [el("p", {}, text), command(cancelCommand(run))],
        "Cancel the run",
      )
    ) {
      act(() => post(`${pathOf(run.instanceName)}/cancel`), "cancelled");
    }
  });

  drop.addEventListener("click", async () => {
    if (busy || run.state === "Terminating") return;
    const live = isEnded(run.phase) ? "" : " What still runs is stopped first.";
    const text = `Its record, logs and checkpoints are removed.${live} This cannot be undone.`;
    if (
      await confirm(
        `Delete ${clean(run.friendlyName)}?`,
        [el("p", {}, text), command(deleteCommand(run))],
        "Delete the run",
      )
    ) {
      act(async () => {
        await remove(`${pathOf(run.instanceName)}?wait=1`);
        app.go("#/");
      }, "deleted");
    }
  });

  function update(next) {
    run = next;
    const { worldSize } = run.distributed;
    const over = isEnded(run.phase) || run.state === "Terminating";
    const focused = document.activeElement;
    element.hidden = false;
    form.hidden = over || worldSize.min === worldSize.max;
    cancel.hidden = over;
    if (over && (focused === cancel || form.contains(focused))) drop.focus(); // what had the focus is gone
    setAttribute(drop, "aria-disabled", busy || run.state === "Terminating" ? "true" : null);
    target.min = worldSize.min;
    target.max = worldSize.max;
    target.title = `between ${worldSize.min} and ${worldSize.max}`;
    if (shown !== worldSize.target && document.activeElement !== target) {
      target.value = worldSize.target;
      shown = worldSize.target;
    }
  }

  return {
    element,
    said,
    update,
    gone() {
      if (element.contains(document.activeElement)) document.getElementById("main").focus();
      element.hidden = true;
    },
  };
}

function command(text) {
  return el(
    "div",
    { class: "command" },
    el("code", {}, clean(text)),
    copyButton(() => text),
  );
}
