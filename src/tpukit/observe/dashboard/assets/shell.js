// What is around every page: the bar, the run picker, the theme, the line to the server, keys.

import { isLive, onChange, runs } from "./data.js";
import { fill, h } from "./dom.js";
import { address, change, go, onState, PAGES, state } from "./state.js";

const TITLES = {
  fleet: "Fleet",
  run: "Run",
  chips: "Chips",
  plan: "Plan",
  compile: "Compile",
  compare: "Compare",
};
const OF_A_RUN = ["run", "chips"];
const KEYS = [
  ["1 … 6", "Fleet, Run, Chips, Plan, Compile, Compare"],
  ["/", "choose a run"],
  ["x", "steps or time along the axis"],
  ["0", "show everything again"],
  ["t", "theme: as the system, light, dark"],
  ["Tab, arrows, + −", "on a chart: move the cursor, zoom; on the torus: from chip to chip"],
  ["Enter", "on a chip: its history"],
  ["?", "this list"],
  ["Esc", "close"],
];

const picker = h("select", {
  id: "picker",
  "aria-label": "Run",
  onchange: () => change({ run: picker.value, from: "", to: "", chip: "" }),
});
const lamp = h("span.lamp", { role: "status" });
const theme = h("button", { type: "button", title: "Theme (t)", onclick: () => turnTheme() });
const help = h(
  "dialog",
  { "aria-labelledby": "keys-title" },
  h("h2", { id: "keys-title" }, "Keys"),
  h(
    "dl.keys",
    KEYS.map(([key, what]) => [h("dt", h("kbd", key)), h("dd", what)]),
  ),
  h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")),
);
const links = PAGES.map((page) => h("a.tab", { "data-page": page }, TITLES[page]));

/** Draw the bar, and keep it true. */
export function drawShell() {
  fill(
    document.getElementById("bar"),
    h("a.skip", { href: "#content" }, "Skip to content"),
    h("a.brand", { href: "/fleet" }, "tpukit"),
    links,
    h("span.spring"),
    h("label.picker", h("span", "Run"), picker),
    lamp,
    theme,
    h(
      "button",
      { type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: () => help.showModal() },
      "?",
    ),
  );
  fill(document.getElementById("help"), help);
  showTheme();
  showLamp();
  onState(showPlace);
  onChange((names, isOtherList) => {
    showLamp();
    if (isOtherList) showPlace();
  });
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  showPlace();
}

/** The run that is looked at: the one of the address, or the most recently written. */
export const chosenRun = () => state().run ?? runs().keys().next().value;

function showPlace() {
  const now = state();
  document.title = `${TITLES[now.page]}${OF_A_RUN.includes(now.page) && chosenRun() ? ` · ${chosenRun()}` : ""} · tpukit`;
  for (const link of links) {
    const page = link.dataset.page;
    link.setAttribute("href", address({ page, run: OF_A_RUN.includes(page) ? (now.run ?? now.a) : now.run }));
    if (page === now.page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  picker.parentElement?.classList.toggle("away", !OF_A_RUN.includes(now.page));
  const names = [...runs().keys()];
  if (now.run && !names.includes(now.run)) names.unshift(now.run);
  fill(
    picker,
    names.map((name) => h("option", { value: name }, name)),
  );
  picker.value = chosenRun() ?? "";
}

function showLamp() {
  const words = {
    live: "live",
    connecting: "connecting …",
    reconnecting: "reconnecting …",
    closed: "no server",
  }[isLive()];
  lamp.dataset.state = isLive();
  lamp.title = "Changes are sent by the server as they are written";
  if (lamp.textContent !== words) lamp.textContent = words;
}

// --- theme ---
function announce() {
  document.dispatchEvent(new Event("themechange"));
}

function showTheme() {
  theme.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[
    document.documentElement.dataset.theme
  ];
  theme.setAttribute("aria-label", `Theme: ${document.documentElement.dataset.theme}`);
}

function turnTheme() {
  const order = ["auto", "light", "dark"];
  const root = document.documentElement;
  const next = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
  root.dataset.theme = next;
  root.style.colorScheme = next === "auto" ? "light dark" : next;
  localStorage.setItem("tpukit-theme", next);
  showTheme();
  announce();
}

// --- keys ---
function onKey(event) {
  const typing = event.target.closest?.("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const now = state();
  if (/^[1-6]$/.test(event.key)) {
    const page = PAGES[event.key - 1];
    go({ page, run: now.run });
  } else if (event.key === "/") picker.focus();
  else if (event.key === "x" && "by" in AXES_OF(now.page))
    change({ by: now.by === "step" ? "time" : "step", from: "", to: "" });
  else if (event.key === "0") change({ from: "", to: "" });
  else if (event.key === "t") turnTheme();
  else if (event.key === "?") help.showModal();
  else return;
  event.preventDefault();
}

const AXES_OF = (page) => (page === "run" ? { by: true } : {});
