// The ranks of a run as a grid, one cell each: a sign and a colour for the state, and all else of the one looked at.

import { el, setAttribute, setText } from "./dom.js";
import { clean, duration, number, plural } from "./format.js";
import { section } from "./parts.js";
import { isOfRounds } from "./rounddata.js";
import { STATES, shownState, stateOf } from "./words.js";

export function rankGrid(name) {
  const counts = el("div", { class: "legend" });
  const grid = el("div", {
    class: "grid",
    role: "listbox",
    tabindex: "0",
    "aria-label": "Ranks",
    "aria-orientation": "horizontal",
  });
  const hint = el(
    "span",
    { class: "dim" },
    "Point at a rank, or use the arrow keys, to see its state, node and last report.",
  );
  const facts = el("dl", {});
  const log = el("a", {}, "Log"); // stays the same element: whoever has it in focus keeps it while values change
  const detail = el("div", { class: "rank-detail" }, hint, facts, log);
  const empty = el("p", { class: "dim" }, "No ranks yet.");
  const part = section("Ranks", counts, grid, empty, detail);
  let ranks = [];
  let exits = new Map();
  let at = null; // the index of the rank looked at

  function look(index) {
    if (at !== null) grid.children[at]?.setAttribute("aria-selected", "false");
    at = index;
    const cell = index === null ? null : grid.children[index];
    hint.hidden = Boolean(cell);
    facts.hidden = log.hidden = !cell;
    if (!cell) {
      grid.removeAttribute("aria-activedescendant");
      return;
    }
    cell.setAttribute("aria-selected", "true");
    grid.setAttribute("aria-activedescendant", cell.id);
    facts.replaceChildren(...describe(ranks[index], exits.get(ranks[index].rank)));
    setAttribute(log, "href", `#/run/${encodeURIComponent(name)}/logs?rank=${ranks[index].rank}`);
  }

  grid.addEventListener("pointerover", (event) => {
    const index = [...grid.children].indexOf(event.target.closest("[role=option]"));
    if (index >= 0 && index !== at) look(index);
  });
  grid.addEventListener("click", (event) => {
    const index = [...grid.children].indexOf(event.target.closest("[role=option]"));
    if (index >= 0) look(index);
  });
  grid.addEventListener("focus", () => at === null && ranks.length > 0 && look(0));
  grid.addEventListener("keydown", (event) => {
    const row = columns(grid);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && at !== null) {
      location.hash = `#/run/${encodeURIComponent(name)}/logs?rank=${ranks[at].rank}`;
    } else if (event.key in steps && ranks.length > 0) {
      event.preventDefault();
      look(Math.min(Math.max((at ?? 0) + steps[event.key], 0), ranks.length - 1));
    }
  });
  look(null);

  return {
    element: part,
    update(next, ended, culprit) {
      ranks = next;
      exits = new Map(ended.map((exit) => [exit.rank, exit]));
      empty.hidden = ranks.length > 0;
      grid.hidden = detail.hidden = ranks.length === 0;
      setAttribute(grid, "data-size", ranks.length <= 64 ? "large" : ranks.length <= 256 ? "middle" : "small");
      while (grid.children.length > ranks.length) grid.lastElementChild.remove();
      ranks.forEach((rank, i) => {
        const cell =
          grid.children[i] ??
          grid.appendChild(
            el(
              "div",
              { role: "option", id: `rank-${i}`, "aria-selected": "false" },
              el("span", {}),
              el("span", { class: "number" }),
            ),
          );
        fill(cell, rank, culprit?.rank === rank.rank);
      });
      summarize(counts, ranks);
      if (at !== null) look(at < ranks.length ? at : null);
      else if (document.activeElement === grid && ranks.length > 0) look(0); // it had the focus before it had ranks
    },
  };
}

function fill(cell, rank, guilty) {
  const state = shownState(rank);
  const now = `${rank.rank} ${state} ${rank.restarts} ${rank.nodeName} ${guilty}`;
  if (cell.now === now) return;
  cell.now = now;
  const { sign, tone } = stateOf(state);
  setText(cell.firstElementChild, sign);
  setText(cell.lastElementChild, String(rank.rank));
  cell.dataset.tone = tone;
  setAttribute(cell, "data-restarted", rank.restarts > 0 ? "" : null);
  setAttribute(cell, "data-guilty", guilty ? "" : null);
  const restarts = rank.restarts > 0 ? `, ${plural(rank.restarts, "restart")}` : "";
  const node = rank.nodeName ? `, node ${clean(rank.nodeName)}` : "";
  cell.setAttribute(
    "aria-label",
    `rank ${rank.rank}, ${clean(state)}${restarts}${node}${guilty ? ", failed first" : ""}`,
  );
}

function summarize(element, ranks) {
  const counts = new Map();
  for (const rank of ranks) counts.set(shownState(rank), (counts.get(shownState(rank)) ?? 0) + 1);
  const order = Object.keys(STATES);
  const shown = [...counts].sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  const now = JSON.stringify(shown);
  if (element.now === now) return;
  element.now = now;
  element.replaceChildren(
    ...shown.map(([state, count]) => {
      const { sign, tone } = stateOf(state);
      return el(
        "span",
        { "data-tone": tone },
        el("span", { class: "sign", "aria-hidden": "true" }, sign),
        `${count} ${clean(state)}`,
      );
    }),
  );
}

function describe(rank, exit) {
  const facts = [
    ["Rank", String(rank.rank)],
    ["State", clean(shownState(rank))],
    ["Restarts", String(rank.restarts)],
    ["Node", clean(rank.nodeName ?? "–")],
  ];
  if (rank.note) facts.push(["Note", clean(rank.note)]);
  if (rank.report?.step !== undefined) facts.push(["Step", String(rank.report.step)]);
  if (rank.report?.stepSeconds) facts.push(["Step time", duration(rank.report.stepSeconds)]);
  const numbers = Object.entries(rank.report?.values ?? {}).filter(([metric]) => !isOfRounds(metric));
  for (const [metric, value] of numbers.slice(0, 4)) facts.push([clean(metric), number(value)]);
  if (exit) {
    facts.push(
      ["Exit code", exit.exitCode < 0 ? "unknown" : String(exit.exitCode)],
      ["Reason", clean(exit.terminationReason ?? "–")],
    );
    if (exit.role) facts.push(["Role", clean(exit.role)]);
  }
  return facts.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)));
}

/** How many cells are in a row, as they are laid out now. */
function columns(grid) {
  return getComputedStyle(grid).gridTemplateColumns.split(" ").length;
}
