// What ranks report, as curves: the mean of all with its spread, or every rank by itself.

import { Refused, get, pathOf } from "./api.js";
import { chart } from "./chart.js";
import { el, setAttribute, setText } from "./dom.js";
import { clean, number, plural } from "./format.js";
import { choices, section } from "./parts.js";
import { isOfRounds } from "./rounddata.js";

const CHARTS = 12; // unless more are asked for: a run may report 64 numbers
const POINTS = 30_000; // of all curves of one chart, so that a thousand ranks are no heavier than ten
const EVERY = 2000;
const SHARE = 5; // what is slow to ask for is asked for less often: a fifth of the time at most
const BINS = 160;

const kept = { mode: "mean" };
const value = (v) => (typeof v === "string" ? Number(v) : v); // "NaN" and "Infinity" are numbers again

export function metrics(name) {
  const cards = new Map();
  const grid = el("div", { class: "charts" });
  const more = el("button", { type: "button", class: "quiet more", "aria-expanded": "false", hidden: true });
  const part = section("Metrics", grid, more);
  part.show(false);
  part.side.append(
    choices(
      "Show",
      [
        ["mean", "Mean and spread"],
        ["all", "All ranks"],
      ],
      kept.mode,
      (mode) => {
        kept.mode = mode;
        for (const card of cards.values()) card.redraw();
      },
    ),
  );
  let run = null;
  let newest = null; // of the reports that the curves show
  let timer = null;
  let asking = false;
  let next = 0; // when they may be asked for again
  let whole = false; // whether all metrics are shown
  const left = new AbortController();
  more.addEventListener("click", () => {
    whole = !whole;
    newest = null;
    next = 0;
    update(run);
  });

  const shown = () => reported(run).slice(0, whole ? undefined : CHARTS);

  function card(metric) {
    if (!cards.has(metric)) {
      const made = metricCard(metric);
      cards.set(metric, made);
      grid.append(made.element);
    }
    return cards.get(metric);
  }

  async function refresh() {
    timer = null;
    asking = true;
    const began = Date.now();
    newest = stamp(run);
    const names = shown();
    const points = Math.min(200, Math.max(20, Math.floor(POINTS / Math.max(1, run.distributed.ranks.length))));
    try {
      for (const metric of names) {
        if (newest === null) break; // others are wanted by now
        const query = `metric=${encodeURIComponent(metric)}&points=${points}`;
        const { series } = await get(`${pathOf(name)}/series?${query}`, { signal: left.signal });
        card(metric).show(series);
      }
    } catch (error) {
      if (!(error instanceof Refused) || error.isFinal) return; // the page was left, or the run is gone
      newest = null; // asked for again
    }
    asking = false;
    next = began + Math.max(EVERY, SHARE * (Date.now() - began));
    later();
  }

  function later() {
    if (timer === null && !asking && stamp(run) !== newest) {
      timer = setTimeout(refresh, Math.max(0, next - Date.now()));
    }
  }

  function update(latest) {
    run = latest;
    const count = reported(run).length;
    part.show(count > 0);
    more.hidden = count <= CHARTS;
    setText(more, whole ? `Show only ${CHARTS}` : `Show all ${count} metrics`);
    setAttribute(more, "aria-expanded", String(whole));
    const wanted = new Set(shown());
    for (const [metric, card] of cards) card.element.hidden = !wanted.has(metric);
    if (count > 0) later();
  }

  return {
    element: part,
    update,
    close() {
      clearTimeout(timer);
      left.abort();
    },
  };
}

function reported(run) {
  const names = new Set(run.distributed.ranks.flatMap((rank) => Object.keys(rank.report?.values ?? {})));
  const loss = (metric) => (metric === "loss" ? 0 : 1);
  return [...names]
    .filter((metric) => !isOfRounds(metric))
    .sort((a, b) => loss(a) - loss(b) || (a < b ? -1 : 1));
}

function stamp(run) {
  return run.distributed.ranks.reduce(
    (latest, rank) => (rank.report && rank.report.at > latest ? rank.report.at : latest),
    "",
  );
}

