// What is shown is what the address says: page, run, range, metric. Back and forward just work.

export const PAGES = ["fleet", "run", "chips", "plan", "compile", "compare"];

const listeners = new Set();

/** The page and its settings, as the address has them. */
export function state() {
  const page = location.pathname.slice(1) || "fleet";
  return {
    page: PAGES.includes(page) ? page : "fleet",
    ...Object.fromEntries(new URLSearchParams(location.search)),
  };
}

/** The address of another state; settings that are empty are left out. */
export function address({ page, ...settings }) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(settings)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, value);
  }
  const text = query.toString();
  return `/${page}${text ? `?${text}` : ""}`;
}

/** Go to a state. A step that is not worth a click of "back" replaces the one before. */
export function go(next, { replace = false } = {}) {
  const to = address(next);
  if (to !== location.pathname + location.search) {
    history[replace ? "replaceState" : "pushState"](null, "", to);
  }
  for (const listener of listeners) listener();
}

/** Change some settings of the state that is shown. */
export function change(settings, options) {
  go({ ...state(), ...settings }, options);
}

export function onState(listener) {
  listeners.add(listener);
}

addEventListener("popstate", () => {
  for (const listener of listeners) listener();
});

// Links of this application change the state; every other one, and every new tab, is the browser's.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || link.target || link.hasAttribute("download")) return;
  if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  const to = new URL(link.href);
  history.pushState(null, "", to.pathname + to.search);
  for (const listener of listeners) listener();
});
