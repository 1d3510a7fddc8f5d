// What happened to a run, marked on its charts.

import { color, h } from "./dom.js";

/** What an event is drawn as: the letter says it, the color only helps. */
export const MARKS = {
  preempted: { letter: "P", color: "bad" }, // the most telling first: where two meet, it has the place
  "rolled back": { letter: "B", color: "bad" },
  recompiled: { letter: "R", color: "unsure" },
  "attempt started": { letter: "A", color: "accent" },
  "attempt ended": { letter: "E", color: "soft" },
  saved: { letter: "S", color: "good" },
  note: { letter: "N", color: "soft" },
};

/** The letter of an event, as a list shows it. */
export function letter(event) {
  const kind = MARKS[event] ?? MARKS.note;
  return h("b", { class: `mark-letter as-${kind.color}` }, kind.letter);
}

/** Draw marks over a plot. */
export function drawMarks(plot, marks) {
  const pen = plot.ctx;
  const scale = devicePixelRatio || 1;
  const { left, top, width, height } = plot.bbox;
  pen.save();
  pen.font = `600 ${9 * scale}px system-ui, sans-serif`;
  pen.textAlign = "center";
  const taken = [];
  const order = Object.keys(MARKS);
  for (const mark of [...marks].sort((one, other) => order.indexOf(one.event) - order.indexOf(other.event))) {
    const x = plot.valToPos(mark.x, "x", true);
    if (x < left || x > left + width) continue;
    const kind = MARKS[mark.event];
    pen.strokeStyle = pen.fillStyle = color(kind.color);
    pen.setLineDash([3 * scale, 3 * scale]);
    pen.globalAlpha = mark.event === "saved" ? 0.35 : 0.8;
    pen.beginPath();
    pen.moveTo(x, top + 11 * scale);
    pen.lineTo(x, top + height);
    pen.stroke();
    pen.globalAlpha = 1;
    if (taken.some((one) => Math.abs(one - x) < 10 * scale)) continue; // two letters would be none
    taken.push(x);
    pen.fillText(kind.letter, x, top + 8 * scale);
  }
  pen.restore();
}
