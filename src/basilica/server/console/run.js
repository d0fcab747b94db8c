// The page of one run: what it is, how it goes, what went wrong; its logs are a second tab.

import { liveAccount } from "./account.js";
import { Refused, get, pathOf } from "./api.js";
import { actions } from "./actions.js";
import { bench } from "./bench.js";
import { culpritCard, stallCard } from "./cards.js";
import { announce, el, setAttribute, setText } from "./dom.js";
import { age, clean, gpuHours, gpuSeconds } from "./format.js";
import { goodput } from "./goodput.js";
import { incidents } from "./incidents.js";
import { openLogs } from "./logs.js";
import { metrics } from "./metrics.js";
import { noticeBanner } from "./notice.js";
import { phaseBadge, section, worldBar } from "./parts.js";
import { isLooping, rankGrid } from "./ranks.js";
import { rounds } from "./rounds.js";
import { events } from "./stream.js";
import { eventList, timeline } from "./timeline.js";
import { isEnded } from "./words.js";

const LONGEST_WHY = 600; // a thousand ranks may each have a reason of their own
const EVENTS_SHOWN = 300;
const EVENTS_EVERY = 300;
const EVENTS_AGAIN = 5000; // after one that failed

export function openRun(main, app, name, tab, query) {
  app.title(name);
  const head = header(app, name, tab);
  const body = el("div", { class: "run-body" });
  main.replaceChildren(el("div", { class: "page run", "data-tab": tab }, head.element, body));
  let run = null;
  const view = tab === "logs" ? openLogs(body, main, app, name, query) : openSections(body, app, name);
  let phase = null;
  let frame; // in which it is drawn next: once, however many states came before it

  function draw() {
    frame = undefined;
    head.update(run);
    view.update(run);
    if (phase !== null && phase !== run.phase) announce(`${clean(run.friendlyName)} is ${clean(run.phase)}`);
    phase = run.phase;
    performance.mark("usable");
  }

  function gone(text) {
    if (frame !== undefined) {
      cancelAnimationFrame(frame);
      draw(); // its last state is what stays in sight
    }
    head.gone(text);
  }

  const stream = events(`${pathOf(name)}/watch?reported_since=0`, {
    event: (kind, data) => {
      if (kind === "status") {
        run = data;
        frame ??= requestAnimationFrame(draw);
      }
      // The record goes a moment after the last rank: a reader may see the end of the one or of the other.
      if (kind === "deleted" || (kind === "end" && run?.state === "Terminating")) gone("This run has been deleted.");
      return kind !== "status";
    },
    state: (state, problem, pause) => {
      if (state === "refused" && problem.status === 404) gone(`There is no run called ${clean(name)}.`);
      app.linkState("run", state, problem, pause);
    },
  });
  const clock = setInterval(() => {
    if (run === null) return;
    head.tick(run);
    if (!isEnded(run.phase)) view.tick?.(app.now());
  }, 1000);
  const keys = app.keys({
    l: ["logs", () => app.go(`#/run/${encodeURIComponent(name)}/logs`)],
    r: ["the run", () => app.go(`#/run/${encodeURIComponent(name)}`)],
    Escape: ["all runs", () => app.go("#/")],
  });
  return () => {
    stream.stop();
    cancelAnimationFrame(frame);
    clearInterval(clock);
    keys();
    view.close();
  };
}

// ---- the head, which both tabs have --------------------------------------------------------------------------------

