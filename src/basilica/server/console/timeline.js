// How the world went: ranks that are up against those wanted, over time, with what happened under it.

import { el, setAttribute, svg } from "./dom.js";
import { clean, clock, duration, plural } from "./format.js";
import { section } from "./parts.js";
import { isEnded, phaseOf } from "./words.js";

const SIGNS = [
  [/^(RankFailed|RankLost|Failed|WorldShrunkBelowMin|BenchFailed)/, "✕", "bad"],
  [/^(RankRestarted|RestartRequested)/, "↻", "wait"],
  [/^(Scale|WorldClosed)/, "↕", "off"],
  [/^(RankStalled|DegradedMesh|BenchTimedOut)/, "!", "warn"],
  [/^(WorldReady|WorldRecovered|MeshReady|RankResumed)/, "●", "good"],
  [/^Succeeded/, "✓", "done"],
  [/^(Cancelled|UDTerminalState)/, "⊘", "off"],
];
const HEIGHT = 132;
const MARKS = 120;
const MARK_WIDTH = 13;
const PLOT = { left: 34, right: 12, top: 24, bottom: 44 };

const signOf = (reason) => SIGNS.find(([pattern]) => pattern.test(reason)) ?? [null, "·", "idle"];

export function timeline(app) {
  const drawing = svg("svg", { class: "timeline", role: "img", height: HEIGHT });
  const part = section("Timeline", drawing);
  let run = null;
  let events = [];
  const draw = () => run && drawTimeline(drawing, run, events, app.now());
  const observer = new ResizeObserver(draw);
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

/** What phase a run was in, from one moment to the next, as far as its history tells. */
function phases(run, begin, end) {
  const ready = run.distributed.milestones.find((m) => m.name === "world_ready");
  const up = ready ? Date.parse(ready.timestamp) : null;
  const { min } = run.distributed.worldSize;
  const found = [{ from: begin, phase: "starting" }];
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

function drawTimeline(drawing, run, events, now) {
  const width = Math.max(260, drawing.parentElement.clientWidth);
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
      return svg(
        "g",
        {},
        svg(
          "rect",
          { class: "band", "data-tone": phaseOf(phase).tone, x: x(from), y: 2, width: wide, height: 12, rx: 2 },
          svg("title", {}, phase),
        ),
        wide > phase.length * 7 + 16
          ? svg("text", { class: "band-label", x: x(from) + 5, y: 12 }, `${phaseOf(phase).sign} ${phase}`)
          : null,
      );
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
}

/** All that happened, newest first. */
export function eventList(app) {
  const element = el("ol", { class: "events" });
  return {
    element,
    update(events) {
      const now = app.now();
      element.replaceChildren(
        ...events.map((event) => {
          const [, sign, tone] = signOf(event.reason);
          return el(
            "li",
            {},
            el("time", { class: "dim", datetime: event.last_timestamp }, clock(event.last_timestamp, now)),
            el(
              "span",
              { class: "event-reason", "data-tone": event.type === "Warning" && tone === "idle" ? "warn" : tone },
              el("span", { class: "sign", "aria-hidden": "true" }, sign),
              clean(event.reason),
            ),
            el(
              "span",
              { class: "event-text" },
              clean(event.message),
              event.count > 1 ? el("span", { class: "dim" }, ` ×${event.count}`) : null,
            ),
          );
        }),
      );
    },
  };
}
