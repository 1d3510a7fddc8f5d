// What a chart shows, as a file: the same numbers as CSV or JSON, the same picture as PNG.

import { color, h } from "./dom.js";

function save(name, content) {
  const at = URL.createObjectURL(content);
  const link = h("a", { href: at, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(at), 10_000);
}

const safe = (text) => text.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|-+$/g, "") || "chart";

function cell(value) {
  if (value === null || value === undefined) return "";
  const text = String(value);
  // A name that begins like a formula would be one in a spreadsheet.
  const inert = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
}

/** Rows of `{columns, rows}` as CSV. */
export function csv({ columns, rows }) {
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/**
 * Buttons that save what is shown.
 * `name` is the file's; `table()` gives `{columns, rows}`, `data()` everything, `picture()` a canvas.
 */
export function exports({ name, table, data, picture }) {
  const button = (kind, act) =>
    h(
      "button",
      { type: "button", title: `Save as ${kind}`, "aria-label": `Save ${name()} as ${kind}`, onclick: act },
      kind,
    );
  const file = (kind) => `${safe(name())}.${kind}`;
  return h(
    "span.exports",
    button("CSV", () => save(file("csv"), new Blob([csv(table())], { type: "text/csv" }))),
    picture && button("PNG", () => picture().toBlob((made) => save(file("png"), made), "image/png")),
    button("JSON", () =>
      save(file("json"), new Blob([JSON.stringify(data(), null, 2)], { type: "application/json" })),
    ),
  );
}

/** A canvas with a title above a drawing, on the page's own ground. */
export function titled(drawing, title, below = "") {
  const scale = devicePixelRatio || 1;
  const made = h("canvas", { width: drawing.width, height: drawing.height + 44 * scale });
  const pen = made.getContext("2d");
  pen.fillStyle = color("card");
  pen.fillRect(0, 0, made.width, made.height);
  pen.fillStyle = color("ink");
  pen.font = `600 ${13 * scale}px system-ui, sans-serif`;
  pen.fillText(title, 12 * scale, 20 * scale);
  pen.fillStyle = color("soft");
  pen.font = `${11 * scale}px system-ui, sans-serif`;
  pen.fillText(below, 12 * scale, 36 * scale);
  pen.drawImage(drawing, 0, 44 * scale);
  return made;
}
