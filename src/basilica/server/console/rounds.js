// The rounds of a DiLoCo run: a strip of all, and a table of the newest with a cell for each replica.

import { Refused, get, pathOf } from "./api.js";
import { el, setAttribute, setText, svg } from "./dom.js";
import { bytes, duration, number, plural } from "./format.js";
import { section } from "./parts.js";
import { COURSE_METRICS, ROW_METRICS, RoundBook, replicaIn, stampOf, tellsRounds, totals } from "./rounddata.js";

const ROWS = 50;
const CELLS = 6400; // of all rows: a thousand replicas have fewer rows
const EVERY = 2000;
const SHARE = 5; // what is slow to ask for is asked for less often: a fifth of the time at most
const COURSE_RANKS = 4; // each replica knows how many were counted; several, since one may have been away
const COURSE_POINTS = 500;
const POINTS = 2000;
const STRIP_HEIGHT = 44;
const COLUMN = 3; // pixels of the strip

const STATES = {
  counted: { sign: "✓", tone: "good", words: "counted" },
  late: { sign: "!", tone: "warn", words: "not counted" },
  silent: { sign: "·", tone: "idle", words: "no report" },
};
const COLUMNS = ["Round", "Replicas", "Counted", "Up", "Down", "Longest wait", "Took"];

export function rounds(name) {
  const book = new RoundBook();
  const about = el("p", { class: "dim" });
  const strip = svg("svg", { class: "strip", role: "img", height: STRIP_HEIGHT });
  const legend = el(
    "div",
    { class: "legend" },
    Object.values(STATES).map(({ sign, tone, words }) =>
      el("span", { "data-tone": tone }, el("span", { class: "sign", "aria-hidden": "true" }, sign), words),
    ),
  );
  const table = roundTable(book);
  const part = section("Rounds", about, strip, legend, table.element, table.detail);
  part.show(false);
  let run = null;
  let shown = null; // the stamp of what is drawn
  let asked = null; // the stamp up to which series have been asked for
  let begun = false; // whether the course is known; a runtime may tell of it later than of the last reports, or never
  let timer = null;
  let asking = false;
  let next = 0; // when series may be asked for again
  const left = new AbortController();
  const observer = new ResizeObserver(() => drawStrip(strip, book));
  observer.observe(part);

  async function series(metrics, options) {
    const query = new URLSearchParams(options);
    for (const metric of metrics) query.append("metric", metric);
    const answer = await get(`${pathOf(name)}/series?${query}`, { signal: left.signal });
    return answer.series;
  }

  async function course() {
    const ranks = run.distributed.ranks.filter(tellsRounds).slice(0, COURSE_RANKS);
    const options = [["points", COURSE_POINTS], ...ranks.map(({ rank }) => ["rank", rank])];
    return book.takeCourse(await series(COURSE_METRICS, options));
  }

  async function refresh() {
    timer = null;
    asking = true;
    const began = Date.now();
    const stamp = stampOf(run.distributed.ranks);
    try {
      const since = begun ? book.since() : await course();
      const found = await series(ROW_METRICS, { points: POINTS, since: since / 1000 });
      book.takeSeries(found);
      begun ||= found.length > 0;
      asked = stamp;
      draw();
    } catch (error) {
      if (!(error instanceof Refused) || error.isFinal) return; // the page was left, or the run is gone
    }
    asking = false;
    next = began + Math.max(EVERY, SHARE * (Date.now() - began));
    later();
  }

  function later() {
    if (timer === null && !asking && stampOf(run.distributed.ranks) !== asked) {
      timer = setTimeout(refresh, Math.max(0, next - Date.now()));
    }
  }

  function draw() {
    drawStrip(strip, book);
    setText(about, asked === null ? "Asking the server for earlier rounds…" : describe(book, begun));
    table.draw();
  }

  return {
    element: part,
    update(latest) {
      run = latest;
      const stamp = stampOf(run.distributed.ranks);
      part.show(stamp !== "");
      if (stamp === "" || stamp === shown) return;
      shown = stamp;
      book.takeLast(run.distributed.ranks);
      book.limit = Math.min(ROWS, Math.max(10, Math.floor(CELLS / Math.max(1, book.replicas().length))));
      draw();
      later();
    },
    close() {
      clearTimeout(timer);
      left.abort();
      observer.disconnect();
    },
  };
}

// ---- all rounds ----------------------------------------------------------------------------------------------------

