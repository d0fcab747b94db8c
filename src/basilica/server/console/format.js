// How things read: durations, numbers, and text that others wrote.

// Controls, and marks that reorder text on the screen or take no room on it, so that it reads as something else than it
// is. The two that join letters (U+200C and U+200D) stay: some scripts cannot be written without them.
const ACTING = new RegExp(
  "[\\u0000-\\u0008\\u000a-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]",
  "gu",
);
// What a terminal would do and not show: colours, movements of its cursor, titles, and links around a text.
const TERMINAL = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[()][0-9A-B])/g;
const LONGEST = 4000;

/** Foreign text in which nothing acts: control characters are shown as escapes. */
export function clean(text) {
  return String(text ?? "").replace(ACTING, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
}

/** A log line: what is for a terminal dropped, what was overwritten left out, and cut where nobody reads on. */
export function logLine(text) {
  let shown = text;
  if (text.includes("\u001b")) shown = shown.replace(TERMINAL, "");
  if (shown.includes("\r")) shown = shown.split("\r").filter(Boolean).at(-1) ?? "";
  if (shown.length <= LONGEST) return clean(shown);
  const more = grouped(shown.length - LONGEST);
  return `${clean(shown.slice(0, LONGEST))} … (${more} more characters are in the download)`;
}

/** Several lines: tracebacks and stacks. */
export function cleanLines(text) {
  return String(text ?? "")
    .split("\n")
    .map(logLine)
    .join("\n");
}

/** `0.4s`, `42s`, `3m12s`, `2h05m`, `3d4h`. */
export function duration(seconds) {
  if (!(seconds > 0)) return "0s";
  if (seconds < 10) return `${seconds.toFixed(1).replace(/\.0$/, "")}s`;
  const whole = Math.floor(seconds);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${Math.floor((whole % 86400) / 3600)}h`;
}

/** `12s`, `5m`, `3h`, `4d`: how long ago something was, at a glance. */
export function about(then, now) {
  const seconds = Math.max(0, Math.floor((now - then) / 1000));
  if (seconds < 60) return `${seconds}s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}h`;
  return `${Math.floor(seconds / 86400)}d`;
}

/** Whole seconds, as an age that is looked at again and again should be. */
export function age(then, now) {
  return duration(Math.max(0, Math.floor((now - then) / 1000)));
}

/** What a run has used by now: what was seen, and what runs since then. */
export function gpuSeconds({ gpuSeconds: seen, gpus, until }, now) {
  return seen + (until === undefined ? 0 : (gpus * Math.max(0, now - Date.parse(until))) / 1000);
}

export function gpuHours(gpuSeconds) {
  const hours = gpuSeconds / 3600;
  if (hours === 0) return "–";
  return hours < 0.1 ? "<0.1" : hours < 100 ? hours.toFixed(1) : grouped(Math.round(hours));
}

/** A number in about four digits. */
export function number(value) {
  if (typeof value === "string") return value; // "NaN", "Infinity", "-Infinity"
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(4)));
}

/** `91.2`, of a share between 0 and 1. */
export const percent = (share) => (100 * share).toFixed(1);

/** `rank 1`, `ranks 1 and 3`, `ranks 0-5, 9 and 11`; of many spans the first few. */
export function namedRanks(ranks, most = 6) {
  const spans = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    if (spans.length > 0 && spans.at(-1)[1] === rank - 1) spans.at(-1)[1] = rank;
    else spans.push([rank, rank]);
  }
  const texts = spans.slice(0, most).map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`));
  const left = spans.slice(most).reduce((sum, [from, to]) => sum + to - from + 1, 0);
  const last = left > 0 ? `${grouped(left)} more` : texts.pop();
  const names = texts.length > 0 ? `${texts.join(", ")} and ${last}` : last;
  return `${ranks.length === 1 ? "rank" : "ranks"} ${names}`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${Number(count.toPrecision(3))} ${units[unit]}`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** The time of day, here; with the day where that is another. */
export function clock(moment, now) {
  const then = new Date(moment);
  const time = CLOCK.format(then);
  return then.toDateString() === new Date(now).toDateString() ? time : `${DAY.format(then)} ${time}`;
}

const GROUPED = new Intl.NumberFormat("en");

/** `1,024` */
export const grouped = (count) => GROUPED.format(count);

export function plural(count, word) {
  return `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
}
