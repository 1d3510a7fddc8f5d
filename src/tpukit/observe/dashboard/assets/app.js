// The dashboard: the address says which page, the page draws itself, the stream keeps it true.

import { follow, onChange } from "./data.js";
import { fill } from "./dom.js";
import { keepAges } from "./format.js";
import { chipsPage } from "./pages/chips.js";
import { comparePage } from "./pages/compare.js";
import { documentsPage } from "./pages/documents.js";
import { fleetPage } from "./pages/fleet.js";
import { runPage } from "./pages/run.js";
import { drawShell } from "./shell.js";
import { onState, state } from "./state.js";

// Anything that goes wrong is written where a person, and the browser test, can see it.
addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});
addEventListener("unhandledrejection", (event) => {
  document.documentElement.dataset.error = String(event.reason);
});
document.addEventListener("securitypolicyviolation", (event) => {
  document.documentElement.dataset.blocked = event.blockedURI;
});

const MAKERS = {
  fleet: fleetPage,
  run: runPage,
  chips: chipsPage,
  plan: () => documentsPage("plan"),
  compile: () => documentsPage("compile"),
  compare: comparePage,
};
const ground = document.getElementById("content");
let shown = null;

/** A page has a `root`, `show()` for a new address, `hear(names, isOtherList)` for news, `close()`. */
function show() {
  const { page } = state();
  if (shown?.name !== page) {
    shown?.page.close();
    shown = { name: page, page: MAKERS[page]() };
    fill(ground, shown.page.root);
    document.documentElement.dataset.page = page;
    scrollTo(0, 0);
  }
  shown.page.show();
}

drawShell();
onState(show);
onChange((names, isOtherList) => shown?.page.hear(names, isOtherList));
show();
follow();
keepAges();
document.documentElement.dataset.ready = "true";