function describe(book, begun) {
  const rows = book.newest();
  const course = book.course();
  if (rows.length === 0 || course.length === 0) return "";
  const [begin, last] = [course[0].from, course.at(-1).to]; // a run that was resumed does not begin with 0
  const first = rows.at(-1).round;
  const distinct = new Set(rows.map((row) => row.round)).size;
  const missing = rows[0].round - first + 1 - distinct;
  const all = begun
    ? "The strip shows how many replicas were counted in all of them."
    : "What came before this page was opened is not known here yet.";
  const count = last - begin + 1;
  const shown = first > begin ? `Rounds ${first} to ${last} of ${count}` : plural(count, "round");
  const gaps =
    missing === 0 ? "" : ` ${plural(missing, "round")} between them left out: nobody told of them one by one.`;
  return `${shown}, the newest first. ${all}${gaps}`;
}

function drawStrip(drawing, book) {
  const width = Math.max(200, drawing.parentElement.clientWidth - 34);
  const course = book.course();
  if (course.length === 0) return;
  const [begin, last] = [course[0].from, course.at(-1).to];
  const count = last - begin + 1;
  const most = course.reduce((high, { members }) => Math.max(high, members), Math.max(1, book.world));
  const slots = Math.min(count, Math.floor(width / COLUMN));
  const fewest = new Array(slots).fill(null);
  const slotOf = (round) => Math.min(slots - 1, Math.floor(((round - begin) / count) * slots));
  for (const { from, to, members } of course) {
    for (let slot = slotOf(from); slot <= slotOf(to); slot += 1)
      fewest[slot] = Math.min(fewest[slot] ?? members, members);
  }
  const wide = width / slots;
  const bottom = STRIP_HEIGHT - 14;
  const bars = runs(fewest).map(({ from, to, members }) => {
    const height = Math.max(2, (members / most) * bottom);
    return svg("rect", {
      class: "bar-of-rounds",
      "data-tone": members < most ? "warn" : "good",
      x: (from * wide).toFixed(1),
      y: (bottom - height).toFixed(1),
      width: ((to - from + 1) * wide).toFixed(1),
      height: height.toFixed(1),
    });
  });
  const worst = course.reduce((a, b) => (b.members < a.members ? b : a));
  drawing.setAttribute("width", width);
  drawing.setAttribute("viewBox", `0 0 ${width} ${STRIP_HEIGHT}`);
  setAttribute(
    drawing,
    "aria-label",
    `How many replicas were counted in rounds ${begin} to ${last}: ` +
      (worst.members < most
        ? `at least ${worst.members} of ${most}, fewest in round ${worst.from}`
        : `always all ${most}`),
  );
  drawing.replaceChildren(
    ...bars,
    svg("text", { class: "tick", x: 0, y: STRIP_HEIGHT - 2 }, String(begin)),
    svg("text", { class: "tick end", x: width, y: STRIP_HEIGHT - 2 }, String(last)),
  );
}

/** Neighbours with the same number are one; where nothing is known there is none. */
function runs(fewest) {
  const found = [];
  fewest.forEach((members, i) => {
    if (members === null) return;
    const before = found.at(-1);
    if (before && before.to === i - 1 && before.members === members) before.to = i;
    else found.push({ from: i, to: i, members });
  });
  return found;
}

// ---- the newest ----------------------------------------------------------------------------------------------------

function roundTable(book) {
  const head = el("div", { role: "row", class: "round-row round-head" });
  const element = el(
    "div",
    { class: "rounds", role: "grid", tabindex: "0", "aria-label": "Newest rounds", "aria-describedby": "round-told" },
    head,
  );
  const detail = el("p", { class: "round-detail", id: "round-told" });
  const lines = new Map(); // by key of the round
  let replicas = [];
  let rows = [];
  let at = null; // {key, column} of the cell looked at

  function draw() {
    const columns = book.replicas();
    if (columns.join() !== replicas.join()) {
      replicas = columns;
      for (const line of lines.values()) line.remove();
      lines.clear();
      drawHead(head, replicas.length);
      element.style.setProperty("--replicas", replicas.length);
      setAttribute(element, "data-size", replicas.length <= 16 ? "large" : replicas.length <= 64 ? "middle" : "small");
    }
    rows = book.newest();
    const there = new Set(rows.map((row) => row.key));
    for (const [key, line] of lines) {
      if (there.has(key)) continue;
      line.remove();
      lines.delete(key);
    }
    let before = head;
    for (const row of rows) {
      if (!lines.has(row.key)) lines.set(row.key, makeLine(row, replicas));
      const line = lines.get(row.key);
      if (before.nextElementSibling !== line) before.after(line);
      fillLine(line, row, replicas, book.world);
      before = line;
    }
    look(at !== null && there.has(at.key) ? at : null);
  }

  /** The cell that the keyboard is at, or the pointer was last over, with all that is known of it. */
  function look(next) {
    if (at !== null) lines.get(at.key)?.cells[at.column]?.removeAttribute("aria-selected");
    at = next;
    const cell = at && lines.get(at.key)?.cells[at.column];
    if (!cell) {
      at = null;
      element.removeAttribute("aria-activedescendant");
      setText(detail, "Point at a replica, or use the arrow keys, to see its weight, bytes and wait.");
      return null;
    }
    cell.setAttribute("aria-selected", "true");
    element.setAttribute("aria-activedescendant", cell.id);
    setText(detail, cell.getAttribute("aria-label"));
    return cell;
  }

  function begin() {
    look({ key: rows[0].key, column: 0 })?.scrollIntoView({ block: "nearest" });
  }

  function over(event) {
    const cell = event.target.closest(".replica");
    if (!cell) return;
    const { key, cells } = cell.closest(".round-row");
    look({ key, column: cells.indexOf(cell) });
    cell.title = cell.getAttribute("aria-label");
  }

  element.addEventListener("pointerover", over);
  element.addEventListener("click", over);
  element.addEventListener("focus", () => at === null && rows.length > 0 && begin());
  element.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    const far = { Home: [0, -Infinity], End: [0, Infinity], PageDown: [10, 0], PageUp: [-10, 0] };
    const step = steps[event.key] ?? far[event.key];
    if (!step || rows.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (at === null) {
      begin(); // what was looked at has left the table
      return;
    }
    const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
    const row = rows.findIndex((one) => one.key === at.key);
    const key = rows[clamp(row + step[0], rows.length)].key;
    look({ key, column: clamp(at.column + step[1], replicas.length) })?.scrollIntoView({ block: "nearest" });
  });
  look(null);
  return { element, detail, draw };
}

