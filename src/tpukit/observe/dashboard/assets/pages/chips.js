// Chips: the torus of the slice, colored by a metric; a chip's own history when it is chosen.

import { Chart } from "../chart.js";
import { ask, ofRun } from "../data.js";
import { fill, h, seldom } from "../dom.js";
import { exports, titled } from "../export.js";
import { ago, origin, quantity } from "../format.js";
import { Group } from "../group.js";
import { empty, failure, section, table } from "../parts.js";
import { chosenRun } from "../shell.js";
import { change, state } from "../state.js";
import { cellSize, drawPicture, drawTorus, shade } from "./torus.js";

const EVERY_MS = 2000;
const LISTED = 12;

export const idOf = (chip) => `${chip.process}:${chip.chip}`;

export function chipsPage() {
  const head = h("div");
  const map = h("div");
  const history = h("div");
  const list = h("div");
  const root = h("div.page", head, h("div.map-and-list", map, h("div", history, list)));
  let group = null;
  let chart = null;
  let shownChip = "";
  let found = null;

  async function drawMap() {
    const run = chosenRun();
    if (!run) {
      fill(
        head,
        empty(
          "No run to show",
          "The chips of a run are drawn here as the torus or mesh that they are.",
          "tpukit train job.yaml --run-dir runs/first",
        ),
      );
      return;
    }
    const { metric } = state();
    try {
      found = await ask(ofRun(run, "chips"), { metric });
    } catch (error) {
      fill(head, failure(error));
      return;
    }
    const known = found.chips
      .filter((one) => one.value !== null)
      .map((one) => one.value)
      .sort((a, b) => a - b);
    drawHead(run, known);
    if (!found.chips.length) {
      fill(
        map,
        empty(
          "No chips are known",
          "The slice of a run is in its events, and what its chips do in the readings of a monitor on each host. Both are written by the run itself:",
          "tpukit train job.yaml --run-dir runs/first",
        ),
      );
      return;
    }
    const scale = {
      low: known[0] ?? 0,
      high: known.at(-1) ?? 1,
      middle: known[known.length >> 1] ?? 0,
      unit: found.unit,
    };
    // New readings draw everything anew, and whoever walks the torus by keyboard stays where they are.
    const focused = map.contains(document.activeElement) ? document.activeElement.dataset.chip : undefined;
    fill(
      map,
      section(
        `${found.layout.words}`,
        h(
          "div.section-actions",
          exports({
            name: () => `${run}-chips-${found.metric}`,
            table: () => asTable(found),
            data: () => found,
            picture: () =>
              titled(drawPicture(found, scale), `${run}: ${found.metric}`, `${found.layout.words}, measured`),
          }),
        ),
        known.length ? legend(scale, known.length, found.chips.length) : null,
        h("p.hint", linkWords(found.layout)),
        drawTorus(found, scale, {
          size: cellSize(found.layout, root.clientWidth - 40),
          chosen: state().chip,
          focused,
          onChoose: (id) => change({ chip: id }),
        }),
      ),
    );
    if (focused) map.querySelector('.chip[tabindex="0"]').focus();
    drawList(known, scale);
    document.documentElement.dataset.drawn = run;
  }

  function drawHead(run, known) {
    const { metrics } = found;
    fill(
      head,
      h(
        "header.run-head",
        h("h1", "Chips", h("span.rest", ` of ${run}`)),
        h(
          "p.lead",
          found.newest
            ? ["read ", ago(found.newest), " ", origin("measured")]
            : "no monitor has written anything down yet",
        ),
      ),
      h(
        "div.controls",
        h(
          "label",
          h("span", "Metric "),
          h(
            "select",
            { id: "metric", onchange: (event) => change({ metric: event.target.value }) },
            (metrics.includes(found.metric) ? metrics : [found.metric, ...metrics]).map((name) =>
              h("option", { value: name, selected: name === found.metric }, name),
            ),
          ),
        ),
        h("span.hint", found.meaning),
      ),
      !known.length && found.chips.length
        ? h(
            "p.warning",
            `No value of ${found.metric}: ${found.chips[0].reason}. tpukit train keeps readings of each host in hosts/N/readings.jsonl of the run; another program does so with TPUMonitor(run_dir=…).`,
          )
        : null,
    );
  }

  function drawList(known, scale) {
    if (!known.length) {
      fill(list);
      return;
    }
    const away = (chip) => (chip.value === null ? Infinity : Math.abs(chip.value - scale.middle));
    const rows = [...found.chips].sort((one, other) => away(other) - away(one)).slice(0, LISTED);
    fill(
      list,
      section(
        "Farthest from the median",
        table(
          "Farthest from the median",
          [["chip"], ["host"], ["at"], [found.metric, "number"], ["median", "number"]],
          rows.map((chip) => [
            h(
              "button.link",
              { type: "button", onclick: () => change({ chip: idOf(chip) }) },
              `process ${chip.process}, chip ${chip.chip}`,
            ),
            chip.host || "–",
            `(${chip.coordinates.join(", ")})`,
            chip.value === null
              ? h("span.missing", { title: chip.reason }, `– ${chip.reason}`)
              : quantity(chip.value, found.unit),
            known.length ? quantity(scale.middle, found.unit) : "–",
          ]),
        ),
      ),
    );
  }

  async function drawHistory() {
    const { chip } = state();
    const run = chosenRun();
    if (!chip || !run || !found) {
      group?.close();
      group = chart = null;
      shownChip = "";
      fill(history);
      return;
    }
    const [process, index] = chip.split(":");
    const want = `${run} ${chip} ${found.metric}`;
    if (want !== shownChip) {
      group?.close();
      group = new Group({
        onRange: (range) => {
          group.range = range;
          chart.setRange();
        },
      });
      chart = new Chart(group, {
        name: found.metric,
        unit: found.unit,
        meaning: found.meaning,
        title: `${found.metric} of process ${process}, chip ${index}`,
        file: () => `${run}-process-${process}-chip-${index}`,
      });
      shownChip = want;
      fill(
        history,
        section(
          "History",
          h(
            "div.section-actions",
            h("button", { type: "button", onclick: () => change({ chip: "" }) }, "Close"),
          ),
          chart.root,
        ),
      );
    }
    try {
      const { series } = await ask(ofRun(run, "series"), {
        metrics: found.metric,
        by: "time",
        process,
        chip: index,
        points: 800,
      });
      if (shownChip === want) chart.show({ lines: series, marks: [], by: "time" });
    } catch (error) {
      fill(history, failure(error));
    }
  }

  const draw = async () => {
    await drawMap();
    await drawHistory();
  };
  const again = seldom(EVERY_MS, () => {
    if (!document.hidden && !map.contains(document.activeElement)) draw();
  });
  const redraw = () => draw();
  document.addEventListener("themechange", redraw);
  return {
    root,
    show: draw,
    hear: (names, isOtherList) => {
      if (isOtherList && !found) draw();
      else if (names.has(chosenRun())) again();
    },
    close: () => {
      group?.close();
      document.removeEventListener("themechange", redraw);
    },
  };
}

