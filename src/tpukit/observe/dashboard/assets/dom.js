// Elements out of data. Text is only ever text: nothing here, and nothing the policy of the server
// allows, turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set([
  "svg",
  "g",
  "rect",
  "line",
  "path",
  "text",
  "title",
  "circle",
  "polyline",
  "pattern",
  "defs",
]);

/** Make an element: `h("a.link", {href}, "text", other)`. Properties that begin with "on" are listeners. */
export function h(kind, ...rest) {
  const [name, ...classes] = kind.split(".");
  const made = SHAPES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  const hasProperties = rest[0]?.constructor === Object;
  for (const [key, value] of Object.entries(hasProperties ? rest[0] : {})) set(made, key, value);
  made.append(...flat(hasProperties ? rest.slice(1) : rest));
  return made;
}

function set(element, key, value) {
  if (value === null || value === undefined || value === false) return;
  if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else if (key === "value") element.value = value;
  else element.setAttribute(key, value === true ? "" : value);
}

function flat(children) {
  return children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);
}

/** Put these in the place of what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

const colors = new Map();
document.addEventListener("themechange", () => colors.clear()); // before anything is drawn anew

/** A color of the style sheet as a canvas understands it, in light and dark. */
export function color(name) {
  if (!colors.has(name)) {
    const probe = document.documentElement.appendChild(document.createElement("span"));
    probe.style.color = `var(--${name})`;
    colors.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colors.get(name);
}

/** Call at most once in a while, the last time included. */
export function seldom(wait, call, last = 0) {
  let timer = null;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(
      () => {
        timer = null;
        last = performance.now();
        call();
      },
      Math.max(0, last + wait - performance.now()),
    );
  };
}
