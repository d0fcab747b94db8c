// The words of the control plane, each with a sign and a tone: nothing is told by colour alone.

export const PHASES = {
  pending: { sign: "·", tone: "wait" },
  scheduling: { sign: "·", tone: "wait" },
  pulling: { sign: "◦", tone: "wait" },
  starting: { sign: "◦", tone: "wait" },
  ready: { sign: "●", tone: "good" },
  degraded: { sign: "▲", tone: "warn" },
  succeeded: { sign: "✓", tone: "done" },
  failed: { sign: "✕", tone: "bad" },
  cancelled: { sign: "⊘", tone: "off" },
};

export const STATES = {
  waiting: { sign: "·", tone: "wait" },
  launched: { sign: "◦", tone: "wait" },
  running: { sign: "■", tone: "good" },
  stalled: { sign: "!", tone: "warn" },
  stopping: { sign: "▾", tone: "off" },
  succeeded: { sign: "✓", tone: "done" },
  lost: { sign: "✕", tone: "bad" },
  dropped: { sign: "○", tone: "idle" },
};

export const INCIDENTS = {
  failure: { sign: "✕", tone: "bad" },
  stall: { sign: "!", tone: "warn" },
  loss: { sign: "▽", tone: "idle" },
  resize: { sign: "↕", tone: "off" },
  restart: { sign: "↻", tone: "wait" },
};

const UNKNOWN = { sign: "?", tone: "idle" };
const ENDED = ["succeeded", "failed", "cancelled"];

export const phaseOf = (name) => PHASES[name] ?? UNKNOWN;
export const incidentOf = (kind) => INCIDENTS[kind] ?? UNKNOWN;
export const stateOf = (name) => STATES[name] ?? UNKNOWN;
export const isEnded = (phase) => ENDED.includes(phase);

/** What the overview can be narrowed to. */
export const GROUPS = [
  { name: "all", label: "All", has: () => true },
  { name: "live", label: "Live", has: ({ phase }) => !isEnded(phase) },
  {
    name: "trouble",
    label: "Trouble",
    has: ({ phase, stalled }) => ["failed", "degraded"].includes(phase) || stalled > 0,
  },
  { name: "succeeded", label: "Succeeded", has: ({ phase }) => phase === "succeeded" },
  { name: "failed", label: "Failed", has: ({ phase }) => phase === "failed" },
  { name: "cancelled", label: "Cancelled", has: ({ phase }) => phase === "cancelled" },
];

/** A rank that runs and has stopped reporting is shown as stalled. */
export function shownState(rank) {
  return rank.stalled && rank.state === "running" ? "stalled" : rank.state;
}
