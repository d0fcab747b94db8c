// The ranks of a run as a grid, one cell each: a sign and a colour for the state, and all else of the one looked at.

import { CAUSES } from "./account.js";
import { el, replace, setAttribute, setText } from "./dom.js";
import { age, clean, duration, grouped, number, plural } from "./format.js";
import { causeMark, section } from "./parts.js";
import { isOfRounds } from "./rounddata.js";
import { STATES, shownState, stateOf } from "./words.js";

const LOOP = 3; // failures that follow each other closely, and a minute: what the server calls a crash loop
const LOOP_GAP = 60_000;
const LOOPS = 4;
const PIDS = 8;

export function rankGrid(app, name) {
  const counts = el("div", { class: "legend" });
  const causes = el("div", { class: "legend" });
  const loops = el("ul", { class: "crashes", hidden: true });
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
  const part = section("Ranks", el("div", { class: "legends" }, counts, causes), grid, empty, loops, detail);
  let ranks = [];
  let exits = new Map(); // by rank: its last, or that of the worker that failed last
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
    facts.replaceChildren(...describe(ranks[index], exits.get(ranks[index].rank), app.now()));
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
    /** Brings a rank and its exit into sight. */
    show(rank) {
      const index = ranks.findIndex((it) => it.rank === rank);
      if (index >= 0) look(index);
      part.scrollIntoView({ block: "nearest" });
      grid.focus({ preventScroll: true });
    },
    /** Counts on how long the rank looked at has been at what it does. */
    tick() {
      const since = at === null ? undefined : ranks[at]?.causeSince;
      const shown = facts.querySelector(".for");
      if (since !== undefined && shown) setText(shown, forHowLong(since, app.now()));
    },
    update({ ranks: next, rankExits, workerExits, culprit }) {
      ranks = next;
      exits = new Map([...workerExits, ...rankExits].map((exit) => [exit.rank, exit]));
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
      summarizeCauses(causes, ranks);
      listLoops(loops, ranks, app.now());
      if (at !== null) look(at < ranks.length ? at : null);
      else if (document.activeElement === grid && ranks.length > 0) look(0); // it had the focus before it had ranks
    },
  };
}

function fill(cell, rank, guilty) {
  const state = shownState(rank);
  const now = `${rank.rank} ${state} ${rank.restarts} ${rank.nodeName} ${guilty} ${rank.cause}`;
  if (cell.now === now) return;
  cell.now = now;
  const { sign, tone } = stateOf(state);
  setText(cell.firstElementChild, sign);
  setText(cell.lastElementChild, String(rank.rank));
  cell.dataset.tone = tone;
  setAttribute(cell, "data-restarted", rank.restarts > 0 ? "" : null);
  setAttribute(cell, "data-guilty", guilty ? "" : null);
  setAttribute(cell, "data-cause", rank.cause);
  const restarts = rank.restarts > 0 ? `, ${plural(rank.restarts, "restart")}` : "";
  const node = rank.nodeName ? `, node ${clean(rank.nodeName)}` : "";
  const cause = rank.cause ? `, ${clean(rank.cause)}` : "";
  cell.setAttribute(
    "aria-label",
    `rank ${rank.rank}, ${clean(state)}${restarts}${node}${guilty ? ", failed first" : ""}${cause}`,
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
        `${grouped(count)} ${clean(state)}`,
      );
    }),
  );
}

/** How many ranks are charged with each cause now. */
function summarizeCauses(element, ranks) {
  const counts = new Map();
  for (const { cause } of ranks) if (cause !== undefined) counts.set(cause, (counts.get(cause) ?? 0) + 1);
  const order = Object.keys(CAUSES);
  const shown = [...counts].sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  const now = JSON.stringify(shown);
  if (element.now === now) return;
  element.now = now;
  element.hidden = shown.length === 0;
  element.replaceChildren(
    ...shown.map(([cause, count]) => el("span", {}, causeMark(cause), `${grouped(count)} ${clean(cause)}`)),
  );
}

export const isLooping = ({ crashes }, now) => crashes?.count >= LOOP && now - Date.parse(crashes.at) < LOOP_GAP;