function metricCard(metric) {
  const last = el("span", { class: "last" });
  const bad = el("p", { class: "bad-values", "data-tone": "bad", hidden: true });
  const drawing = chart();
  const element = el(
    "figure",
    { class: "metric" },
    el("figcaption", {}, el("span", { class: "mono", title: clean(metric) }, clean(metric)), last),
    drawing,
    bad,
  );
  let series = [];

  function redraw() {
    const found = series.filter((s) => s.points.length > 0);
    if (found.length === 0) return;
    const steps = found.every((s) => s.points.every((p) => p.step !== undefined));
    const x = (p) => (steps ? p.step : Date.parse(p.at) / 1000);
    const merged = merge(found, x);
    const ranks = plural(new Set(found.map((s) => s.rank)).size, "rank");
    const lastOf = found.map((s) => value(s.points.at(-1).value));
    const mean = lastOf.reduce((sum, v) => sum + v, 0) / lastOf.length;
    setText(last, found.length === 1 ? number(mean) : `mean ${number(mean)}`);
    const notFinite = found.filter((s) => s.points.some((p) => !Number.isFinite(value(p.value))));
    bad.hidden = notFinite.length === 0;
    if (notFinite.length > 0) {
      const [one] = notFinite;
      const point = one.points.find((p) => !Number.isFinite(value(p.value)));
      const when = point.step === undefined ? "" : ` at step ${point.step}`;
      const others = new Set(notFinite.map((s) => s.rank)).size - 1;
      const more = others > 0 ? `; so did ${plural(others, "other rank")}` : "";
      setText(bad, `✕ rank ${one.rank} reported ${point.value}${when}${more}`);
    }
    const all = kept.mode === "all";
    drawing.draw({
      lines: all
        ? [
            {
              many: true,
              class: "each",
              points: found.flatMap((s) => [[x(s.points[0]), NaN], ...s.points.map((p) => [x(p), value(p.value)])]),
            },
            { class: "unseen-line", points: merged.map((m) => [m.x, m.mean]) }, // for the pointer
          ]
        : [{ points: merged.map((m) => [m.x, m.mean]) }],
      band: all || merged.every((m) => m.low === m.high) ? [] : merged.map((m) => [m.x, m.low, m.high]),
      xFormat: steps
        ? number
        : (t) => new Date(t * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }),
      label: `${clean(metric)} of ${ranks}: mean ${number(merged[0].mean)} at first, ${number(mean)} at last`,
      tell: (at) => {
        const m = merged.find((one) => one.x === at);
        if (!m) return "";
        const where = steps ? `step ${number(at)}` : new Date(at * 1000).toLocaleTimeString("en-GB");
        return `${where}: ${number(m.mean)}` + (m.low === m.high ? "" : ` (${number(m.low)} to ${number(m.high)})`);
      },
    });
  }

  return {
    element,
    redraw,
    show(next) {
      series = next;
      redraw();
    },
  };
}

/** All ranks as one: at each step, or in as many slices as can be seen, their mean, lowest and highest. */
function merge(series, x) {
  const xs = series.flatMap((s) => s.points.map(x));
  const low = xs.reduce((a, b) => Math.min(a, b), Infinity);
  const high = xs.reduce((a, b) => Math.max(a, b), -Infinity);
  const exact = new Set(xs).size <= BINS;
  const slice = (v) => (exact || high === low ? v : Math.min(BINS - 1, Math.floor(((v - low) / (high - low)) * BINS)));
  const bins = new Map();
  for (const { points } of series) {
    for (const p of points) {
      const at = slice(x(p));
      const bin = bins.get(at) ?? { x: x(p), sum: 0, count: 0, low: Infinity, high: -Infinity };
      bin.x = Math.max(bin.x, x(p));
      const v = value(p.value);
      if (Number.isFinite(v)) {
        bin.sum += v;
        bin.count += 1;
        bin.low = Math.min(bin.low, Number.isFinite(value(p.min)) ? value(p.min) : v);
        bin.high = Math.max(bin.high, Number.isFinite(value(p.max)) ? value(p.max) : v);
      }
      bins.set(at, bin);
    }
  }
  return [...bins.values()].sort((a, b) => a.x - b.x).map((b) => ({ ...b, mean: b.count ? b.sum / b.count : NaN }));
}
