// The drawing of a torus or mesh: a plane of chips for each z, links between neighbours, hosts framed.

import { color, h } from "../dom.js";
import { quantity } from "../format.js";

const GAP = 0.3; // of a cell, between two of them
const EDGE = 0.8; // of a cell, around a plane: room for the links that close a ring
const [SMALLEST, READABLE, LARGEST] = [9, 26, 52]; // pixels of a cell
const BETWEEN = 20; // pixels between planes
const FAR = 6; // times the usual distance from the median: worth a frame

/** How large a chip is drawn: as large as the page has room for, and no larger than it reads well. */
export function cellSize({ shape, slices }, width) {
  const [columns, rows, planes = 1] = shape;
  const all = planes * slices;
  const cells = (count) => count * (1 + GAP) - GAP + 2 * EDGE;
  const ways = Array.from({ length: all }, (_, at) => {
    const across = at + 1;
    const size = Math.min(LARGEST, Math.floor((width - BETWEEN * at) / across / cells(columns)));
    return { size, height: Math.ceil(all / across) * (cells(rows) * size + BETWEEN) };
  });
  // All planes on a screen with their numbers where that can be; else as many as can be told apart.
  const readable = ways.filter((one) => one.size >= READABLE && one.height < 1400);
  const possible = readable.length ? readable : ways.filter((one) => one.size >= SMALLEST);
  return possible.reduce(
    (best, one) => (one.height < best.height ? one : best),
    possible[0] ?? { size: SMALLEST, height: Infinity },
  ).size;
}

/** A color for a share of the way from the lowest to the highest value. */
export function shade(share) {
  const dark =
    getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (getComputedStyle(document.documentElement).colorScheme !== "light" &&
      matchMedia("(prefers-color-scheme: dark)").matches);
  const [from, to] = dark
    ? [
        [30, 41, 59],
        [132, 184, 255],
      ]
    : [
        [226, 236, 250],
        [18, 71, 156],
      ];
  return `rgb(${from.map((low, at) => Math.round(low + (to[at] - low) * share)).join(" ")})`;
}

const isStrong = (share) => share > 0.5;

/** Planes of chips, each with where it is on its plane. */
function planesOf({ chips, layout }) {
  const planes = new Map();
  for (const chip of chips) {
    const z = chip.coordinates[2] ?? 0;
    const key = `${chip.slice_index} ${z}`;
    if (!planes.has(key)) planes.set(key, { slice: chip.slice_index, z, chips: [] });
    planes.get(key).chips.push(chip);
  }
  return [...planes.values()].map((plane) => ({ ...plane, title: titleOf(plane, layout) }));
}

function titleOf({ slice, z }, { shape, slices }) {
  return [slices > 1 ? `slice ${slice}` : "", shape.length > 2 ? `z = ${z}` : ""].filter(Boolean).join(", ");
}

/** Chips that are much farther from the median than most. */
function farFrom({ chips }, { middle }) {
  const away = chips
    .filter((one) => one.value !== null)
    .map((one) => Math.abs(one.value - middle))
    .sort((a, b) => a - b);
  const usual = away[away.length >> 1] ?? 0;
  const least = Math.max(usual * FAR, Math.abs(middle) * 0.05);
  return (chip) => chip.value !== null && Math.abs(chip.value - middle) > least;
}

const shareOf = (value, { low, high }) => (high > low ? (value - low) / (high - low) : 0.5);
const at = (coordinate, size) => (EDGE + coordinate * (1 + GAP)) * size;

