// The account of a run's time, as it is by now: what the server counted, and what has gone by since.

const FRESH = 5000; // an account that was older when it came is of a run that nobody looks after: it stands still

/** Every cause that a rank's time can have, in the order of the bar; `lost` marks those that cost training. */
export const CAUSES = {
  training: { about: "steps that count", lost: false },
  unattributed: { about: "runs, and has reported no step", lost: false },
  finished: { about: "exited 0, the others go on", lost: false },
  recomputing: { about: "takes steps that were taken before", lost: true },
  restoring: { about: "loads what was saved", lost: true },
  snapshotting: { about: "blocked by a snapshot", lost: true },
  stalled: { about: "has stopped reporting", lost: true },
  degraded: { about: "failed, and not running again yet", lost: true },
  changing: { about: "ready for a planned change, or stopping for it", lost: true },
  rendezvous: { about: "waits for the other agents", lost: true },
  starting: { about: "image, process and imports", lost: true },
  queued: { about: "waits for room, or to be launched", lost: true },
};

const isLoss = (cause) => CAUSES[cause]?.lost ?? true;

/** `take(run, now)` a state when it comes; `at(now)` is the account of any later moment, and costs no more than there
 * are causes. Each rank adds to the cause that it is charged with: no second has to be asked for. */
export function liveAccount() {
  let given = null;
  let until = 0; // up to when the server has counted
  let ticking = false;
  let ranks = new Map(); // by cause: how many are charged with it now
  let losing = 0;

  const since = (now) => (ticking ? Math.max(0, now - until) / 1000 : 0);

  return {
    take(run, now) {
      const d = run.distributed;
      given = d.goodput;
      until = Date.parse(run.createdAt) + 1000 * given.wallSeconds;
      ranks = new Map();
      losing = 0;
      for (const { cause } of d.ranks) {
        if (cause === undefined) continue;
        ranks.set(cause, (ranks.get(cause) ?? 0) + 1);
        losing += isLoss(cause) ? 1 : 0;
      }
      ticking = ranks.size > 0 && now - until < FRESH;
    },
    at(now) {
      const more = since(now);
      const seconds = new Map();
      let all = 0;
      for (const cause of new Set([...Object.keys(CAUSES), ...Object.keys(given.seconds)])) {
        const amount = (given.seconds[cause] ?? 0) + more * (ranks.get(cause) ?? 0);
        seconds.set(cause, amount);
        all += amount;
      }
      const trained = seconds.get("training");
      const [loss, lost] = [...seconds].filter(([cause]) => isLoss(cause)).reduce((a, b) => (b[1] > a[1] ? b : a));
      return {
        seconds,
        all,
        wall: given.wallSeconds + more,
        least: all > 0 ? trained / all : 0,
        most: all > 0 ? (trained + seconds.get("unattributed")) / all : 1,
        loss: lost > 0 ? loss : null,
        gpus: given.gpusPerRank,
        stepsRecomputed: given.stepsRecomputed,
      };
    },
    /** What an incident has cost by now, in seconds of ranks and of GPUs. */
    cost(incident, now) {
      const more = incident.overAt === undefined ? since(now) * losing : 0;
      return { ranks: incident.costSeconds + more, gpus: incident.costGpuSeconds + more * given.gpusPerRank };
    },
  };
}
