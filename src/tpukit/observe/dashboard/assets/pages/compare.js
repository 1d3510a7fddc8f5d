// Compare: two runs, what was set differently first, then what came of it; predicted beside measured.

import { Chart } from "../chart.js";
import { ask, ofRun, runs } from "../data.js";
import { fill, h } from "../dom.js";
import { exports } from "../export.js";
import { figure } from "../format.js";
import { Group } from "../group.js";
import { empty, failure, section, table } from "../parts.js";
import { change, state } from "../state.js";

const CHARTS = ["loss", "step_time_s", "mfu", "tokens_per_s_per_chip"];
const TITLES = { loss: "Loss", step_time_s: "Step time", mfu: "MFU", tokens_per_s_per_chip: "Tokens/s/chip" };

export function comparePage() {
  const head = h("div");
  const results = h("div");
  const plots = h("div.plots.pairs");
  const root = h("div.page", head, results, plots);
  let group = null;
  let shownFor = "";

  const chosen = () => {
    const names = [...runs().keys()];
    const now = state();
    const a = now.a ?? now.run ?? names[0];
    return { a, b: now.b ?? names.find((name) => name !== a) };
  };

  function drawHead({ a, b }) {
    const pick = (key, value, label) =>
      h(
        "label",
        h("span", label),
        h(
          "select",
          { id: `pick-${key}`, onchange: (event) => change({ a, b, [key]: event.target.value }) },
          [...new Set([...runs().keys(), value])].map((name) =>
            h("option", { value: name, selected: name === value }, name),
          ),
        ),
      );
    fill(
      head,
      h("header.run-head", h("h1", "Compare")),
      h(
        "div.controls",
        pick("a", a, "A "),
        pick("b", b, "B "),
        h("button", { type: "button", onclick: () => change({ a: b, b: a }) }, "Swap"),
      ),
    );
  }

  async function draw() {
    const { a, b } = chosen();
    if (!a || !b) {
      fill(
        head,
        empty(
          "Two runs are needed",
          "The settings of two runs that differ stand here first, then their figures and curves, predicted beside measured. Train the same job again with one thing changed:",
          "tpukit train job.yaml --learning-rate 1e-4 --run-dir runs/second",
        ),
      );
      return;
    }
    drawHead({ a, b });
    try {
      const found = await ask("compare", { a, b });
      fill(results, settings(found, a, b), figures(found, a, b));
      await drawCharts(a, b);
      document.documentElement.dataset.drawn = `${a} ${b}`;
    } catch (error) {
      fill(results, failure(error));
    }
  }

  async function drawCharts(a, b) {
    const want = `${a} ${b}`;
    const asked = {
      metrics: CHARTS.join(","),
      by: "step",
      points: 800,
      start: state().from,
      end: state().to,
    };
    const [one, other] = await Promise.all([a, b].map((run) => ask(ofRun(run, "series"), asked)));
    if (want !== shownFor) {
      group?.close();
      group = new Group({
        onRange: (range) =>
          change({ a, b, from: range ? Math.floor(range[0]) : "", to: range ? Math.ceil(range[1]) : "" }),
      });
      fill(plots);
      shownFor = want;
      for (const line of one.series) {
        plots.append(
          new Chart(group, {
            name: line.metric,
            unit: line.unit,
            meaning: line.meaning,
            title: TITLES[line.metric],
            canLog: line.metric === "loss",
            file: () => `${a}-and-${b}`,
          }).root,
        );
      }
    }
    group.range = state().from ? [Number(state().from), Number(state().to)] : null;
    [...group.charts].forEach((chart, at) =>
      chart.show({
        lines: [
          { ...one.series[at], label: `A ${a}` },
          { ...other.series[at], label: `B ${b}` },
        ],
        marks: [],
        by: "step",
      }),
    );
    for (const chart of group.charts) chart.setRange();
  }

  return {
    root,
    show: draw,
    hear: (names, isOtherList) => {
      if (isOtherList) draw();
    },
    close: () => group?.close(),
  };
}

function settings({ settings: different, same }, a, b) {
  const rows = different.map((one) => [h("code", one.key), said(one.a), said(one.b)]);
  return section(
    "Set differently",
    h(
      "div.section-actions",
      exports({
        name: () => `${a}-and-${b}-settings`,
        table: () => ({ columns: ["setting", a, b], rows: different.map((one) => [one.key, one.a, one.b]) }),
        data: () => ({ a, b, different, same }),
      }),
    ),
    rows.length
      ? table("Settings that differ", [["setting"], [`A ${a}`], [`B ${b}`]], rows)
      : h("p.intro", "Both runs were set the same."),
    h(
      "details",
      h("summary", `${same.length} settings are the same`),
      table(
        "Settings that are the same",
        [["setting"], ["both"]],
        same.map((one) => [h("code", one.key), said(one.a)]),
      ),
    ),
  );
}

const said = (value) => (value === null ? h("span.missing", { title: "not set" }, "–") : h("code", value));

function figures({ figures: rows }, a, b) {
  return section(
    "What came of it",
    h(
      "div.section-actions",
      exports({
        name: () => `${a}-and-${b}`,
        table: () => ({
          columns: ["figure", a, b, "B ÷ A"],
          rows: rows.map((row) => [row.title, row.a.value, row.b.value, row.ratio]),
        }),
        data: () => rows,
      }),
    ),
    table(
      "Figures",
      [["figure"], [`A ${a}`, "number"], [`B ${b}`, "number"], ["B ÷ A", "number"], ["origin"]],
      rows.map((row) => [
        row.title,
        figure(row.a),
        figure(row.b),
        row.ratio === null
          ? h("span.missing", { title: "one of them is missing" }, "–")
          : `${row.ratio.toFixed(3)} ×`,
        row.a.origin ?? row.b.origin ?? "–",
      ]),
    ),
  );
}
