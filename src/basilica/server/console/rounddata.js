// The rounds of a DiLoCo run, put together from what each of its replicas reported. Nothing here knows the page.

const FIELDS = {
  round: "diloco_round",
  fragment: "diloco_fragment",
  replica: "diloco_replica",
  counted: "diloco_counted",
  weight: "diloco_weight",
  members: "diloco_members",
  world: "diloco_world",
  up: "diloco_bytes_up",
  down: "diloco_bytes_down",
  wait: "diloco_wait_s",
  waitedFor: "diloco_waited_for",
  seconds: "diloco_round_s",
};
const CONSTANT = ["replica", "world"]; // of a rank: its last report says them for all its rounds
const OWN = new Set(Object.values(FIELDS));
const HIGHEST_REPLICA = 4095; // whatever a rank reports: each replica is a cell of every row
const HIGHEST_ROUND = 1e9;
const SPANS = 3000;
const OVERLAP = 3; // rounds that are asked for again: replicas tell of a round one after the other

export const ROW_METRICS = Object.entries(FIELDS).flatMap(([field, name]) => (CONSTANT.includes(field) ? [] : [name]));
export const COURSE_METRICS = [FIELDS.round, FIELDS.members];

/** What DiLoCo reports of its rounds, which is shown as rounds and nowhere else. */
export const isOfRounds = (metric) => OWN.has(metric);

/** Whether a rank has told of a round. */
export const tellsRounds = (rank) => rank.report?.values[FIELDS.round] !== undefined;

/** Which round each rank told of last, as a text that changes with any of them. */
export const stampOf = (ranks) =>
  ranks
    .filter(tellsRounds)
    .map(({ rank, report }) => `${rank}:${report.values[FIELDS.round]}/${report.values[FIELDS.fragment]}`)
    .join(" ");

const whole = (value, highest) => Number.isInteger(value) && value >= 0 && value <= highest;
const amount = (value) => (Number.isFinite(value) && value > 0 ? value : 0);

export class RoundBook {
  constructor() {
    this.rows = new Map(); // by key, of the newest rounds
    this.spans = new Map(); // by first round: all rounds that are known of, the older ones several at a time
    this.replicaOf = new Map(); // by rank
    this.world = 0;
    this.limit = 50; // rows that are kept
  }

  /** The newest first. */
  newest() {
    return [...this.rows.values()].sort(newerFirst);
  }

  /** Every replica that has, or should have, a cell. */
  replicas() {
    const found = new Set(this.replicaOf.values());
    for (let replica = 0; replica < this.world; replica += 1) found.add(replica);
    return [...found].sort((a, b) => a - b);
  }

  /** Takes the last reports of all ranks: what they say of one round each, at once and whatever the runtime keeps. */
  takeLast(ranks) {
    for (const { rank, report } of ranks.filter(tellsRounds)) {
      const told = {};
      for (const [field, name] of Object.entries(FIELDS)) told[field] = Number(report.values[name]);
      if (whole(told.replica, HIGHEST_REPLICA)) this.replicaOf.set(rank, told.replica);
      if (whole(told.world, HIGHEST_REPLICA + 1)) this.world = Math.max(this.world, told.world);
      this.take(told, rank, `last ${rank}`, Date.parse(report.at));
    }
    this.prune();
  }

  /** Takes series of all that a row has. A point that stands for several rounds tells of none of them. */
  takeSeries(series) {
    for (const { rank, worker, byField } of joined(series)) {
      byField.round.forEach((point, i) => {
        if (point.count > 1) return;
        const told = {};
        for (const [field, points] of Object.entries(byField)) {
          if (points[i]?.at === point.at) told[field] = Number(points[i].value);
        }
        this.take(told, rank, `${rank}.${worker}`, Date.parse(point.at));
      });
    }
    this.prune();
  }

  /** Takes the whole course from some ranks; returns since when as many of the newest rounds as are kept were told. */
  takeCourse(series) {
    const moments = [];
    for (const { byField } of joined(series)) {
      byField.round.forEach((point, i) => {
        const from = Number(point.min);
        const to = Number(point.max);
        const members = Number(byField.members?.[i]?.min);
        if (!whole(from, HIGHEST_ROUND) || !whole(to, HIGHEST_ROUND)) return;
        if (whole(members, HIGHEST_REPLICA + 1)) this.span(from, to, members);
        moments.push([to, Date.parse(point.at)]);
      });
    }
    const last = moments.reduce((most, [round]) => Math.max(most, round), 0);
    return moments.reduce((since, [round, at]) => (round < last - this.limit ? Math.max(since, at) : since), 0);
  }