/** How the drawing is to be read. */
function linkWords({ kind, shape, wraps }) {
  if (kind === "rows") return "";
  const rings = ["x", "y", "z"].filter((_, at) => wraps[at]);
  const planes = shape.length > 2 ? "Planes are linked chip by chip along z. " : "";
  const closed = rings.length
    ? `Lines that leave a plane close ${rings.join(", ")} to rings. `
    : "No axis is closed to a ring. ";
  return `${planes}${closed}Dotted: the chips of one host.`;
}

function legend(scale, known, all) {
  const steps = Array.from({ length: 24 }, (_, at) =>
    h("rect", { x: `${(100 * at) / 24}%`, width: `${100 / 24 + 0.3}%`, height: 10, fill: shade(at / 23) }),
  );
  return [
    h(
      "div.ramp",
      h("span", quantity(scale.low, scale.unit)),
      h("svg", { height: 10, role: "img", "aria-label": "from the lowest to the highest value" }, steps),
      h("span", quantity(scale.high, scale.unit)),
    ),
    h(
      "p.hint",
      [
        `median ${quantity(scale.middle, scale.unit)}`,
        `${known} of ${all} chips have a value`,
        known < all ? "hatched: none" : "",
        "thick frame: far from the median",
      ]
        .filter(Boolean)
        .join(" · "),
    ),
  ];
}

function asTable({ chips, metric }) {
  return {
    columns: ["process", "chip", "host", "slice", "coordinates", metric],
    rows: chips.map((chip) => [
      chip.process,
      chip.chip,
      chip.host,
      chip.slice_index,
      chip.coordinates.join(" "),
      chip.value,
    ]),
  };
}
