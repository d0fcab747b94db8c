// The first page: all runs in a table that can be searched, narrowed and sorted.

import { el, setAttribute, setText } from "./dom.js";
import { about, age, clean, clock, gpuHours, gpuSeconds, grouped, plural } from "./format.js";
import { phaseBadge, worldBar } from "./parts.js";
import { Runs } from "./store.js";
import { events } from "./stream.js";
import { Windowed } from "./windowed.js";
import { GROUPS, isEnded } from "./words.js";

const PHASE_ORDER = [
  "failed",
  "degraded",
  "pending",
  "scheduling",
  "pulling",
  "starting",
  "ready",
  "succeeded",
  "cancelled",
];
const AGES_EVERY = 5000;
const NARROW = matchMedia("(max-width: 820px)"); // as in the style sheet

const COLUMNS = [
  { name: "name", label: "Name", by: (r) => r.friendlyName },
  { name: "phase", label: "Phase", by: (r) => PHASE_ORDER.indexOf(r.phase) },
  { name: "world", label: "World", by: (r) => r.worldSize.ready, down: true },
  { name: "gpu", label: "GPU-hours", by: (r, now) => gpuSeconds(r.usage, now), down: true },
  { name: "age", label: "Age", by: (r) => -Date.parse(r.createdAt) },
  { name: "event", label: "Last event", by: (r) => Date.parse(r.lastEvent?.last_timestamp ?? r.createdAt), down: true },
];

// They outlast the page: whoever comes back from a run finds the list as it was left.
const kept = { search: "", group: "all", column: "age", down: false, scroll: 0 };

export function openOverview(main, app) {
  app.crumb("");
  app.title("Runs");
  const runs = new Runs();
  let shown = [];

  const search = el("input", {
    type: "search",
    placeholder: "Search names, phases, events  ( / )",
    "aria-label": "Search runs",
    autocomplete: "off",
    spellcheck: "false",
  });
  search.value = kept.search;
  const counts = new Map();
  const filters = el(
    "div",
    { class: "choices", role: "group", "aria-label": "Show" },
    GROUPS.map((group) => {
      const count = el("span", { class: "count" });
      const button = el(
        "button",
        { type: "button", "aria-pressed": String(kept.group === group.name), "data-group": group.name },
        group.label,
        count,
      );
      button.addEventListener("click", () => choose(group.name));
      counts.set(group.name, { button, count });
      return button;
    }),
  );
  const heads = COLUMNS.map((column) => {
    const arrow = el("span", { class: "arrow", "aria-hidden": "true" });
    const button = el("button", { type: "button" }, column.label, arrow);
    button.addEventListener("click", () => sortBy(column));
    const head = el("div", { role: "columnheader", class: `c-${column.name}` }, button);
    head.update = () => {
      const is = kept.column === column.name;
      setAttribute(head, "aria-sort", is ? (kept.down ? "descending" : "ascending") : null);
      setText(arrow, is ? (kept.down ? "↓" : "↑") : "");
    };
    return head;
  });
  const body = el("div", { role: "rowgroup", class: "rows" });
  const table = el(
    "div",
    { role: "table", class: "runs", "aria-label": "Runs" },
    el("div", { role: "rowgroup", class: "runs-head" }, el("div", { role: "row", class: "run-row" }, heads)),
    body,
  );
  const nothing = el("div", { class: "nothing" });
  const page = el(
    "div",
    { class: "page overview" },
    el("div", { class: "tools" }, el("h1", {}, "Runs"), filters, search),
    table,
    nothing,
  );
  main.replaceChildren(page);

  const list = new Windowed({
    scroller: main,
    list: body,
    height: () => (NARROW.matches ? 84 : 41),
    inset: () => table.firstElementChild.offsetHeight,
    count: () => shown.length,
    key: (i) => shown[i].instanceName,
    find: (key) => shown.findIndex((row) => row.instanceName === key),
    make: makeRow,
    render: (i, element) => fillRow(element, shown[i], i, app.now()),
    vanished: (index) => (shown.length > 0 ? focusRow(Math.min(index, shown.length - 1)) : search.focus()),
  });

  function matches(row, words) {
    if (!GROUPS.find((g) => g.name === kept.group).has(row)) return false;
    if (words.length === 0) return true;
    const event = row.lastEvent;
    const text = [row.instanceName, row.phase, row.blockedOn, event?.reason, event?.message].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  function update() {
    const words = kept.search.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...runs.rows.values()];
    const { by } = COLUMNS.find((c) => c.name === kept.column);
    const sign = kept.down ? -1 : 1;
    const now = app.now();
    shown = all
      .filter((row) => matches(row, words))
      .map((row) => [by(row, now), row])
      .sort(([a, x], [b, y]) => (a < b ? -sign : a > b ? sign : newerFirst(x, y)))
      .map(([, row]) => row);
    for (const group of GROUPS) {
      const { button, count } = counts.get(group.name);
      setText(count, grouped(all.filter(group.has).length));
      setAttribute(button, "aria-pressed", String(kept.group === group.name));
    }
    for (const head of heads) head.update();
    setAttribute(table, "aria-rowcount", shown.length + 1);
    table.hidden = shown.length === 0;
    fillNothing(nothing, runs, shown);
    list.draw();
  }

  function choose(group) {
    kept.group = group;
    update();
  }

  function sortBy(column) {
    kept.down = kept.column === column.name ? !kept.down : Boolean(column.down);
    kept.column = column.name;
    update();
  }

  search.addEventListener("input", () => {
    kept.search = search.value;
    main.scrollTop = 0;
    update();
  });

  /** Moves the focus by rows; the first time, to the first one in sight. */
  function step(by) {
    const links = [...body.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    const key = at < 0 ? null : document.activeElement.closest("[role=row]").dataset.key;
    const from = key === null ? (by > 0 ? -1 : shown.length) : shown.findIndex((row) => row.instanceName === key);
    if (shown.length > 0) focusRow(Math.min(Math.max(from + by, 0), shown.length - 1));
  }

  function focusRow(index) {
    list.reveal(index);
    list.elementOf(shown[index].instanceName)?.querySelector("a").focus({ preventScroll: true });
  }

  const keys = app.keys({
    "/": ["search", () => search.focus()],
    j: ["next run", () => step(1)],
    k: ["previous run", () => step(-1)],
    ArrowDown: ["", () => step(1)],
    ArrowUp: ["", () => step(-1)],
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      search.value = kept.search = "";
      search.blur();
      update();
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      step(1);
    }
  });

  runs.changed = () => {
    const first = !runs.drawn;
    update();
    if (first) {
      runs.drawn = true;
      main.scrollTop = kept.scroll;
      performance.mark("usable");
    }
  };
  update();
  const ages = setInterval(() => list.draw(), AGES_EVERY);
  const stream = events("watch", {
    event: (_, changes) => runs.apply(changes),
    state: (...state) => app.linkState("runs", ...state),
  });

  return () => {
    kept.scroll = main.scrollTop;
    stream.stop();
    clearInterval(ages);
    keys();
    list.close();
  };
}