/** Links of a plane as lines `[x1, y1, x2, y2]`; one that closes a ring is a stub at both ends. */
function linksOf(layout, size) {
  const [columns, rows] = layout.shape;
  const [ringX, ringY] = layout.wraps;
  if (layout.kind === "rows") return [];
  const middle = size / 2;
  const stub = size * 0.55;
  const lines = [];
  for (let y = 0; y < rows; y += 1) {
    for (let x = 0; x < columns; x += 1) {
      const [left, top] = [at(x, size), at(y, size)];
      if (x + 1 < columns) lines.push([left + size, top + middle, at(x + 1, size), top + middle]);
      if (y + 1 < rows) lines.push([left + middle, top + size, left + middle, at(y + 1, size)]);
    }
    if (ringX && columns > 1)
      lines.push(
        [at(0, size) - stub, at(y, size) + middle, at(0, size), at(y, size) + middle],
        [
          at(columns - 1, size) + size,
          at(y, size) + middle,
          at(columns - 1, size) + size + stub,
          at(y, size) + middle,
        ],
      );
  }
  for (let x = 0; ringY && rows > 1 && x < columns; x += 1) {
    lines.push(
      [at(x, size) + middle, at(0, size) - stub, at(x, size) + middle, at(0, size)],
      [
        at(x, size) + middle,
        at(rows - 1, size) + size,
        at(x, size) + middle,
        at(rows - 1, size) + size + stub,
      ],
    );
  }
  return lines;
}

/** Frames around the chips of each host: `[process, x, y, width, height]`. */
function hostsOf({ chips }, size) {
  const hosts = new Map();
  for (const chip of chips) {
    const [x, y] = chip.coordinates;
    const box = hosts.get(chip.process) ?? [x, y, x, y];
    hosts.set(chip.process, [
      Math.min(box[0], x),
      Math.min(box[1], y),
      Math.max(box[2], x),
      Math.max(box[3], y),
    ]);
  }
  const air = size * GAP * 0.32;
  return [...hosts].map(([process, [left, top, right, bottom]]) => [
    process,
    at(left, size) - air,
    at(top, size) - air,
    at(right, size) + size - at(left, size) + 2 * air,
    at(bottom, size) + size - at(top, size) + 2 * air,
  ]);
}

const extentOf = ({ shape }, size) =>
  shape.slice(0, 2).map((count) => (count * (1 + GAP) - GAP + 2 * EDGE) * size);

const words = (chip, unit) =>
  `process ${chip.process}, chip ${chip.chip}${chip.host ? ` on ${chip.host}` : ""} at (${chip.coordinates.join(", ")}): ${chip.value === null ? `no value, ${chip.reason}` : quantity(chip.value, unit)}`;

/** The numbers that fit into a cell: percent without its sign, or three figures. */
function inCell(value, unit) {
  if (value === null) return "–";
  if (unit === "share") return String(Math.round(value * 100));
  if (unit === "B") return (value / 2 ** 30).toPrecision(3);
  return String(Number(value.toPrecision(3)));
}

/** The whole drawing; arrow keys go from chip to chip, Enter and a click choose one. `focused` is where they stand. */
export function drawTorus(found, scale, { size, chosen, focused, onChoose }) {
  const isFar = farFrom(found, scale);
  const cells = new Map();
  const [width, height] = extentOf(found.layout, size);
  const planes = planesOf(found);
  const ids = found.chips.map((one) => `${one.process}:${one.chip}`);
  const first = [focused, chosen].find((id) => ids.includes(id)) ?? ids[0];
  const drawn = planes.map((plane, number) =>
    h(
      "figure.plane",
      h(
        "svg",
        {
          width,
          height,
          viewBox: `0 0 ${width} ${height}`,
          role: "group",
          "aria-label": plane.title || found.layout.words,
        },
        number === 0
          ? h(
              "defs",
              h(
                "pattern",
                {
                  id: "none",
                  width: 6,
                  height: 6,
                  patternUnits: "userSpaceOnUse",
                  patternTransform: "rotate(45)",
                },
                h("line.hatch", { x1: 0, y1: 0, x2: 0, y2: 6 }),
              ),
            )
          : null,
        h(
          "g.links",
          linksOf(found.layout, size).map(([x1, y1, x2, y2]) => h("line", { x1, y1, x2, y2 })),
        ),
        h(
          "g.hosts",
          hostsOf(plane, size).map(([process, x, y, w, h_]) =>
            h("rect", { x, y, width: w, height: h_, rx: 4 }, h("title", {}, `process ${process}`)),
          ),
        ),
        plane.chips.map((chip) => {
          const id = `${chip.process}:${chip.chip}`;
          const share = chip.value === null ? 0 : shareOf(chip.value, scale);
          const [x, y] = chip.coordinates.map((one) => at(one, size));
          const cell = h(
            "g",
            {
              class: `chip${isFar(chip) ? " is-far" : ""}${id === chosen ? " is-chosen" : ""}`,
              tabindex: id === first ? "0" : "-1",
              role: "button",
              "data-chip": id,
              "aria-label": words(chip, scale.unit),
              "aria-pressed": String(id === chosen),
              onclick: () => onChoose(id === chosen ? "" : id),
            },
            h("title", {}, words(chip, scale.unit)),
            h("rect", {
              x,
              y,
              width: size,
              height: size,
              rx: Math.min(6, size / 6),
              fill: chip.value === null ? "url(#none)" : shade(share),
            }),
            size >= READABLE
              ? h(
                  "text",
                  {
                    x: x + size / 2,
                    y: y + size / 2,
                    class: chip.value !== null && isStrong(share) ? "on-strong" : "",
                  },
                  inCell(chip.value, scale.unit),
                )
              : null,
          );
          cells.set([chip.slice_index, ...chip.coordinates].join(), cell);
          return cell;
        }),
      ),
      plane.title ? h("figcaption", plane.title) : null,
    ),
  );
  const root = h("div.planes", { onkeydown: (event) => onKey(event, found, cells, onChoose, chosen) }, drawn);
  return root;
}

