// Numbers as people read them, each with where it comes from; a missing one is a dash with a reason.

import { h } from "./dom.js";

export const ORIGINS = {
  measured: "measured: written down by the run or its hosts while it ran",
  compiler: "compiler: read from what the TPU compiler wrote for this very program",
  model: "model: predicted by tpukit's arithmetic on a step or a schedule",
  datasheet: "datasheet: published by the maker of the chip",
  "third-party": "third-party: from a public collection that others keep, such as a list of prices",
  user: "user: given by you",
};

const PREFIXES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];
const BYTES = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
  [1, "B"],
];

/** Three to four figures, never more than a cell can hold. */
export function plain(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size >= 1e15 || size < 1e-4) return value.toExponential(2);
  if (size >= 1e6) {
    const [factor, letter] = PREFIXES.find(([one]) => size >= one);
    return `${(value / factor).toPrecision(4)} ${letter}`;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(4)).toString();
}

export function seconds(value) {
  const size = Math.abs(value);
  if (size >= 172800) return `${(value / 86400).toFixed(1)} d`;
  if (size >= 7200) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 120) return `${(value / 60).toFixed(1)} min`;
  if (size >= 1 || value === 0) return `${Number(value.toPrecision(3))} s`;
  if (size >= 1e-3) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return `${Number((value * 1e6).toPrecision(3))} µs`;
}

function bytes(value) {
  const [factor, unit] = BYTES.find(([one]) => Math.abs(value) >= one) ?? [1, "B"];
  return `${Number((value / factor).toPrecision(4))} ${unit}`;
}

/** A number in its unit, as text. */
export function quantity(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${(value * 100).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)} %`;
  if (unit === "s") return seconds(value);
  if (unit === "B") return bytes(value);
  if (unit === "USD")
    return `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  if (unit === "USD/h") return `$${value.toFixed(2)}/h`;
  return unit ? `${plain(value)} ${unit}` : plain(value);
}

/** How a figure of the server reads, with its origin on hover, or a dash with the reason. */
export function figure(one) {
  if (!one || one.value === null || one.value === undefined) {
    const reason = one?.reason || "it was not recorded";
    return h("span.missing", { title: reason, tabindex: "0" }, "–", h("span.unseen", ` (${reason})`));
  }
  return h("span.figure", { title: why(one) }, quantity(one.value, one.unit));
}

export function why(one) {
  return [ORIGINS[one.origin] ?? one.origin, one.source, one.note, one.date].filter(Boolean).join(" · ");
}

/** The word for where a number comes from. */
export function origin(name) {
  return name ? h(`span.badge.from-${name}`, { title: ORIGINS[name] ?? name }, name) : null;
}

export function clock(unix) {
  const at = new Date(unix * 1000);
  const pad = (number) => String(number).padStart(2, "0");
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${day} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

/** How long ago, kept up to date by `keepAges`. */
export function ago(unix) {
  if (!unix) return h("span.missing", { title: "no time was written down" }, "–");
  return h("time", { "data-since": unix, title: clock(unix) }, ageText(unix));
}

const ageText = (unix) => `${seconds(Math.max(0, Math.round(Date.now() / 1000 - unix)))} ago`;

export function keepAges() {
  setInterval(() => {
    for (const one of document.querySelectorAll("time[data-since]")) {
      const text = ageText(Number(one.dataset.since));
      if (one.textContent !== text) one.textContent = text;
    }
  }, 1000);
}
