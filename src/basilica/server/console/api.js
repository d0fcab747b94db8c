// Asking the server. The session's cookie goes along by itself; no script can read it.

const OURS = { "X-Basilica-Console": "1" }; // without it the server changes nothing for a browser
const PATIENCE = 30_000; // for a whole answer: a connection that is dead without a word must not be waited for for ever

/** What the server refused, in its own words; `status` 0 if it did not answer. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** Whether asking again would be answered the same. */
  get isFinal() {
    return this.status >= 400 && this.status < 500 && this.status !== 429;
  }
}

export const pathOf = (name) => `deployments/${encodeURIComponent(name)}`;

/** A request whose answer has begun. */
export async function open(path, { method = "GET", headers = {}, body, signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: { ...OURS, ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not one of ours, a proxy's perhaps: the status says what there is to say.
  }
  throw new Refused(answer.status, message);
}

export const get = (path, options = {}) => ask(path, options);
export const post = (path, body = {}) => ask(path, { method: "POST", body });
export const remove = (path) => ask(path, { method: "DELETE" });

/** A whole answer. One that does not come, or breaks off, is `Refused`; only who asked can end it otherwise. */
async function ask(path, { signal: left, ...options }) {
  const patience = AbortSignal.timeout(PATIENCE);
  const signal = left === undefined ? patience : AbortSignal.any([left, patience]);
  try {
    return await (await open(path, { ...options, signal })).json();
  } catch (error) {
    if (error instanceof Refused || left?.aborted) throw error;
    throw new Refused(0, "the server does not answer");
  }
}
