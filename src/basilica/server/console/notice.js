// A planned change: what it is, which ranks it waits for, and how long at most.

import { announce, el, setText } from "./dom.js";
import { clean, grouped, namedRanks, plural } from "./format.js";
import { isEnded } from "./words.js";

const KINDS = {
  scale: ({ target }) => `resize to ${plural(target ?? 0, "rank")}`,
  restart: () => "restart of all ranks",
  cancel: () => "end of the run",
  deadline: () => "deadline of the run",
};

export function noticeBanner() {
  const text = el("span", {});
  const left = el("span", { class: "left" });
  const rest = el("span", { class: "notice-rest" });
  const element = el(
    "div",
    { class: "notice", "data-tone": "off", hidden: true },
    el("p", {}, el("span", { class: "sign", "aria-hidden": "true" }, "◷"), " ", text, left),
    el("div", { class: "notice-bar", "aria-hidden": "true" }, rest),
  );
  let notice = null;
  let said = "";

  return {
    element,
    /** Whether there is one to show. */
    update(run) {
      notice = isEnded(run.phase) ? null : (run.distributed.notice ?? null);
      element.hidden = notice === null;
      if (notice === null) {
        said = "";
        return false;
      }
      const what = describe(notice);
      const ranks = notice.waitingFor.length > 0 ? namedRanks(notice.waitingFor) : "its ranks";
      const step = notice.step === undefined ? "" : ` at step ${grouped(notice.step)}`;
      const made = notice.doneAt !== undefined;
      const state = made ? "under way, ranks go on when it has reached them" : `waiting for ${ranks} to be ready${step}`;
      setText(text, `${what}: ${state}`);
      const now = `${what} ${made}`;
      if (said !== now) announce(made ? `${what} is under way` : `planned: ${what}`);
      said = now;
      return true;
    },
    tick(now) {
      if (notice === null) return;
      const [begin, end] = [Date.parse(notice.since), Date.parse(notice.until)];
      const made = notice.doneAt !== undefined;
      setText(left, made ? "" : `, ${Math.max(0, Math.ceil((end - now) / 1000))} s at most`);
      const share = made || end <= begin ? 0 : Math.min(1, Math.max(0, (end - now) / (end - begin)));
      rest.style.width = `${(100 * share).toFixed(1)}%`;
    },
  };
}

function describe(notice) {
  const known = KINDS[notice.kind];
  if (known) return known(notice);
  return clean(notice.reason ? `${notice.kind} (${notice.reason})` : notice.kind);
}
