// Numbers along the axes of a chart.

import { clock, quantity } from "./format.js";

/** Distances between ticks that are round in KiB, MiB and GiB. */
export const WHOLE_BYTES = Array.from({ length: 50 }, (_, at) => 2 ** at);

/** A range with air around it, which a flat line has too. */
export function span(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const air = (high - low) * 0.08;
  return [low >= 0 && low < air * 4 ? 0 : low - air, high + air];
}

/** A number on an axis: its unit stands in the title where it is a word. */
export const tick = (value, unit) => quantity(value, ["share", "s", "B", "USD"].includes(unit) ? unit : "");

/** A time on an axis, as fine as its ticks are apart. */
export function hour(unix, apart) {
  const text = clock(unix);
  if (apart < 1) return `${text.slice(14)}.${String(Math.round((unix % 1) * 1000)).padStart(3, "0")}`;
  return apart >= 86_400 ? text.slice(5, 10) : apart >= 60 ? text.slice(11, 16) : text.slice(11);
}

/** A step on an axis. */
export const short = (value) =>
  Math.abs(value) >= 10_000 ? `${Number((value / 1000).toFixed(2))} k` : value.toLocaleString("en-US");
