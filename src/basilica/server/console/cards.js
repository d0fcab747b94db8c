// What went wrong: the rank that failed first, and the ranks that have fallen silent.

import { el, replace, setText } from "./dom.js";
import { clean, cleanLines, clock, duration, logLine } from "./format.js";

/** Who failed first, why we think so, and its last words. */
export function culpritCard() {
  const element = el("section", { class: "card bad", "aria-labelledby": "h-culprit", hidden: true });
  let shown = "";
  return {
    element,
    update(run) {
      const it = run.distributed.culprit;
      const now = JSON.stringify(it ?? null);
      if (now === shown) return; // a card that is being read is left alone
      shown = now;
      element.hidden = !it;
      if (!it) return;
      const { rankExits, workerExits } = run.distributed;
      const isWorker = it.worker !== undefined;
      const exit = isWorker
        ? workerExits.findLast((e) => e.rank === it.rank && e.worker === it.worker && e.pid === it.pid)
        : rankExits.find((e) => e.rank === it.rank);
      const facts = [
        ...(isWorker ? [["Worker", nameWorker(it)]] : []),
        ["Exit code", it.exitCode < 0 ? "unknown" : String(it.exitCode)],
        ["Reason", nameReason(it.terminationReason)],
        ...(exit?.signal ? [["Signal", clean(exit.signal)]] : []),
        ...(exit?.node ? [["Node", clean(exit.node)]] : []),
        ...(it.message ? [["Exception", clean(it.message)]] : []),
        ...(it.cause ? [["Because", clean(it.cause)]] : []),
        ["Evidence", clean(it.evidence)],
        ...(it.confidence === "high" ? [] : [["Confidence", clean(it.confidence)]]),
      ];
      replace(
        element,
        el(
          "h2",
          { id: "h-culprit" },
          el("span", { class: "sign", "aria-hidden": "true" }, "✕"),
          isWorker ? ` Worker ${it.worker} of rank ${it.rank} failed first` : ` Rank ${it.rank} failed first`,
        ),
        el("dl", { class: "facts-list" }, ...facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])),
        it.traceback ? text("Traceback", cleanLines(it.traceback)) : null,
        ...lastLines(it),
        el(
          "p",
          { class: "card-links" },
          el(
            "a",
            { href: `#/run/${encodeURIComponent(run.instanceName)}/logs?rank=${it.rank}` },
            `All of rank ${it.rank}'s log`,
          ),
        ),
      );
    },
  };
}

function nameWorker({ worker, rank, torchRank, pid }) {
  const torch = torchRank === undefined ? "" : `, torch rank ${torchRank}`;
  return `${worker} of rank ${rank}${torch}${pid === undefined ? "" : `, pid ${pid}`}`;
}

const nameReason = (reason) => (reason === "OOMKilled" ? "OOMKilled: killed for want of memory" : clean(reason));

/** The end of its log, without the traceback where that is shown already. */
function lastLines({ logTail, traceback }) {
  const lines = [...logTail];
  while (traceback && lines.length > 0 && traceback.includes(lines.at(-1).trim())) lines.pop();
  if (lines.length === 0) return [];
  return [text(lines.length < logTail.length ? "Last lines before it" : "Last lines", lines.map(logLine).join("\n"))];
}

/** The ranks that have stopped reporting, the one that fell silent first with its stack. */
export function stallCard(app) {
  const heading = el("h2", { id: "h-stall" });
  const facts = el("ul", { class: "stalls" });
  const stack = el("div", {});
  const element = el(
    "section",
    { class: "card warn", "aria-labelledby": "h-stall", hidden: true },
    heading,
    facts,
    stack,
  );
  let shown = "";
  return {
    element,
    update(run) {
      const silent = run.distributed.ranks
        .filter((rank) => rank.stalled && rank.state === "running")
        .sort((a, b) => Date.parse(a.stalled.since) - Date.parse(b.stalled.since) || a.rank - b.rank);
      const now = JSON.stringify(silent.map((rank) => [rank.rank, rank.stalled]));
      if (now === shown) return;
      shown = now;
      element.hidden = silent.length === 0;
      if (silent.length === 0) return;
      const first = silent[0];
      setText(heading, silent.length === 1 ? `Rank ${first.rank} is stalled` : `${silent.length} ranks are stalled`);
      facts.replaceChildren(
        ...silent
          .slice(0, 8)
          .map(({ rank, stalled }) =>
            el(
              "li",
              {},
              `rank ${rank}: silent since ${clock(stalled.since, app.now())}, `,
              `usually a step every ${duration(stalled.usualStepSeconds)}`,
              stalled.where ? `; its main thread is in ${clean(stalled.where)}` : "",
            ),
          ),
        ...(silent.length > 8 ? [el("li", { class: "dim" }, `and ${silent.length - 8} more`)] : []),
      );
      stack.replaceChildren(
        ...(first.stalled.stack ? [text(`The threads of rank ${first.rank}`, cleanLines(first.stalled.stack))] : []),
      );
    },
  };
}

function text(title, body) {
  return el("div", { class: "text" }, el("h3", {}, title), el("pre", { tabindex: "0", "aria-label": title }, body));
}
