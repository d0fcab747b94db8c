// Where it begins: who is logged in, which page is shown, and how the connection stands.

import { Refused, get, post } from "./api.js";
import { showDialog } from "./dialog.js";
import { announce, el, setText } from "./dom.js";
import { clean, duration } from "./format.js";
import { Keys } from "./keyboard.js";
import { openOverview } from "./overview.js";
import { openRun } from "./run.js";

const main = document.getElementById("main");
const theme = window.basilicaTheme;
const keys = new Keys();
const START_AGAIN = 2000;
let close = () => {};
let ahead = 0; // the server's clock, less ours

const app = {
  now: () => Date.now() + ahead,
  keys: (bindings) => keys.add(bindings),
  title: (text) => (document.title = `${text} · Basilica`),
  crumb: (...parts) => document.getElementById("crumb").replaceChildren(...parts),
  linkState,
  go: (hash) => (location.hash = hash),
};

// ---- the connection ------------------------------------------------------------------------------------------------

// The worst first: the page is as live as the least of what it follows.
const LINK_STATES = {
  lost: "Connection lost",
  refused: "Stopped",
  connecting: "Connecting",
  live: "Live",
  ended: "Complete",
};
const links = new Map(); // by what is followed: how the connection of each stands
const lost = document.getElementById("lost");
const lostWhy = lost.appendChild(el("span", {}));
const lostNext = lost.appendChild(el("span", { "aria-hidden": "true" }));
let countdown;

/** Is told by each stream of a page, `what`, how it stands; see `Stream`. */
function linkState(what, state, problem, pause) {
  if (state === "refused" && problem.status === 401) return signedOut(problem.message);
  if (state === "trying") links.set(what, { ...links.get(what), until: null });
  else links.set(what, { state, problem, until: Date.now() + pause });
  drawLinks();
}

function unlink() {
  links.clear();
  clearInterval(countdown);
}

function drawLinks() {
  const found = [...links.values()];
  const state = Object.keys(LINK_STATES).find((name) => found.some((link) => link.state === name));
  const element = document.getElementById("link-state");
  clearInterval(countdown);
  element.hidden = false;
  element.dataset.state = state;
  setText(element, LINK_STATES[state]);
  if (state !== "lost") {
    if (!lost.hidden && state === "live") announce("connected again");
    lost.hidden = true;
    return;
  }
  const { problem, until } = found.find((link) => link.state === "lost");
  const tick = () => {
    const left = Math.max(0, Math.ceil((until - Date.now()) / 1000));
    setText(lostNext, left > 0 ? `Next try in ${duration(left)}.` : "Trying now…");
  };
  setText(lostWhy, `Connection lost: ${clean(problem)}. What you see may be old; it goes on by itself. `);
  tick();
  lost.hidden = false;
  countdown = setInterval(tick, 500);
}

// ---- pages ---------------------------------------------------------------------------------------------------------

function route() {
  close();
  close = () => {};
  unlink();
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  const [, page, name, tab] = path.split("/");
  main.scrollTop = 0;
  if (page === "run" && name) {
    close = openRun(main, app, decoded(name), tab === "logs" ? "logs" : "run", new URLSearchParams(query));
  } else {
    close = openOverview(main, app);
  }
}

/** An address that somebody broke is a name like any other: there is no such run. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function signedOut(why) {
  close();
  close = () => {};
  unlink();
  lost.hidden = true;
  for (const id of ["link-state", "user", "logout"]) document.getElementById(id).hidden = true;
  app.crumb("");
  app.title("Not logged in");
  main.replaceChildren(
    el(
      "div",
      { class: "page signed-out" },
      el("h1", {}, "Not logged in"),
      el("p", {}, why),
      el("p", {}, "In a terminal of the machine where you use Basilica:"),
      el("pre", { tabindex: "0" }, "basilica console"),
      el(
        "p",
        { class: "dim" },
        "It opens this page and logs in; there is no key to paste. Without a browser there, ",
        el("code", {}, "basilica console --print"),
        " prints the link.",
      ),
    ),
  );
}

async function start() {
  const expired = location.hash === "#/link-used-up";
  if (expired) history.replaceState(null, "", "./");
  try {
    const session = await get("console/session");
    ahead = Date.parse(session.now) - Date.now();
    const user = document.getElementById("user");
    setText(user, clean(session.user));
    user.title = `Basilica ${clean(session.version)}`;
    user.hidden = document.getElementById("logout").hidden = false;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      return signedOut(
        expired
          ? "This link has been used or is older than five minutes: a link logs in once."
          : "This browser has no session with this server, or it has ended.",
      );
    }
    linkState("session", "lost", error.message, START_AGAIN);
    setTimeout(() => {
      linkState("session", "trying");
      start();
    }, START_AGAIN);
    return;
  }
  addEventListener("hashchange", () => {
    route();
    main.focus({ preventScroll: true }); // a new page begins to be read at its beginning
  });
  route();
}

// ---- what is always there ------------------------------------------------------------------------------------------

function drawTheme() {
  const button = document.getElementById("theme");
  setText(button, theme.isDark() ? "☾" : "☀");
  button.setAttribute("aria-label", theme.isDark() ? "Dark; change to light" : "Light; change to dark");
}

function toggleTheme() {
  theme.toggle();
  drawTheme();
}

document.getElementById("theme").addEventListener("click", toggleTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTheme);
document.getElementById("help").addEventListener("click", () => keys.help());
document.getElementById("logout").addEventListener("click", async () => {
  close();
  close = () => {};
  try {
    await post("console/logout");
    signedOut("You have logged out.");
  } catch (error) {
    route();
    showDialog("Still logged in", [el("p", {}, `The server did not end the session: ${clean(error.message)}.`)]);
  }
});
// The skip link would otherwise be taken for a page.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
keys.add({
  o: ["all runs", () => app.go("#/")],
  t: ["light or dark", toggleTheme],
  "?": ["these keys", () => keys.help()],
});
drawTheme();
start();
