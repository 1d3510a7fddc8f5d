"use strict";
// Anything that goes wrong is written where a person, and the browser test, can see it.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = event.message;
});
document.addEventListener("securitypolicyviolation", (event) => {
  document.documentElement.dataset.blocked = event.blockedURI;
});

(() => {
  const root = document.documentElement;
  root.classList.add("scripted");

  // --- theme: what the system says, or what the reader chose; drawings hear of a change ---
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const announce = () => document.dispatchEvent(new Event("themechange"));
  const setTheme = (theme) => {
    root.style.colorScheme = theme === "auto" ? "light dark" : theme;
    root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    announce();
  };
  button.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  setTheme("auto");

  for (const copy of document.querySelectorAll("[data-copy]")) {
    copy.addEventListener("click", () => {
      navigator.clipboard?.writeText(copy.dataset.copy).then(() => {
        copy.textContent = "Copied";
      });
    });
  }

  // Scripts of this kind of page come after this one, and all before the page is loaded.
  window.addEventListener("load", () => {
    root.dataset.ready = "true";
  });
})();