function header(app, name, tab) {
  const title = el("h1", {}, clean(name));
  const instance = el("span", { class: "dim mono" });
  const phase = phaseBadge();
  const why = el("p", { class: "why" });
  const planned = noticeBanner();
  const act = actions(app, name);
  const link = (to, label) =>
    el(
      "a",
      {
        href: `#/run/${encodeURIComponent(name)}${to ? `/${to}` : ""}`,
        "aria-current": (to || "run") === tab && "page",
      },
      label,
    );
  const tabs = el("nav", { class: "tabs", "aria-label": "This run" }, link("", "Run"), link("logs", "Logs"));
  const world = worldBar();
  const facts = { restarts: fact("Restarts"), gpu: fact("GPU-hours"), lasted: fact("Age") };
  const stats = el(
    "dl",
    { class: "facts" },
    el("div", {}, el("dt", {}, "World"), el("dd", {}, world)),
    ...Object.values(facts).map((f) => f.element),
  );
  const element = el(
    "div",
    { class: "run-head" },
    el("div", { class: "run-title" }, title, phase, instance, act.element),
    planned.element,
    why,
    stats,
    act.said,
    tabs,
  );

  function tick(run) {
    const ended = isEnded(run.phase);
    const milestone = run.distributed.milestones.find((m) => m.name === run.phase);
    const end = ended && milestone ? Date.parse(milestone.timestamp) : app.now();
    facts.lasted.update(ended ? "Took" : "Age", age(Date.parse(run.createdAt), end));
    facts.gpu.update("GPU-hours", gpuHours(gpuSeconds(run.distributed.usage, app.now())));
    planned.tick(app.now());
  }

  return {
    element,
    tick,
    update(run) {
      const d = run.distributed;
      app.title(clean(run.friendlyName));
      app.crumb(el("span", { class: "dim", "aria-hidden": "true" }, "/"), el("span", {}, clean(run.friendlyName)));
      setText(title, clean(run.friendlyName));
      setText(instance, clean(run.instanceName));
      phase.update(run.phase);
      const atTarget = run.phase === "ready" && d.worldSize.ready === d.worldSize.target && d.settled === false;
      const troubled = d.ranks.some((rank) => rank.stalled || isLooping(rank, app.now()));
      const sentence = clean(isEnded(run.phase) ? (run.message ?? d.blockedOn) : d.blockedOn);
      const more = `… (all of it: basilica train why ${clean(run.instanceName)})`;
      setText(why, sentence.length > LONGEST_WHY ? sentence.slice(0, LONGEST_WHY) + more : sentence);
      // The banner says the same, and counts down; where the server has more to say, both are shown.
      const banner = planned.update(run) && !sentence.includes("; this is what ");
      why.hidden = sentence === "" || banner;
      setAttribute(why, "data-tone", troubled && atTarget ? "warn" : phase.dataset.tone);
      world.update(d.worldSize, isEnded(run.phase));
      facts.restarts.update("Restarts", String(d.ranks.reduce((sum, rank) => sum + rank.restarts, 0)));
      tick(run);
      act.update(run);
    },
    gone(text) {
      setText(why, text);
      why.hidden = false;
      setAttribute(why, "data-tone", "off");
      act.gone();
    },
  };
}

function fact(label) {
  const name = el("dt", {}, label);
  const value = el("dd", {}, "–");
  return {
    element: el("div", {}, name, value),
    update(label, text) {
      setText(name, label);
      setText(value, text);
    },
  };
}

// ---- the first tab -------------------------------------------------------------------------------------------------

function openSections(body, app, name) {
  const culprit = culpritCard();
  const stall = stallCard(app);
  const mesh = el("p", { class: "why", "data-tone": "warn", hidden: true });
  const ranks = rankGrid(app, name);
  const account = liveAccount();
  const time = goodput(account);
  const story = incidents(app, name, account, (rank) => ranks.show(rank));
  const line = timeline(app, story);
  const curves = metrics(name);
  const exchange = rounds(name);
  const link = bench();
  const list = eventList(app);
  const happened = section("Events", list.element);
  body.append(
    culprit.element,
    stall.element,
    mesh,
    el("div", { class: "two" }, ranks.element, time.element),
    line.element,
    curves.element,
    exchange.element,
    link.element,
    happened,
  );
  const left = new AbortController();
  let latest = null;
  let version = -1; // of the run, when its events were last asked for
  let timer = null;
  let asking = false;

  /** Events come with a request of their own, after a state that is newer; while one is under way the next waits. */
  async function askEvents() {
    timer = null;
    asking = true;
    const newest = latest.version;
    let pause = EVENTS_EVERY;
    try {
      const answer = await get(`${pathOf(name)}/events?limit=${EVENTS_SHOWN}`, { signal: left.signal });
      version = newest;
      line.events(answer.events);
      list.update(answer.events);
    } catch (error) {
      if (!(error instanceof Refused) || error.isFinal) return; // the page was left, or the run is gone
      pause = EVENTS_AGAIN;
    }
    asking = false;
    soon(pause);
  }

  function soon(pause) {
    if (latest.version !== version && !asking && timer === null) timer = setTimeout(askEvents, pause);
  }

  return {
    update(run) {
      latest = run;
      const d = run.distributed;
      culprit.update(run);
      stall.update(run);
      const degraded = d.conditions.find((c) => c.type === "DegradedMesh" && c.status === "True");
      mesh.hidden = !degraded;
      if (degraded) setText(mesh, `Degraded mesh: ${clean(degraded.message)}`);
      account.take(run, app.now());
      ranks.update(d);
      time.tick(app.now());
      story.update(run);
      line.update(run);
      curves.update(run);
      exchange.update(run);
      link.update(d.bench);
      soon(0);
    },
    tick(now) {
      time.tick(now);
      story.tick(now);
      ranks.tick();
    },
    close() {
      left.abort();
      clearTimeout(timer);
      curves.close();
      exchange.close();
      line.close();
    },
  };
}
