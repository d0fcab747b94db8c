// How the world went: ranks that are up against those wanted, over time, with what happened under it.

import { arrange, el, setAttribute, setText, svg } from "./dom.js";
import { clean, clock, duration, plural } from "./format.js";
import { section } from "./parts.js";
import { incidentOf, isEnded, phaseOf } from "./words.js";

const SIGNS = [
  [/^(RankFailed|RankLost|WorkerFailed|Failed|WorldShrunkBelowMin|BenchFailed)/, "✕", "bad"],
  [/^(RankRestarted|RestartRequested|WorkersRestarted)/, "↻", "wait"],
  [/^Notice/, "◷", "off"],
  [/^(Scale|WorldClosed)/, "↕", "off"],
  [/^(RankStalled|DegradedMesh|BenchTimedOut|Unattended)/, "!", "warn"],
  [/^(WorldReady|WorldRecovered|MeshReady|RankResumed)/, "●", "good"],
  [/^Succeeded/, "✓", "done"],
  [/^(Cancelled|UDTerminalState)/, "⊘", "off"],
];
const NOT_READY = "not ready";
const HEIGHT = 132;
const MARKS = 120;
const MARK_WIDTH = 13;
const PLOT = { left: 34, right: 12, top: 28, bottom: 40 };

const signOf = (reason) => SIGNS.find(([pattern]) => pattern.test(reason)) ?? [null, "·", "idle"];

/** `story` are the incidents of the run: their band is over the drawing, on its scale. */
export function timeline(app, story) {
  const drawing = svg("svg", { class: "timeline", role: "img", height: HEIGHT });
  const part = section("Timeline", story.band, drawing, story.body);
  let run = null;
  let events = [];
  let width = 0; // told by the observer: to measure it at every drawing would lay the page out each time
  const draw = () => {
    if (run === null || width === 0) return;
    const now = app.now();
    const { begin, end } = drawTimeline(drawing, width, run, events, now);
    story.place(begin, end, now);
  };
  const observer = new ResizeObserver(([entry]) => {
    width = Math.floor(entry.contentRect.width);
    draw();
  });
  observer.observe(part);
  const timer = setInterval(() => run && !isEnded(run.phase) && draw(), 5000);
  return {
    element: part,
    update(next) {
      run = next;
      draw();
    },
    events(next) {
      events = next;
      draw();
    },
    close() {
      observer.disconnect();
      clearInterval(timer);
    },
  };
}

/** What phase a run was in, from one moment to the next, as far as its history tells. It does not tell how long a run
 * was pending and how long it was starting. */
function phases(run, begin, end) {
  const ready = run.distributed.milestones.find((m) => m.name === "world_ready");
  const up = ready ? Date.parse(ready.timestamp) : null;
  const { min } = run.distributed.worldSize;
  const found = [{ from: begin, phase: up === null && !isEnded(run.phase) ? run.phase : NOT_READY }];
  const add = (from, phase) => found.at(-1).phase !== phase && found.push({ from, phase });
  if (up !== null) add(up, "ready");
  for (const sample of run.distributed.worldSizeHistory) {
    const from = Date.parse(sample.timestamp);
    if (up === null || from < up) continue;
    add(from, sample.ready < min ? "degraded" : "ready");
  }
  if (isEnded(run.phase)) found.push({ from: end, phase: run.phase });
  else add(end, run.phase);
  return found.map((segment, i) => ({ ...segment, to: found[i + 1]?.from ?? end }));
}

/** Marks from left to right, none upon another as long as there is room. */
function spaced(marks) {
  let free = -Infinity;
  return marks
    .toReversed()
    .sort((a, b) => a.at - b.at)
    .map((mark) => {
      const at = Math.min(Math.max(mark.at, free), mark.at + 4 * MARK_WIDTH);
      free = at + MARK_WIDTH;
      return { ...mark, at };
    });
}

