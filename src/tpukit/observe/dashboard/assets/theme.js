"use strict";
// Before anything is painted, so that a page in the dark never flashes white.
(() => {
  const kept = localStorage.getItem("tpukit-theme") ?? "auto";
  document.documentElement.dataset.theme = kept;
  document.documentElement.style.colorScheme = kept === "auto" ? "light dark" : kept;
})();
