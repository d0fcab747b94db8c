// Answers that go on, line by line, and come back by themselves when the connection breaks.

import { Refused, open } from "./api.js";

const FIRST_DELAY = 500;
const LONGEST_DELAY = 10_000;
const SILENCE = 35_000; // the server says something every 15 seconds: after two it is not there any more
const LISTEN_EVERY = 5000;
const HIDDEN = 30_000; // a page that nobody looks at lets the server rest, and the browser's few connections go

const all = new Set(); // that go on: when one gets through to the server, the others try at once

/** The lines of an answer, as they come. `alive` is called with every piece. */
export async function* linesOf(answer, alive) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield lines; // in pieces as they came: a hundred thousand awaits would cost more than the lines
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Keeps an answer open. `connect` gives the path and headers to ask with, each time anew, so that it can say from where
 * to go on; `read` takes the lines, and null at the end of the answer, and returns true when there is nothing more to
 * come. `state` is told how it stands: `connecting`, `live`, `lost` with the problem and the delay, `trying` again,
 * `refused` with what the server said, `ended`.
 */
export class Stream {
  constructor({ connect, read, state }) {
    Object.assign(this, { connect, read, state });
    this.stopped = false;
    this.wake = null;
    this.hiding = null;
    this.onVisible = () => this.visibility();
    this.onOnline = () => this.tryNow();
    this.resting = false;
    document.addEventListener("visibilitychange", this.onVisible);
    addEventListener("online", this.onOnline);
    all.add(this);
    this.visibility(); // it may have been opened behind another
    this.run();
  }

  tryNow() {
    if (!this.resting) this.wake?.();
  }

  stop() {
    this.stopped = true;
    all.delete(this);
    document.removeEventListener("visibilitychange", this.onVisible);
    removeEventListener("online", this.onOnline);
    clearTimeout(this.hiding);
    this.abort?.abort();
    this.wake?.();
  }

  visibility() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        this.resting = true;
        this.abort?.abort();
      }, HIDDEN);
    } else {
      this.resting = false;
      this.wake?.();
    }
  }

  async run() {
    let delay = FIRST_DELAY;
    this.state("connecting");
    while (!this.stopped) {
      let problem = null; // an answer that ended properly is asked for again without alarm
      try {
        if (await this.once(() => (delay = FIRST_DELAY))) {
          if (!this.stopped) this.state("ended");
          return;
        }
      } catch (error) {
        if (this.stopped) return;
        if (error instanceof Refused && error.isFinal) {
          this.state("refused", error);
          return;
        }
        problem = error instanceof Refused ? error.message : "the connection broke";
      }
      if (this.stopped) return;
      const pause = delay * (0.75 + Math.random() / 2);
      if (!this.resting && problem !== null) this.state("lost", problem, pause);
      if (!this.resting) await this.pause(pause);
      if (this.resting && !this.stopped) await this.pause(null); // since a moment ago, or meanwhile
      if (problem !== null && !this.stopped) this.state("trying");
      delay = Math.min(delay * 2, LONGEST_DELAY);
    }
  }

  /** One connection; true if all has been told. */
  async once(connected) {
    this.abort = new AbortController();
    let heard = Date.now();
    const alive = () => (heard = Date.now());
    // By the time of day: the timers of a machine that was asleep do not know for how long.
    const timer = setInterval(() => Date.now() - heard > SILENCE && this.abort.abort(), LISTEN_EVERY);
    try {
      const { path, headers } = this.connect();
      const answer = await open(path, { headers, signal: this.abort.signal });
      connected();
      this.state("live");
      for (const other of all) if (other !== this) other.tryNow();
      for await (const lines of linesOf(answer, alive)) {
        if (this.stopped || this.read(lines)) return true;
      }
      return this.read(null) === true; // the answer has ended: was that all?
    } finally {
      clearInterval(timer);
    }
  }

  /** Until the time is up or somebody has reason to try now. */
  pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = milliseconds === null ? null : setTimeout(resolve, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

/** Server-sent events over such a stream. It goes on after the last id that it has seen. `path`: a function, too. */
export function events(path, { event, state }) {
  let id = null;
  let fields = {};
  return new Stream({
    state,
    connect: () => {
      fields = {};
      return { path, headers: { Accept: "text/event-stream", ...(id === null ? {} : { "Last-Event-ID": id }) } };
    },
    read: (lines) => {
      for (const line of lines ?? []) {
        if (line === "") {
          if (fields.data !== undefined) {
            if (event(fields.event, JSON.parse(fields.data))) return true;
            id = fields.id ?? id; // only now: what threw has not been seen
          }
          fields = {};
        } else if (!line.startsWith(":")) {
          const at = line.indexOf(": ");
          fields[line.slice(0, at)] = line.slice(at + 2);
        }
      }
      return false;
    },
  });
}
