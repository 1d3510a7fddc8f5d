// What pages are made of: cards, tables, commands, empty states, bars, small curves.

import { h } from "./dom.js";
import { figure, origin } from "./format.js";

/** One number that is asked for first. */
export function card(one) {
  return h(
    "div.card",
    { "data-figure": one.key },
    h("div.card-title", h("span", one.title), " ", origin(one.value === null ? "" : one.origin)),
    h("div.card-value", figure(one)),
    h("div.card-below", one.value === null ? one.reason : (one.below ?? "")),
  );
}

export const cards = (figures) => h("div.cards", figures.map(card));

/** A table; a column is `[title, kind]`, a cell is text, an element or a list of both. */
export function table(caption, columns, rows, { id } = {}) {
  const kind = (at) => (columns[at][1] ? `.${columns[at][1]}` : "");
  return h(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      { id },
      h("caption.unseen", caption),
      h(
        "thead",
        h(
          "tr",
          columns.map(([title], at) => h(`th${kind(at)}`, { scope: "col" }, title)),
        ),
      ),
      h(
        "tbody",
        rows.map((row) =>
          h(
            "tr",
            row.map((cell, at) => h(`td${kind(at)}`, cell)),
          ),
        ),
      ),
    ),
  );
}

/** A command to type next, with a button that copies it. */
export function command(text) {
  const copy = h(
    "button",
    {
      type: "button",
      onclick: () =>
        navigator.clipboard?.writeText(text).then(() => {
          copy.textContent = "Copied";
        }),
    },
    "Copy",
  );
  return h("div.command", h("pre", h("code", text)), copy);
}

/** Where there is nothing to show: what would be here, and how it gets here. */
export function empty(title, words, ...commands) {
  return h("section.empty", h("h2", title), h("p.intro", words), commands.map(command));
}

/** Something did not work; the rest of the page goes on. */
export function failure(error) {
  return h("p.warning", { role: "alert" }, error.message);
}

export function section(title, ...children) {
  return h("section", h("h2", title), children);
}

/** A bar of shares, each piece with its words; the words stand in a list below as well. */
export function shares(pieces, label) {
  const whole = pieces.reduce((sum, one) => sum + one.amount, 0) || 1;
  let reached = 0;
  const drawn = pieces.map((one) => {
    const x = reached;
    reached += one.amount;
    return h(
      "rect",
      { class: one.kind, x: `${(100 * x) / whole}%`, width: `${(100 * one.amount) / whole}%`, height: 14 },
      h("title", {}, one.words),
    );
  });
  return [
    h("svg.bar", { height: 14, role: "img", "aria-label": label }, drawn),
    h(
      "ul.legend",
      pieces.map((one) =>
        h("li", h("span.nowrap", h(`span.swatch.${one.kind}`, { "aria-hidden": "true" }), one.words)),
      ),
    ),
  ];
}

/** A curve the size of a word. */
export function spark(values, label) {
  const known = values.filter((one) => one !== null);
  if (known.length < 2) return h("span.missing", { title: "fewer than two points" }, "–");
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const place = (value) => (high > low ? 19 - (18 * (value - low)) / (high - low) : 10);
  const points = values.flatMap((value, at) =>
    value === null ? [] : [`${((100 * at) / (values.length - 1)).toFixed(1)},${place(value).toFixed(1)}`],
  );
  return h(
    "svg.spark",
    { viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("title", {}, label),
    h("polyline", { points: points.join(" ") }),
  );
}

/** How far, in words and as a bar. */
export function progress(step, total) {
  if (!step || step.value === null) return figure(step);
  const words = total?.value ? `${figureText(step)} / ${figureText(total)}` : figureText(step);
  if (!total?.value) return h("span", words);
  return h(
    "span.progress",
    h("span", words),
    h("progress", { max: total.value, value: step.value, "aria-label": `step ${words}` }),
  );
}

const figureText = (one) => one.value.toLocaleString("en-US");