  /** From when on to ask for what is new. */
  since() {
    const told = this.newest().filter((row) => row.at !== null);
    const recent = told.filter((row) => row.round > (told[0]?.round ?? 0) - OVERLAP);
    return recent.reduce((first, row) => Math.min(first, row.at), recent.length > 0 ? Infinity : 0);
  }

  take(told, rank, source, at) {
    if (!whole(told.round, HIGHEST_ROUND)) return;
    const fragment = whole(told.fragment, HIGHEST_REPLICA) ? told.fragment : 0;
    const key = `${told.round}-${fragment}`;
    const row = this.rows.get(key) ?? { key, round: told.round, fragment, told: new Map(), at: null, members: 0 };
    this.rows.set(key, row);
    const replica = this.replicaOf.get(rank) ?? rank;
    const isLast = source.startsWith("last");
    if (!row.told.has(replica)) row.told.set(replica, new Map());
    const sources = row.told.get(replica);
    if (isLast && [...sources.keys()].some((known) => !known.startsWith("last"))) return; // its series says more
    if (!isLast) {
      sources.delete(`last ${rank}`);
      row.at = Math.min(row.at ?? Infinity, at);
    }
    sources.set(source, {
      counted: told.counted === 1,
      weight: amount(told.weight),
      up: amount(told.up),
      down: amount(told.down),
      wait: amount(told.wait),
      waitedFor: whole(told.waitedFor, HIGHEST_REPLICA) ? told.waitedFor : null,
      seconds: amount(told.seconds),
    });
    if (whole(told.members, HIGHEST_REPLICA + 1)) {
      row.members = told.members;
      this.span(told.round, told.round, told.members);
    }
  }

  span(from, to, members) {
    const known = this.spans.get(from);
    const fewest = Math.min(members, known?.members ?? members);
    this.spans.set(from, { from, to: Math.max(to, known?.to ?? to), members: fewest });
    if (this.spans.size > SPANS) this.thin();
  }

  /** Two neighbours become one, with the fewer members. */
  thin() {
    const all = this.course();
    this.spans = new Map();
    for (let i = 0; i < all.length; i += 2) {
      const [one, two = one] = [all[i], all[i + 1]];
      this.spans.set(one.from, { from: one.from, to: two.to, members: Math.min(one.members, two.members) });
    }
  }

  /** All spans, the oldest first. */
  course() {
    return [...this.spans.values()].sort((a, b) => a.from - b.from);
  }

  prune() {
    for (const row of this.newest().slice(this.limit)) this.rows.delete(row.key);
  }
}

const newerFirst = (a, b) => b.round - a.round || b.fragment - a.fragment;

/** The series of a process, by field: what it told at one moment stands at one place in all of them. */
function joined(series) {
  const fieldOf = Object.fromEntries(Object.entries(FIELDS).map(([field, name]) => [name, field]));
  const processes = new Map();
  for (const { rank, worker, metric, points } of series) {
    const key = `${rank}.${worker}`;
    if (!processes.has(key)) processes.set(key, { rank, worker, byField: {} });
    if (fieldOf[metric]) processes.get(key).byField[fieldOf[metric]] = points;
  }
  return [...processes.values()].filter(({ byField }) => byField.round);
}

/** What one replica told of a round, with all its processes; null if it told nothing. */
export function replicaIn(row, replica) {
  const told = [...(row.told.get(replica)?.values() ?? [])];
  if (told.length === 0) return null;
  const sum = (field) => told.reduce((all, one) => all + one[field], 0);
  const longest = told.reduce((a, b) => (b.wait > a.wait ? b : a));
  return {
    counted: told.every((one) => one.counted),
    weight: Math.max(...told.map((one) => one.weight)),
    up: sum("up"),
    down: sum("down"),
    wait: longest.wait,
    waitedFor: longest.waitedFor,
    seconds: Math.max(...told.map((one) => one.seconds)),
  };
}

/** A row in sum: what all replicas moved, and who waited longest. */
export function totals(row) {
  const all = [...row.told.keys()].map((replica) => ({ replica, ...replicaIn(row, replica) }));
  return {
    up: all.reduce((sum, one) => sum + one.up, 0),
    down: all.reduce((sum, one) => sum + one.down, 0),
    seconds: Math.max(0, ...all.map((one) => one.seconds)),
    longest: all.reduce((a, b) => (b.wait > (a?.wait ?? 0) ? b : a), null),
  };
}