function drawTimeline(drawing, width, run, events, now) {
  const d = run.distributed;
  const begin = Date.parse(run.createdAt);
  const milestone = d.milestones.find((m) => m.name === run.phase);
  const ended = isEnded(run.phase);
  const end = Math.max(begin + 1000, ended && milestone ? Date.parse(milestone.timestamp) : now);
  const right = width - PLOT.right;
  const bottom = HEIGHT - PLOT.bottom;
  const x = (t) => PLOT.left + ((Math.min(Math.max(t, begin), end) - begin) / (end - begin)) * (right - PLOT.left);
  const samples = d.worldSizeHistory.map((s) => ({ at: Date.parse(s.timestamp), ready: s.ready, target: s.target }));
  const most = Math.max(d.worldSize.target, 1, ...samples.map((s) => Math.max(s.ready, s.target)));
  const y = (n) => bottom - (n / most) * (bottom - PLOT.top);

  const steps = (field, last) => {
    let path = "";
    let level = null;
    for (const sample of samples) {
      path += level === null ? `M${x(sample.at)} ${y(sample[field])}` : `H${x(sample.at)}V${y(sample[field])}`;
      level = sample[field];
    }
    return path === "" ? `M${x(begin)} ${y(last)}H${x(end)}` : `${path}H${x(end)}`;
  };
  const ready = steps("ready", d.worldSize.ready);
  const start = samples.length > 0 ? x(samples[0].at) : x(begin);
  const marks = spaced(
    events
      .filter((event) => event.reason !== "Created")
      .slice(0, MARKS)
      .map((event) => ({ event, at: x(Date.parse(event.last_timestamp)) })),
  );
  drawing.setAttribute("width", width);
  drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  setAttribute(
    drawing,
    "aria-label",
    `World over ${duration((end - begin) / 1000)}: ${d.worldSize.ready} of ${d.worldSize.target} ranks up now, ` +
      `${plural(Math.max(0, samples.length - 1), "change")}. The events below tell the same.`,
  );
  drawing.replaceChildren(
    ...phases(run, begin, end).map(({ from, to, phase }) => {
      const wide = Math.max(2, x(to) - x(from));
      const { sign, tone } = phase === NOT_READY ? phaseOf("starting") : phaseOf(phase);
      return svg(
        "g",
        {},
        svg(
          "rect",
          { class: "band", "data-tone": tone, x: x(from), y: 2, width: wide, height: 14, rx: 2 },
          svg("title", {}, clean(phase)),
        ),
        wide > phase.length * 7 + 18
          ? svg("text", { class: "band-label", x: x(from) + 6, y: 13 }, `${sign} ${clean(phase)}`)
          : null,
      );
    }),
    ...d.incidents.map((it) => {
      const [from, to] = [x(Date.parse(it.at)), x(it.overAt === undefined ? end : Date.parse(it.overAt))];
      const { tone } = incidentOf(it.kind);
      const wide = Math.max(1, to - from);
      return svg("rect", { class: "shade", "data-tone": tone, x: from, y: 0, width: wide, height: bottom });
    }),
    svg("line", { class: "axis", x1: PLOT.left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { class: "tick end", x: PLOT.left - 6, y: y(most) + 4 }, String(most)),
    svg("text", { class: "tick end", x: PLOT.left - 6, y: bottom + 4 }, "0"),
    svg("path", { class: "up-area", d: `${ready}V${bottom}H${start}Z` }),
    svg("path", { class: "up-line", d: ready }),
    svg("path", { class: "wanted", d: steps("target", d.worldSize.target) }),
    ...marks.map(({ event, at }) => {
      const [, sign, tone] = signOf(event.reason);
      return svg(
        "text",
        { class: "mark", "data-tone": tone, x: at, y: bottom + 16 },
        sign,
        svg("title", {}, `${clock(event.last_timestamp, now)} ${clean(event.reason)}: ${clean(event.message)}`),
      );
    }),
    svg("text", { class: "tick", x: PLOT.left, y: HEIGHT - 6 }, clock(begin, now)),
    svg("text", { class: "tick end", x: right, y: HEIGHT - 6 }, ended ? clock(end, now) : "now"),
    svg("text", { class: "tick middle", x: (PLOT.left + right) / 2, y: HEIGHT - 6 }, duration((end - begin) / 1000)),
  );
  return { begin, end };
}

/** All that happened, newest first. What is there already stays as it is: somebody may be reading or copying it. */
export function eventList(app) {
  const element = el("ol", { class: "events" });
  let items = new Map();
  return {
    element,
    update(events) {
      const now = app.now();
      const next = new Map();
      for (const event of events) {
        const key = JSON.stringify([event.reason, event.message, event.first_timestamp]);
        const item = items.get(key) ?? makeEvent(event);
        item.update(event, now);
        next.set(key, item);
      }
      for (const [key, item] of items) if (!next.has(key)) item.remove();
      arrange(element, next.values());
      items = next;
    },
  };
}

function makeEvent({ type, reason, message }) {
  const [, sign, tone] = signOf(reason);
  const time = el("time", { class: "dim" });
  const times = el("span", { class: "dim" });
  const shownTone = type === "Warning" && tone === "idle" ? "warn" : tone;
  const item = el(
    "li",
    {},
    time,
    el(
      "span",
      { class: "event-reason", "data-tone": shownTone, title: clean(reason) },
      el("span", { class: "sign", "aria-hidden": "true" }, sign),
      clean(reason),
    ),
    el("span", { class: "event-text" }, clean(message), times),
  );
  let told = "";
  item.update = ({ last_timestamp: last, count }, now) => {
    const tells = `${last} ${count} ${new Date(now).toDateString()}`;
    if (tells === told) return;
    told = tells;
    setAttribute(time, "datetime", last);
    setText(time, clock(last, now));
    setText(times, count > 1 ? ` ×${count}` : "");
  };
  return item;
}
