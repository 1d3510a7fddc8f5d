// What the server knows: asked for by address, and told by it when something changed.

/** Ask for JSON; an error says what is wrong and the way out. */
export async function ask(path, settings = {}, { signal } = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(settings)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, value);
  }
  const text = query.toString();
  let answer;
  try {
    answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `tpukit dashboard` still running?");
  }
  if (answer.status === 401) location.reload(); // the page that asks for the token
  const found = await answer.json();
  if (!answer.ok) throw new Error(`${found.error}. Way out: ${found.way_out}.`);
  return found;
}

/** The address of something of a run. */
export const ofRun = (run, what) => `runs/${encodeURIComponent(run)}/${what}`;

// --- live: one stream of changes, begun again by the browser whenever it breaks ---
const summaries = new Map();
const listeners = new Set();
let source = null;
let connection = "connecting";

/** Runs by name, as the stream last told of them. */
export const runs = () => summaries;
export const isLive = () => connection;

/** Hear `(changed names, whether runs came or went)`, and `(empty, false)` when the line changes. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(names, isOtherList) {
  for (const listener of [...listeners]) listener(names, isOtherList);
}

/** Listen to the stream for as long as the page is looked at: a browser has six lines to a server. */
export function follow() {
  addEventListener("pagehide", rest);
  addEventListener("pageshow", listen);
  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : listen()));
  listen();
}

function rest() {
  source?.close();
  source = null;
}

function listen() {
  if (source || document.hidden) return;
  source = new EventSource("/api/live");
  source.addEventListener("runs", (event) => {
    const said = JSON.parse(event.data);
    const before = summaries.size;
    if (said.whole) summaries.clear();
    for (const run of said.runs) summaries.set(run.name, run);
    for (const name of said.gone) summaries.delete(name);
    connection = "live";
    tell(new Set(said.runs.map((run) => run.name)), said.whole || summaries.size !== before);
  });
  source.addEventListener("beat", () => {
    connection = "live";
    tell(new Set(), false);
  });
  source.addEventListener("error", () => {
    const isClosed = source?.readyState === EventSource.CLOSED;
    connection = isClosed ? "closed" : "reconnecting";
    tell(new Set(), false);
    if (!isClosed) return; // the browser tries again by itself
    rest(); // the server answered with an error instead of a stream
    setTimeout(listen, 3000);
  });
}