/** Runs that are alike keep their places, whatever happens to them meanwhile. */
function newerFirst(x, y) {
  if (x.createdAt !== y.createdAt) return x.createdAt < y.createdAt ? 1 : -1;
  return x.instanceName < y.instanceName ? -1 : 1;
}

function makeRow() {
  const cell = (name, ...children) => el("div", { role: "cell", class: `c-${name}` }, ...children);
  const link = el("a", { class: "run-name" });
  const instance = el("span", { class: "dim run-instance" });
  const phase = phaseBadge();
  const stalled = el("span", { class: "stalled", "data-tone": "warn" });
  const world = worldBar();
  const gpu = el("span", {});
  const old = el("span", {});
  const reason = el("span", { class: "reason" });
  const message = el("span", { class: "dim message" });
  const when = el("span", { class: "dim when" });
  const row = el(
    "div",
    { role: "row", class: "run-row" },
    cell("name", link, instance),
    cell("phase", phase, stalled),
    cell("world", world),
    cell("gpu", gpu),
    cell("age", old),
    cell("event", reason, message, when),
  );
  row.parts = { link, instance, phase, stalled, world, gpu, old, reason, message, when };
  // The whole row leads to the run; the link in it is what keyboards and screen readers use.
  row.addEventListener("click", (event) => {
    if (!event.target.closest("a") && String(getSelection()) === "") link.click();
  });
  return row;
}

function fillRow(element, run, index, now) {
  const { link, instance, phase, stalled, world, gpu, old, reason, message, when } = element.parts;
  const event = run.lastEvent;
  const used = gpuSeconds(run.usage, now);
  setAttribute(element, "aria-rowindex", index + 2);
  setText(old, age(Date.parse(run.createdAt), now));
  setText(gpu, gpuHours(used));
  setText(when, event ? `${about(Date.parse(event.last_timestamp), now)} ago` : "");
  if (element.version === run.version) return;
  element.version = run.version;
  element.dataset.key = run.instanceName;
  setText(link, clean(run.friendlyName));
  setAttribute(link, "href", `#/run/${encodeURIComponent(run.instanceName)}`);
  setText(instance, clean(run.instanceName.slice(run.friendlyName.length)));
  phase.update(run.phase);
  setAttribute(phase, "title", clean(run.blockedOn));
  stalled.hidden = run.stalled === 0;
  setText(stalled, `! ${run.stalled} stalled`);
  world.update(run.worldSize, isEnded(run.phase));
  setAttribute(gpu, "title", used === 0 ? "no GPU" : null);
  setText(reason, event ? clean(event.reason) : "");
  setAttribute(reason, "data-tone", event?.type === "Warning" ? "warn" : null);
  setText(message, event ? clean(event.message) : "");
  setAttribute(message, "title", event ? clean(event.message) : null);
  setAttribute(when, "title", event ? clock(event.last_timestamp, now) : null);
}

function fillNothing(element, runs, shown) {
  element.hidden = shown.length > 0;
  if (shown.length > 0) return;
  if (!runs.known) element.replaceChildren(el("p", { class: "dim" }, "Asking the server…"));
  else if (runs.rows.size > 0) {
    element.replaceChildren(el("p", {}, `None of the ${plural(runs.rows.size, "run")} is like that.`));
  } else {
    element.replaceChildren(
      el("p", {}, "No runs yet. Start one in a terminal:"),
      el("pre", { tabindex: "0" }, "basilica train up hello --world-size 2 --gpu-count 0 -- python train.py"),
      el("p", { class: "dim" }, "It appears here by itself."),
    );
  }
}