/** Ranks that fail again and again, each in a sentence. */
function listLoops(element, ranks, now) {
  const found = ranks.filter((rank) => isLooping(rank, now));
  const texts = found.slice(0, LOOPS).map(describeLoop);
  if (found.length > LOOPS) texts.push(`and ${plural(found.length - LOOPS, "rank")} more in a crash loop`);
  const key = JSON.stringify(texts);
  if (element.now === key) return;
  element.now = key;
  element.hidden = texts.length === 0;
  const sign = () => el("span", { class: "sign", "aria-hidden": "true" }, "✕");
  replace(element, ...texts.map((text) => el("li", {}, sign(), text)));
}

/** `worker 1 of rank 0 has failed 5 times in 40s: RuntimeError: …` */
function describeLoop({ rank, crashes }) {
  const who = crashes.worker === undefined ? `rank ${rank}` : `worker ${crashes.worker} of rank ${rank}`;
  const span = duration((Date.parse(crashes.at) - Date.parse(crashes.since)) / 1000);
  const error = crashes.error ? `: ${clean(crashes.error)}` : "";
  return ` ${who} has failed ${plural(crashes.count, "time")} in ${span}${error}`;
}

const forHowLong = (since, now) => ` for ${age(Date.parse(since), now)}`;

/** `0-3`, or what the ranks are, one by one. */
function spanOf(numbers) {
  const [first, last] = [numbers[0], numbers.at(-1)];
  const whole = numbers.length > 1 && last - first === numbers.length - 1;
  return whole ? `${first}-${last}` : numbers.join(", ");
}

function describeAgent({ round, torchRanks, pids }) {
  const found = [["Workers started", plural(round, "time")]];
  if (torchRanks.length > 0) found.push([torchRanks.length > 1 ? "Torch ranks" : "Torch rank", spanOf(torchRanks)]);
  const more = pids.length > PIDS ? ` and ${pids.length - PIDS} more` : "";
  if (pids.length > 0) found.push([pids.length > 1 ? "Pids" : "Pid", pids.slice(0, PIDS).join(", ") + more]);
  return found;
}

function describe(rank, exit, now) {
  const facts = [
    ["Rank", String(rank.rank)],
    ["State", clean(shownState(rank))],
    ...(rank.cause ? [["Time goes to", [causeMark(rank.cause), clean(rank.cause), forLong(rank, now)]]] : []),
    ["Restarts", String(rank.restarts)],
    ["Node", clean(rank.nodeName ?? "–")],
  ];
  if (rank.note) facts.push(["Note", clean(rank.note)]);
  const step = rank.report?.step ?? rank.step;
  const before = rank.step > step ? ` (${rank.step} was reached)` : "";
  if (step !== undefined) facts.push(["Step", `${step}${before}`]);
  if (rank.report?.stepSeconds) facts.push(["Step time", duration(rank.report.stepSeconds)]);
  const numbers = Object.entries(rank.report?.values ?? {}).filter(([metric]) => !isOfRounds(metric));
  for (const [metric, value] of numbers.slice(0, 4)) facts.push([clean(metric), number(value)]);
  if (rank.agent) facts.push(...describeAgent(rank.agent));
  if (exit) {
    if (exit.worker !== undefined) facts.push(["Failed last", `worker ${exit.worker}${torchName(exit)}`]);
    facts.push(
      ["Exit code", exit.exitCode < 0 ? "unknown" : String(exit.exitCode)],
      ["Reason", clean(exit.terminationReason ?? "–")],
    );
    if (exit.signal) facts.push(["Signal", clean(exit.signal)]);
    if (exit.message) facts.push(["Exception", clean(exit.message)]);
    if (exit.role) facts.push(["Role", clean(exit.role)]);
  }
  return facts.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)));
}

const forLong = ({ causeSince }, now) => el("span", { class: "for" }, forHowLong(causeSince, now));
const torchName = ({ torchRank }) => (torchRank === undefined ? "" : ` (torch rank ${torchRank})`);

/** How many cells are in a row, as they are laid out now. */
function columns(grid) {
  return getComputedStyle(grid).gridTemplateColumns.split(" ").length;
}
