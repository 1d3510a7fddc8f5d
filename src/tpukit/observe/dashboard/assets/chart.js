// One chart: lines over steps or time, event marks, zoom by mouse and keyboard, export.

import { hour, short, span, tick, WHOLE_BYTES } from "./axes.js";
import { color, fill, h, seldom } from "./dom.js";
import { exports, titled } from "./export.js";
import { clock, origin, quantity, why } from "./format.js";
import { drawMarks } from "./marks.js";

const HEIGHT = 168;
const LEFT = 66;
const LINES = ["matrix", "hbm", "kernel", "ici"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

export class Chart {
  /** `options`: title, unit, name (of the exported file), meaning. */
  constructor(group, options) {
    this.group = group;
    this.options = options;
    this.xs = [];
    this.lines = [];
    this.marks = [];
    this.by = "step";
    this.isLog = false;
    this.value = h("output.chart-value");
    this.tags = h("span.chart-tags");
    this.ground = h("div.chart-ground", {
      tabindex: "0",
      role: "application",
      onkeydown: (event) => this.onKey(event),
    });
    this.tip = h("div.chart-tip", { hidden: true });
    const isWord = options.unit && !["share", "s", "B"].includes(options.unit);
    this.root = h(
      "figure.chart-box",
      { "data-chart": options.name },
      h(
        "figcaption",
        h(
          "h3",
          { title: options.meaning },
          options.title,
          isWord && !options.title.includes("/") ? ` (${options.unit})` : "",
        ),
        this.tags,
        this.value,
        h(
          "span.chart-actions",
          options.canLog &&
            h(
              "button",
              {
                type: "button",
                "aria-pressed": "false",
                title: "Logarithmic scale",
                onclick: (event) => this.toggleLog(event.currentTarget),
              },
              "log",
            ),
          exports({
            name: () => `${options.file()}-${options.name}`,
            table: () => this.table(),
            data: () => this.data(),
            picture: () =>
              titled(
                this.plot.ctx.canvas,
                `${options.title} ${options.unit ? `(${options.unit})` : ""}`,
                this.label(),
              ),
          }),
        ),
      ),
      h("div.chart-hold", this.ground, this.tip),
    );
    this.watcher = new ResizeObserver(seldom(60, () => this.resize()));
    this.watcher.observe(this.ground);
    group.charts.add(this);
  }

  /** Show lines `[{label, x, y, origin, total, reason}]` and marks `[{x, event, words}]`. */
  show({ lines, marks, by }) {
    const isNew = !this.plot || lines.length !== this.lines.length || by !== this.by;
    Object.assign(this, { lines, marks, by });
    const tables = lines.map((line) => [line.x, line.y]);
    this.joined = tables.length === 1 ? tables[0] : uPlot.join(tables);
    this.xs = this.joined[0];
    const none = lines.every((line) => line.y.every((one) => one === null));
    fill(
      this.tags,
      none ? null : [...new Set(lines.map((line) => line.origin))].map(origin),
      lines.length > 1 ? lines.map(key) : null,
    );
    this.root.classList.toggle("is-empty", none);
    if (none) {
      this.close({ keep: true });
      fill(this.ground, h("p.absent", lines.map((line) => line.reason).find(Boolean) ?? "no points yet"));
      this.value.textContent = "–";
      return;
    }
    if (isNew || !this.plot) this.make();
    else this.plot.setData(this.joined, false);
    this.ground.setAttribute(
      "aria-label",
      `${this.options.title}: ${this.label()}. Arrow keys move the cursor, plus and minus zoom, 0 shows everything.`,
    );
    this.rest();
  }

  make() {
    this.close({ keep: true });
    fill(this.ground);
    const [ink, soft, line] = ["ink", "soft", "line"].map(color);
    const font = "11px system-ui, sans-serif";
    const axis = {
      stroke: soft,
      font,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1, size: 4 },
    };
    this.plot = new uPlot(
      {
        width: this.width(),
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 26, 0, 0],
        cursor: {
          sync: { key: this.group.key, scales: ["x", null] },
          points: { size: 6 },
          y: false,
          drag: { x: true, y: false, setScale: false, dist: 6 },
          bind: {
            dblclick: () => () => {
              this.group.onRange(null);
              return null;
            },
          },
        },
        scales: {
          x: { time: this.by === "time", range: () => this.group.shown() ?? [0, 1] },
          y: {
            distr: this.isLog ? 3 : 1,
            range: this.isLog ? undefined : (plot, low, high) => span(low, high),
          },
        },
        axes: [
          {
            ...axis,
            size: 26,
            space: 70,
            values: (plot, splits, at, space, apart) =>
              splits.map((one) => (one === null ? "" : this.by === "step" ? short(one) : hour(one, apart))),
          },
          {
            ...axis,
            size: LEFT,
            space: 28,
            ...(this.options.unit === "B" ? { incrs: WHOLE_BYTES } : {}),
            values: (plot, splits) => splits.map((one) => (one === null ? "" : tick(one, this.options.unit))),
          },
        ],
        series: [
          {},
          ...this.lines.map((one, at) => ({
            label: one.label,
            stroke: color(LINES[at % LINES.length]),
            width: 1.5,
            dash: DASHES[at % DASHES.length],
            points: { show: one.x.length < 40, size: 4 },
          })),
        ],
        hooks: {
          setCursor: [(plot) => this.onCursor(plot)],
          setSelect: [(plot) => this.onSelect(plot)],
          draw: [(plot) => drawMarks(plot, this.marks)],
        },
      },
      this.joined,
      this.ground,
    );
    this.plot.root.style.color = ink;
  }

  /** Draw anew: another theme, another range. */
  redraw() {
    if (this.plot) this.make();
  }

  /** The range of the group changed. */
  setRange() {
    const range = this.group.shown();
    if (this.plot && range) this.plot.setScale("x", { min: range[0], max: range[1] });
  }

  width() {
    return Math.max(240, this.ground.clientWidth);
  }

  resize() {
    if (this.plot && this.width() !== this.plot.width)
      this.plot.setSize({ width: this.width(), height: HEIGHT });
  }

  onSelect(plot) {
    if (plot.select.width < 6) return;
    const range = [
      plot.posToVal(plot.select.left, "x"),
      plot.posToVal(plot.select.left + plot.select.width, "x"),
    ];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.group.onRange(range);
  }

  onCursor(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) {
      this.tip.hidden = true;
      this.rest();
      return;
    }
    const values = this.lines.map(
      (line, index) => `${this.prefix(line)}${quantity(this.joined[index + 1][at], this.options.unit)}`,
    );
    this.value.textContent = `${this.place(this.xs[at])} · ${values.join(" · ")}`;
    this.onMark(plot);
  }

  /** Say what the mark under the cursor is. */
  onMark(plot) {
    const near = this.marks
      .map((mark) => [Math.abs(plot.valToPos(mark.x, "x") - plot.cursor.left), mark])
      .filter(([away]) => away < 6)
      .sort(([one], [other]) => one - other)
      .slice(0, 4);
    this.tip.hidden = !near.length || plot.cursor.left < 0;
    if (this.tip.hidden) return;
    fill(
      this.tip,
      near.map(([, mark]) => h("div", mark.words)),
    );
    this.tip.style.left = `${Math.min(plot.cursor.left + LEFT + 10, this.width() - 220)}px`;
  }

  /** Without a cursor: the newest value. */
  rest() {
    const last = this.lines.map((line) => {
      const at = line.y.findLastIndex((one) => one !== null);
      return `${this.prefix(line)}${at < 0 ? "–" : quantity(line.y[at], this.options.unit)}`;
    });
    this.value.textContent = last.join(" · ");
    this.value.title = this.lines
      .map(
        (line) =>
          `${line.label}: ${line.x.length.toLocaleString("en-US")} of ${line.total.toLocaleString("en-US")} points, least and greatest kept. ${why(line)}`,
      )
      .join("\n");
  }

  /** Of several lines each value stands with the letter of its own. */
  prefix(line) {
    return this.lines.length > 1 ? `${line.label.split(" ")[0]} ` : "";
  }

  place(x) {
    return this.by === "time" ? clock(x) : `step ${Math.round(x).toLocaleString("en-US")}`;
  }

  onKey(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
    if (event.key in moves) {
      const at = this.plot.cursor.idx ?? this.xs.length - 1;
      const next = Math.max(
        0,
        Math.min(this.xs.length - 1, at + moves[event.key] * (event.shiftKey ? 10 : 1)),
      );
      const value = this.joined[1][next] ?? this.plot.scales.y.min;
      this.plot.setCursor({
        left: this.plot.valToPos(this.xs[next], "x"),
        top: this.plot.valToPos(value, "y"),
      });
    } else if (event.key in zooms) {
      const [low, high] = this.group.shown();
      const idx = this.plot.cursor.idx;
      const middle = idx === null || idx === undefined ? (low + high) / 2 : this.xs[idx];
      const extent = this.group.extent();
      const half = ((high - low) / 2) * zooms[event.key];
      this.group.onRange([
        Math.max(extent[0], middle - half),
        Math.min(Math.max(extent[1], high), middle + half),
      ]);
    } else if (event.key === "0") this.group.onRange(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  toggleLog(button) {
    this.isLog = !this.isLog;
    button.setAttribute("aria-pressed", String(this.isLog));
    this.redraw();
  }

  label() {
    const [line] = this.lines;
    const range = this.xs.length ? ` from ${this.place(this.xs[0])} to ${this.place(this.xs.at(-1))}` : "";
    return `${this.lines.map((one) => one.label).join(" and ")}${range}, ${line.origin ?? ""}`;
  }

  /** What is drawn, and nothing else. */
  table() {
    const [low, high] = this.group.shown();
    const rows = this.xs.flatMap((x, at) =>
      x < low || x > high ? [] : [[x, ...this.lines.map((_, index) => this.joined[index + 1][at] ?? null)]],
    );
    return { columns: [this.by, ...this.lines.map((line) => line.label)], rows };
  }

  data() {
    const { columns, rows } = this.table();
    const about = this.lines.map(({ label, origin: from, total }) => ({
      label,
      origin: from,
      points_in_file: total,
    }));
    return {
      chart: this.options.name,
      unit: this.options.unit,
      by: this.by,
      lines: about,
      columns,
      rows,
      events: this.marks,
    };
  }

  close({ keep = false } = {}) {
    this.plot?.destroy();
    this.plot = null;
    if (!keep) {
      this.watcher.disconnect();
      this.group.charts.delete(this);
    }
  }
}

/** Which line is which: by its dashes as well as by its color. */
function key(line, at) {
  return h(
    "span.key",
    { title: line.label },
    h(
      "svg",
      { width: 22, height: 8, "aria-hidden": "true" },
      h("line", {
        x1: 0,
        x2: 22,
        y1: 4,
        y2: 4,
        class: `c-${LINES[at]}`,
        "stroke-dasharray": DASHES[at].join(" "),
      }),
    ),
    line.label.split(" ")[0],
  );
}
