// What the ranks write: live, all of them or one, with a search. Only the lines in sight exist in the page.

import { pathOf } from "./api.js";
import { el, setAttribute, setText } from "./dom.js";
import { grouped, logLine, plural } from "./format.js";
import { Stream } from "./stream.js";
import { Windowed } from "./windowed.js";

const KEPT = 200_000; // lines in the page; older ones are in the download
const ASKED = 100_000; // lines to begin with, of all ranks together
const ROW = 19;
const COLOURS = 8;
const NDJSON = "application/x-ndjson";
const ERROR = new RegExp(
  String.raw`\b(?:Traceback|FATAL|CRITICAL|ERROR|[A-Z]\w*(?:Error|Exception)|[Ee]rror(?=:)|panic(?:ked)?|` +
    String.raw`Segmentation fault|Killed)\b`,
);

export function openLogs(body, main, app, name, query) {
  let run = null;
  let rank = query.get("rank"); // null: all
  let lines = []; // {n, rank, text}
  let dropped = 0;
  let number = 0;
  let paused = false;
  let waiting = []; // lines that came while paused, the newest of them
  let unread = 0; // how many came
  let needle = null; // what is looked for, as a pattern
  let onlyMatches = false;
  let matches = []; // indexes into `lines`
  let match = -1;
  let stream = null;
  let marked = null; // the number of the line that was jumped to

  // ---- the page ----------------------------------------------------------------------------------------------------

  const ranks = el("select", { "aria-label": "Rank" });
  const search = el("input", {
    type: "search",
    placeholder: "Find in the log  ( / )",
    "aria-label": "Find in the log",
    autocomplete: "off",
    spellcheck: "false",
  });
  const found = el("span", { class: "dim found", role: "status" });
  const only = el("label", { class: "check" }, el("input", { type: "checkbox" }), "Only matches");
  const pause = el("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const first = el("button", { type: "button" }, "First error");
  const download = el("a", { class: "button", download: "" }, "Download");
  const count = el("span", { class: "dim" });
  const tools = el("div", { class: "log-tools" }, ranks, search, found, only, pause, first, download, count);
  const list = el("div", { class: "lines" });
  const box = el("div", { class: "log", tabindex: "0", role: "region", "aria-label": "Log" }, list);
  const toEnd = el("button", { type: "button", class: "to-end", hidden: true }, "↓ Newest");
  body.append(tools, el("div", { class: "log-frame" }, box, toEnd));
  main.classList.add("fixed");

  const shown = () => (onlyMatches && needle !== null ? matches.length : lines.length);
  const at = (i) => (onlyMatches && needle !== null ? lines[matches[i]] : lines[i]);
  const view = new Windowed({
    scroller: box,
    list,
    height: () => ROW,
    count: shown,
    key: (i) => at(i).n,
    make: () => {
      const gutter = el("span", { class: "gutter" });
      const text = el("span", { class: "text" });
      const row = el("div", { class: "line" }, gutter, text);
      row.parts = { gutter, text };
      return row;
    },
    render: (i, row) => fillLine(row, at(i), needle, rank === null, marked),
  });

  // ---- lines -------------------------------------------------------------------------------------------------------

  function add(fresh) {
    if (paused) {
      for (const line of fresh) waiting.push(line);
      unread += fresh.length;
      if (waiting.length > 2 * KEPT) waiting = waiting.slice(-KEPT);
      setText(count, `paused, ${plural(unread, "new line")}`);
      return;
    }
    const bottom = box.scrollHeight - box.scrollTop - box.clientHeight < ROW * 2;
    for (const line of fresh) {
      lines.push(line);
      if (needle?.test(line.text)) matches.push(lines.length - 1);
    }
    if (lines.length > KEPT) {
      const cut = lines.length - KEPT;
      lines = lines.slice(cut);
      dropped += cut;
      const before = matches.length;
      matches = matches.map((i) => i - cut).filter((i) => i >= 0);
      match = Math.max(-1, match - (before - matches.length)); // the same one as long as it is there
      if (!bottom) box.scrollTop = Math.max(0, box.scrollTop - cut * ROW);
    }
    refresh(bottom);
  }

  function refresh(follow) {
    setText(count, dropped > 0 ? `the last ${plural(lines.length, "line")}` : plural(lines.length, "line"));
    tellFound();
    view.draw();
    if (follow) {
      box.scrollTop = box.scrollHeight;
      view.draw();
    }
    tellEnd();
  }

  function tellEnd() {
    toEnd.hidden = box.scrollHeight - box.scrollTop - box.clientHeight < ROW * 2;
  }

  function tellFound() {
    setText(
      found,
      needle === null
        ? ""
        : matches.length === 0
          ? "not found"
          : `${match < 0 ? "" : `${match + 1} of `}${grouped(matches.length)}`,
    );
  }

  // ---- following ---------------------------------------------------------------------------------------------------

  function follow() {
    stream?.stop();
    if (paused) togglePause(); // what was to stay on the screen goes
    lines = [];
    matches = [];
    dropped = number = 0;
    match = -1;
    marked = null;
    const cursors = new Map(); // by rank: up to where whole pieces have come
    const pieces = new Map(); // by rank: lines of a piece whose end has not come yet
    const size = rank === null ? Math.max(1, run?.distributed.ranks.length ?? 1) : 1;
    let begun = false;
    stream = new Stream({
      state: (...state) => app.linkState("log", ...state),
      connect: () => {
        pieces.clear();
        const asked = new URLSearchParams({ follow: "true" });
        if (rank !== null) asked.append("rank", rank);
        if (!begun) asked.append("tail", String(Math.floor(ASKED / size)));
        if (cursors.size > 0) asked.append("since", [...cursors.values()].join(","));
        return { path: `${pathOf(name)}/logs?${asked}`, headers: { Accept: NDJSON } };
      },
      read: (texts) => {
        if (texts === null) return Boolean(run?.distributed.settled); // it ended: because the run has, or the server
        const fresh = [];
        for (const text of texts) {
          if (text === "") continue;
          const entry = JSON.parse(text);
          const piece = pieces.get(entry.rank) ?? [];
          piece.push({ n: 0, rank: entry.rank, text: logLine(entry.line) });
          if (entry.cursor === undefined) pieces.set(entry.rank, piece);
          else {
            cursors.set(entry.rank, entry.cursor);
            pieces.delete(entry.rank);
            for (const line of piece) {
              line.n = number;
              number += 1;
              fresh.push(line);
            }
            begun = true;
          }
        }
        if (fresh.length > 0) add(fresh);
        return false;
      },
    });
    setAttribute(download, "href", `${pathOf(name)}/logs${rank === null ? "" : `?rank=${rank}`}`);
    setAttribute(download, "download", `${name}${rank === null ? "" : `-rank-${rank}`}.log`);
    refresh(true);
  }

  function fillRanks() {
    const wanted = run.distributed.ranks.map((r) => String(r.rank));
    if (rank !== null && !wanted.includes(rank)) wanted.push(rank);
    if (ranks.children.length === wanted.length + 1) return;
    ranks.replaceChildren(
      el("option", { value: "" }, "All ranks"),
      ...wanted.map((r) => el("option", { value: r }, `Rank ${r}`)),
    );
    ranks.value = rank ?? "";
  }

  // ---- doing -------------------------------------------------------------------------------------------------------

  function find() {
    needle = search.value === "" ? null : literal(search.value);
    matches = [];
    match = -1;
    if (needle !== null) lines.forEach((line, i) => needle.test(line.text) && matches.push(i));
    tellFound();
    view.draw();
    if (onlyMatches) box.scrollTop = 0;
    else if (matches.length > 0) goTo(1);
  }

  function goTo(by) {
    if (matches.length === 0) return;
    match = (match + by + matches.length) % matches.length;
    jump(matches[match], match);
    tellFound();
  }

  function jump(index, among) {
    marked = lines[index].n;
    view.reveal(onlyMatches && needle !== null ? among : index, { centre: true });
    tellEnd();
  }

  function togglePause() {
    paused = !paused;
    setAttribute(pause, "aria-pressed", String(paused));
    setText(pause, paused ? "Resume" : "Pause");
    if (paused) setText(count, "paused");
    else {
      const fresh = waiting;
      dropped += unread - fresh.length;
      waiting = [];
      unread = 0;
      add(fresh);
    }
  }

  function firstError() {
    const index = lines.findIndex((line) => ERROR.test(line.text));
    if (index < 0) {
      setText(found, "no error in these lines");
      return;
    }
    if (onlyMatches) {
      onlyMatches = only.firstElementChild.checked = false;
      view.draw();
    }
    jump(index, index);
    setText(found, `line ${grouped(index + 1 + dropped)}`);
  }

  ranks.addEventListener("change", () => {
    rank = ranks.value === "" ? null : ranks.value;
    history.replaceState(null, "", `#/run/${encodeURIComponent(name)}/logs${rank === null ? "" : `?rank=${rank}`}`);
    follow();
  });
  search.addEventListener("input", find);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      goTo(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      search.value = "";
      find();
      box.focus();
    }
  });
  only.firstElementChild.addEventListener("change", (event) => {
    onlyMatches = event.target.checked;
    box.scrollTop = 0;
    view.draw();
    tellEnd();
  });
  pause.addEventListener("click", togglePause);
  first.addEventListener("click", firstError);
  box.addEventListener("scroll", tellEnd, { passive: true });
  toEnd.addEventListener("click", () => refresh(true));
  const keys = app.keys({
    "/": ["find", () => search.focus()],
    " ": ["pause or resume", togglePause],
    n: ["next match", () => goTo(1)],
    N: ["previous match", () => goTo(-1)],
    e: ["first error", firstError],
    G: ["newest line", () => refresh(true)],
  });

  return {
    update(next) {
      const begin = run === null;
      run = next;
      fillRanks();
      if (begin) follow();
    },
    close() {
      stream?.stop();
      view.close();
      keys();
      main.classList.remove("fixed");
    },
  };
}

function fillLine(row, line, needle, withRank, marked) {
  const { gutter, text } = row.parts;
  const now = `${needle?.source} ${withRank}`;
  setAttribute(row, "data-marked", line.n === marked ? "" : null);
  if (row.now === now) return;
  row.now = now;
  gutter.hidden = !withRank;
  setText(gutter, String(line.rank));
  gutter.dataset.rank = line.rank % COLOURS;
  setAttribute(row, "data-tone", ERROR.test(line.text) ? "bad" : null);
  if (needle === null) {
    text.replaceChildren(line.text);
    return;
  }
  const parts = [];
  let from = 0;
  for (const { 0: hit, index } of line.text.matchAll(new RegExp(needle, "giu"))) {
    parts.push(line.text.slice(from, index), el("mark", {}, hit));
    from = index + hit.length;
  }
  text.replaceChildren(...parts, line.text.slice(from));
}

/** A pattern of just these characters, in capitals or not. */
function literal(text) {
  return new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "iu");
}
