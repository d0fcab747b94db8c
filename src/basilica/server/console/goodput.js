// Goodput: where the time of a run's ranks went, as a bar by cause and as a table, and what cost most.

import { CAUSES } from "./account.js";
import { arrange, el, setAttribute, setText } from "./dom.js";
import { clean, duration, percent, plural } from "./format.js";
import { causeMark, section } from "./parts.js";

const ORDER = Object.keys(CAUSES);
const SHOWN = 0.0005; // a share below this rounds to 0.0 %
const SHOWN_SECONDS = 0.05; // as does so short a time to 0
const HINT = "Point at a part of the bar, or use the arrow keys, to see what it is.";

export function goodput(account) {
  const share = el("strong", { class: "share" });
  const bar = el("div", {
    class: "causes",
    role: "listbox",
    tabindex: "0",
    "aria-label": "Time by cause",
    "aria-orientation": "horizontal",
    "aria-describedby": "cause-told",
  });
  const told = el("p", { class: "told dim", id: "cause-told" }, HINT);
  const loss = el("p", {});
  const code = el("code", {}, "basilica.report(step=…)");
  const why = el("span", {});
  const unknown = el("p", { class: "dim", hidden: true }, why, code, " tells.");
  const rows = el("tbody", {});
  const gpuHead = el("th", { scope: "col" }, "GPU time");
  const table = el(
    "table",
    { class: "cause-table" },
    el("caption", { class: "unseen" }, "Time of all ranks by cause"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, "Cause"),
        el("th", { scope: "col" }, "Share"),
        el("th", { scope: "col" }, "Rank time"),
        gpuHead,
      ),
    ),
    rows,
  );
  const part = section("Goodput", bar, told, loss, unknown, table);
  part.side.append(share);
  let parts = new Map(); // by cause: its piece of the bar, and its row
  let at = null; // the cause looked at

  function look(cause) {
    if (at !== null) parts.get(at)?.piece.setAttribute("aria-selected", "false");
    at = cause !== null && parts.get(cause)?.shown ? cause : null; // also one too small for the bar, from its row
    for (const [name, { row }] of parts) setAttribute(row, "data-looked", name === at ? "" : null);
    if (at === null) {
      bar.removeAttribute("aria-activedescendant");
      setText(told, HINT);
      return;
    }
    const { piece } = parts.get(at);
    piece.setAttribute("aria-selected", "true");
    setAttribute(bar, "aria-activedescendant", piece.hidden ? null : piece.id);
    setText(told, piece.getAttribute("aria-label"));
  }

  const over = (event) => {
    const cause = event.target.closest("[data-cause]")?.dataset.cause;
    if (cause !== undefined && cause !== at) look(cause);
  };
  bar.addEventListener("pointerover", over);
  bar.addEventListener("click", over);
  rows.addEventListener("pointerover", (event) => {
    const cause = event.target.closest("tr")?.dataset.of;
    if (cause !== undefined && cause !== at) look(cause);
  });
  bar.addEventListener("focus", () => at === null && look(present()[0] ?? null));
  bar.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    const causes = present();
    if (!(event.key in steps) || causes.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = causes.indexOf(at) + steps[event.key];
    look(causes[Math.min(Math.max(next, 0), causes.length - 1)]);
  });

  const present = () => [...parts].filter(([, { piece }]) => !piece.hidden).map(([cause]) => cause);

  function fill(cause, seconds, it) {
    let made = parts.get(cause);
    const part = it.all > 0 ? seconds / it.all : 0;
    const shown = seconds >= SHOWN_SECONDS || part >= SHOWN;
    if (made === undefined && !shown) return;
    if (made === undefined) {
      made = makePart(cause);
      parts = new Map([...parts, [cause, made]].sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b)));
      arrange(bar, [...parts.values()].map(({ piece }) => piece));
      arrange(rows, [...parts.values()].map(({ row }) => row));
    }
    const { piece, row, cells } = made;
    made.shown = shown;
    row.hidden = !shown;
    piece.hidden = part < SHOWN; // it would be drawn wider than it is; the table has it
    piece.style.flexGrow = part.toFixed(5);
    const gpus = it.gpus > 0 ? `, ${duration(seconds * it.gpus)} of GPUs` : "";
    const about = CAUSES[cause] ? ` (${CAUSES[cause].about})` : "";
    const sentence = `${clean(cause)}${about}: ${percent(part)} %, ${duration(seconds)} of ranks${gpus}`;
    setAttribute(piece, "aria-label", sentence);
    setText(cells.share, `${percent(part)} %`);
    setText(cells.ranks, duration(seconds));
    setText(cells.gpus, duration(seconds * it.gpus));
    cells.gpus.hidden = it.gpus === 0;
    if (cause === at) setText(told, sentence);
  }

  return {
    element: part,
    tick(now) {
      const it = account.at(now);
      const known = it.most - it.least < SHOWN;
      setText(share, it.all === 0 ? "–" : shareText(it));
      gpuHead.hidden = it.gpus === 0;
      for (const [cause, seconds] of it.seconds) fill(cause, seconds, it);
      if (at !== null && !parts.get(at)?.shown) look(null);
      table.hidden = bar.hidden = told.hidden = it.all === 0;
      setText(loss, describeLoss(it));
      unknown.hidden = known || it.all === 0;
      setText(
        why,
        it.seconds.get("training") > 0
          ? "For part of the time no steps were reported, and nobody knows what was trained then: "
          : "The program reports no steps, and nobody knows how much of its time is training: ",
      );
    },
  };
}

/** `91.2 %`, or its bounds where part of the time has no known cause: `0 to 93.1 %`. */
export function shareText({ least, most }) {
  if (most - least < SHOWN) return `${percent(least)} %`;
  return `${least < SHOWN ? "0" : percent(least)} to ${percent(most)} %`;
}

function describeLoss(it) {
  const again = it.stepsRecomputed;
  const steps = again > 0 ? `${plural(again, "step")} recomputed.` : "No step was recomputed.";
  if (it.all === 0) return "Nothing counted yet.";
  const lost = it.seconds.get(it.loss) ?? 0;
  if (lost / it.all < SHOWN) {
    return it.most - it.least < SHOWN ? `Nothing to speak of was lost. ${steps}` : "No loss is known.";
  }
  const each = duration((lost * it.wall) / it.all);
  return `Largest loss: ${clean(it.loss)}, ${percent(lost / it.all)} % (${each} a rank). ${steps}`;
}

function makePart(cause) {
  const piece = el("div", {
    role: "option",
    class: "cause-piece",
    id: `cause-${clean(cause)}`,
    "data-cause": cause,
    "aria-selected": "false",
  });
  const cells = { share: el("td", {}), ranks: el("td", {}), gpus: el("td", {}) };
  const about = CAUSES[cause]?.about;
  const row = el(
    "tr",
    { "data-of": cause, title: about },
    el("th", { scope: "row" }, causeMark(cause), clean(cause)),
    cells.share,
    cells.ranks,
    cells.gpus,
  );
  return { piece, row, cells, shown: true };
}
