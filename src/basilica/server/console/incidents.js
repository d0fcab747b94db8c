// Incidents: what interrupted the training. A band over the timeline, a list, and the card of the one selected.

import { arrange, el, replace, setAttribute, setText } from "./dom.js";
import { clean, cleanLines, clock, duration, grouped, plural } from "./format.js";
import { incidentOf } from "./words.js";

const LISTED = 6;

/** `show(rank)` brings a rank and its exit into sight. */
export function incidents(app, name, account, show) {
  const band = el("div", {
    class: "incident-band",
    role: "listbox",
    tabindex: "0",
    "aria-label": "Incidents over time",
    "aria-orientation": "horizontal",
    hidden: true,
  });
  const list = el("ol", { class: "incident-list" });
  const more = el("button", { type: "button", class: "quiet more", hidden: true });
  const card = incidentCard(app, name, account, show);
  const body = el("div", { class: "incidents", hidden: true }, el("div", {}, list, more), card.element);
  let found = []; // the oldest first, as they come
  let exits = [];
  let chosen = null; // the number of the one that somebody selected; otherwise the newest is shown
  let all = false;
  let items = new Map(); // by number
  let pieces = new Map();

  const shownOne = () => found.find((it) => it.number === chosen) ?? found.at(-1);

  function select(number) {
    chosen = number;
    drawSelected();
  }

  function drawSelected() {
    const it = shownOne();
    for (const [number, piece] of pieces) setAttribute(piece, "aria-selected", String(number === it?.number));
    for (const [number, item] of items) setAttribute(item.button, "aria-pressed", String(number === it?.number));
    setAttribute(band, "aria-activedescendant", it ? `incident-${it.number}` : null);
    if (it) card.update(it, exits);
  }

  function drawList() {
    const newest = found.toReversed();
    const next = new Map();
    for (const it of all ? newest : newest.slice(0, LISTED)) {
      const item = items.get(it.number) ?? makeItem(() => select(it.number));
      item.update(it, app.now());
      next.set(it.number, item);
    }
    for (const [number, item] of items) if (!next.has(number)) item.remove();
    arrange(list, next.values());
    items = next;
    more.hidden = newest.length <= LISTED;
    setText(more, all ? "Show fewer" : `Show all ${newest.length} incidents`);
  }

  band.addEventListener("click", (event) => {
    const piece = event.target.closest("[role=option]");
    if (piece) select(piece.number);
  });
  band.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || found.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = found.indexOf(shownOne()) + steps[event.key];
    select(found[Math.min(Math.max(next, 0), found.length - 1)].number);
  });
  more.addEventListener("click", () => {
    all = !all;
    drawList();
    drawSelected();
  });

  return {
    band,
    body,
    update(run) {
      found = run.distributed.incidents;
      exits = run.distributed.workerExits;
      band.hidden = body.hidden = found.length === 0;
      drawList();
      drawSelected();
      this.tick(app.now());
    },
    /** Places the pieces of the band on a scale from `begin` to `end`, in milliseconds. */
    place(begin, end, now) {
      const next = new Map();
      const share = (moment) => (100 * (Math.min(Math.max(moment, begin), end) - begin)) / (end - begin);
      for (const it of found) {
        const piece = pieces.get(it.number) ?? makePiece(it.number);
        const [from, to] = [share(Date.parse(it.at)), share(it.overAt === undefined ? end : Date.parse(it.overAt))];
        piece.style.left = `${from.toFixed(2)}%`;
        piece.style.width = `${Math.max(0, to - from).toFixed(2)}%`;
        const { sign, tone } = incidentOf(it.kind);
        setText(piece, sign);
        setAttribute(piece, "data-tone", tone);
        const label = `${clean(it.kind)} at ${clock(it.at, now)}, ${lasted(it, now)}: ${clean(it.what)}`;
        setAttribute(piece, "aria-label", label);
        setAttribute(piece, "title", label);
        next.set(it.number, piece);
      }
      for (const [number, piece] of pieces) if (!next.has(number)) piece.remove();
      arrange(band, next.values());
      pieces = next;
      drawSelected();
    },
    /** Counts on the one that is open. */
    tick(now) {
      const open = found.at(-1);
      if (open !== undefined && open.overAt === undefined) items.get(open.number)?.update(open, now);
      card.tick(now);
    },
  };
}

function makePiece(number) {
  const id = `incident-${number}`;
  const piece = el("div", { role: "option", class: "incident-piece", id, "aria-selected": "false" });
  return Object.assign(piece, { number });
}

/** `12s`, or `12s so far`. */
function lasted(it, now) {
  const seconds = ((it.overAt === undefined ? now : Date.parse(it.overAt)) - Date.parse(it.at)) / 1000;
  return it.overAt === undefined ? `${duration(Math.floor(Math.max(0, seconds)))} so far` : duration(seconds);
}