function drawHead(head, replicas) {
  head.replaceChildren(
    ...COLUMNS.map((label, i) =>
      el("div", { role: "columnheader", class: `r-${i}`, "aria-colspan": i === 1 && replicas }, label),
    ),
  );
}

function makeLine(row, replicas) {
  const cell = (i) => el("div", { role: i === 0 ? "rowheader" : "gridcell", class: `r-${i}` });
  const texts = COLUMNS.map((_, i) => (i === 1 ? null : cell(i)));
  const cells = replicas.map((_, i) => el("span", { role: "gridcell", class: "replica", id: `round-${row.key}-${i}` }));
  texts[1] = el("div", { role: "none", class: "r-1 replicas" }, cells);
  const line = el("div", { role: "row", class: "round-row" }, texts);
  return Object.assign(line, { key: row.key, texts, cells });
}

function fillLine(line, row, replicas, world) {
  const sum = totals(row);
  const told = replicas.map((replica) => replicaIn(row, replica));
  const now = JSON.stringify([row.members, world, told]);
  if (line.now === now) return;
  line.now = now;
  const title = row.fragment > 0 ? `${row.round} · ${row.fragment}` : String(row.round);
  const where = row.fragment > 0 ? `Round ${row.round}, fragment ${row.fragment}` : `Round ${row.round}`;
  const all = Math.max(world, row.members);
  const [head, , counted, up, down, wait, took] = line.texts;
  setText(head, title);
  setAttribute(head, "aria-label", where);
  setText(counted, `${row.members} of ${all}`);
  setAttribute(counted, "data-tone", row.members < all ? "warn" : null);
  setText(up, bytes(sum.up));
  setText(down, bytes(sum.down));
  const { longest } = sum;
  const waited = longest === null ? "–" : duration(longest.wait) + forWhom(longest);
  setText(wait, waited);
  const sentence = longest === null ? null : `replica ${longest.replica} waited longest: ${waited}`;
  for (const name of ["title", "aria-label"]) setAttribute(wait, name, sentence);
  setText(took, duration(sum.seconds));
  replicas.forEach((replica, i) => fillCell(line.cells[i], replica, told[i], where));
}

function fillCell(cell, replica, it, where) {
  const state = it === null ? STATES.silent : it.counted ? STATES.counted : STATES.late;
  const number = el("span", { class: "number" }, String(replica));
  cell.replaceChildren(el("span", { "aria-hidden": "true" }, state.sign), number);
  setAttribute(cell, "data-tone", state.tone);
  setAttribute(cell, "aria-label", `${where}, replica ${replica}: ${tell(it, state)}`);
  cell.removeAttribute("title"); // of what it was before
}

function tell(it, { words }) {
  if (it === null) return words;
  const weight = it.counted ? ` with weight ${number(it.weight)}` : "";
  const waited = it.wait > 0 ? `waited ${duration(it.wait)}${forWhom(it)}` : "did not wait";
  return `${words}${weight}, ${bytes(it.up)} up, ${bytes(it.down)} down, ${waited}, took ${duration(it.seconds)}`;
}

const forWhom = ({ waitedFor }) => (waitedFor === null ? "" : ` for replica ${waitedFor}`);