function onKey(event, found, cells, onChoose, chosen) {
  const id = event.target.dataset?.chip;
  if (!id || event.ctrlKey || event.metaKey || event.altKey) return;
  const chip = found.chips.find((one) => `${one.process}:${one.chip}` === id);
  const moves = {
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    ArrowUp: [1, -1],
    ArrowDown: [1, 1],
    PageUp: [2, -1],
    PageDown: [2, 1],
  };
  if (event.key === "Enter" || event.key === " ") onChoose(id === chosen ? "" : id);
  else if (event.key in moves) {
    const [axis, step] = moves[event.key];
    const length = found.layout.shape[axis];
    if (!length) return;
    const next = [...chip.coordinates];
    const moved = next[axis] + step;
    // Around a ring as the links go; at an end that is not closed the cursor stays.
    next[axis] = found.layout.wraps[axis]
      ? (moved + length) % length
      : Math.max(0, Math.min(length - 1, moved));
    const cell = cells.get([chip.slice_index, ...next].join());
    if (!cell) return;
    event.target.setAttribute("tabindex", "-1");
    cell.setAttribute("tabindex", "0");
    cell.focus();
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

/** The same on a canvas, for a file. */
export function drawPicture(found, scale) {
  const size = cellSize(found.layout, 1100);
  const ratio = devicePixelRatio || 1;
  const [width, height] = extentOf(found.layout, size);
  const planes = planesOf(found);
  const across = Math.max(1, Math.min(planes.length, Math.floor(1100 / width)));
  const canvas = h("canvas", {
    width: Math.ceil(across * width * ratio),
    height: Math.ceil(Math.ceil(planes.length / across) * (height + 18) * ratio),
  });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  const [line, soft, ink] = ["line", "soft", "ink"].map(color);
  planes.forEach((plane, number) => {
    pen.save();
    pen.translate((number % across) * width, Math.floor(number / across) * (height + 18));
    pen.strokeStyle = line;
    for (const [x1, y1, x2, y2] of linksOf(found.layout, size)) {
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
      pen.stroke();
    }
    for (const chip of plane.chips) {
      const share = chip.value === null ? 0 : shareOf(chip.value, scale);
      const [x, y] = chip.coordinates.map((one) => at(one, size));
      pen.fillStyle = chip.value === null ? line : shade(share);
      pen.fillRect(x, y, size, size);
      if (size < READABLE) continue;
      pen.fillStyle = isStrong(share) ? color("card") : ink;
      pen.font = `600 ${Math.max(9, size * 0.3)}px system-ui, sans-serif`;
      pen.fillText(inCell(chip.value, scale.unit), x + size / 2, y + size / 2);
    }
    pen.fillStyle = soft;
    pen.font = "11px system-ui, sans-serif";
    pen.fillText(plane.title, width / 2, height + 6);
    pen.restore();
  });
  return canvas;
}