function makeItem(select) {
  const time = el("time", { class: "dim" });
  const sign = el("span", { class: "sign", "aria-hidden": "true" });
  const kind = el("span", {});
  const what = el("span", { class: "incident-what" });
  const took = el("span", { class: "dim incident-took" });
  const reason = el("span", { class: "event-reason" }, sign, kind);
  const button = el("button", { type: "button", onclick: select }, time, reason, what, took);
  const item = el("li", {}, button);
  item.button = button;
  item.update = (it, now) => {
    const known = incidentOf(it.kind);
    setAttribute(time, "datetime", it.at);
    setText(time, clock(it.at, now));
    setText(sign, known.sign);
    setText(kind, clean(it.kind));
    setAttribute(reason, "data-tone", known.tone);
    setText(what, clean(it.what));
    setText(took, lasted(it, now));
  };
  return item;
}

function incidentCard(app, name, account, show) {
  const sign = el("span", { class: "sign", "aria-hidden": "true" });
  const title = el("span", {});
  const what = el("p", { class: "incident-what" });
  const facts = el("dl", { class: "facts-list" });
  const took = el("dd", {});
  const cost = el("dd", {});
  const error = el("div", {});
  const reveal = el("button", { type: "button", class: "quiet" });
  const log = el("a", {});
  const links = el("p", { class: "card-links" }, reveal, log);
  const element = el(
    "section",
    { class: "incident-card", "aria-labelledby": "h-incident" },
    el("h3", { id: "h-incident" }, sign, " ", title),
    what,
    facts,
    error,
    links,
  );
  let it = null;
  let shown = "";
  reveal.addEventListener("click", () => show(it.rank));

  function tick(now) {
    if (it === null) return;
    const { ranks, gpus } = account.cost(it, now);
    setText(took, lasted(it, now));
    setText(cost, `${duration(ranks)} of ranks${gpus > 0 ? `, ${duration(gpus)} of GPUs` : ""}`);
  }

  return {
    element,
    tick,
    update(next, exits) {
      it = next;
      // What it costs changes all the time; the rest is left alone while it is being read.
      const { costSeconds: _, costGpuSeconds: __, ...steady } = it;
      const exit = it.rank === undefined ? undefined : exits.findLast((e) => isOf(e, it));
      const now = JSON.stringify([steady, exit?.message, exit?.traceback]);
      if (now !== shown) {
        shown = now;
        const known = incidentOf(it.kind);
        setText(sign, known.sign);
        setText(title, `${clean(it.kind)} ${it.number}${it.overAt === undefined ? ", not over yet" : ""}`);
        setAttribute(element, "data-tone", known.tone);
        setText(what, clean(it.what));
        const day = app.now();
        const end = it.overAt === undefined ? "now" : clock(it.overAt, day);
        const rows = [
          ["When", el("dd", {}, `${clock(it.at, day)} to ${end}`)],
          ["Took", took],
          ["Cost", cost],
          ["Recomputed", el("dd", {}, plural(it.stepsRecomputed, "step"))],
          ...factsOf(it).map(([k, v]) => [k, el("dd", {}, v)]),
        ];
        replace(facts, ...rows.flatMap(([k, dd]) => [el("dt", {}, k), dd]));
        replace(error, ...errorOf(exit));
        error.hidden = error.childElementCount === 0;
        links.hidden = it.rank === undefined;
        setText(reveal, `Show rank ${it.rank}`);
        setText(log, `Log of rank ${it.rank}`);
        setAttribute(log, "href", `#/run/${encodeURIComponent(name)}/logs?rank=${it.rank}`);
      }
      tick(app.now());
    },
  };
}

const isOf = (exit, it) => exit.rank === it.rank && exit.worker === it.worker && exit.torchRank === it.torchRank;

function factsOf(it) {
  const found = [];
  if (it.rank !== undefined) found.push(["Rank", String(it.rank)]);
  if (it.worker !== undefined) found.push(["Worker", String(it.worker)]);
  if (it.torchRank !== undefined) found.push(["Torch rank", String(it.torchRank)]);
  if (it.exitCode !== undefined) found.push(["Exit code", String(it.exitCode)]);
  if (it.signal !== undefined) found.push(["Signal", clean(it.signal)]);
  if (it.reason !== undefined) found.push(["Reason", clean(it.reason)]);
  if (it.failures > 1) found.push(["Failures", grouped(it.failures)]);
  return found;
}

/** The exception of the worker that failed, if its exit is still kept. */
function errorOf(exit) {
  const text = exit?.traceback || exit?.message;
  if (!text) return [];
  const label = exit.traceback ? "Traceback" : "Exception";
  return [el("pre", { tabindex: "0", "aria-label": `${label} of the incident` }, cleanLines(text))];
}
