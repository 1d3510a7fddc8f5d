// Run: loss, step time, MFU, goodput and memory on one axis, with what happened marked on it.

import { Chart } from "../chart.js";
import { ask, ofRun, runs } from "../data.js";
import { fill, h, seldom } from "../dom.js";
import { ago } from "../format.js";
import { Group } from "../group.js";
import { letter, MARKS } from "../marks.js";
import { cards, empty, failure, section } from "../parts.js";
import { chosenRun } from "../shell.js";
import { change, state } from "../state.js";
import { stateWord } from "./fleet.js";
import { eventSection, goodputSection, stragglerSection } from "./run_side.js";

const CHARTS = ["loss", "step_time_s", "mfu", "goodput", "memory_used"];
const TITLES = {
  loss: "Loss",
  step_time_s: "Step time",
  mfu: "MFU",
  goodput: "Goodput",
  memory_used: "HBM in use",
  tokens_per_s_per_chip: "Tokens/s/chip",
  input_stall_s: "Input stall",
};
const CARDS = [
  "step",
  "loss",
  "step_time",
  "predicted_step",
  "mfu",
  "tokens_per_s_per_chip",
  "goodput",
  "checkpoint",
];
const EVERY_MS = 2000;
export function runPage() {
  const head = h("div");
  const bar = h("div.controls");
  const plots = h("div.plots");
  const side = { goodput: h("div"), stragglers: h("div"), events: h("div"), log: h("div") };
  const said = h("div");
  const root = h(
    "div.page",
    head,
    said,
    bar,
    h("div.columns", plots, h("aside", side.goodput, side.stragglers, side.events, side.log)),
  );
  let group = null;
  let charts = new Map();
  let shownFor = "";
  let offered = [];
  let events = [];
  let asking = null;

  const settings = () => {
    const now = state();
    return {
      run: chosenRun(),
      by: now.by === "step" ? "step" : "time",
      from: now.from ? Number(now.from) : null,
      to: now.to ? Number(now.to) : null,
      charts: now.charts ? now.charts.split(",") : CHARTS,
    };
  };

  function onRange(range) {
    const [from, to] = range ?? ["", ""];
    const round = (value) => (value === "" ? "" : Number(value.toFixed(3)));
    change({ from: round(from), to: round(to) });
  }

  function drawHead() {
    const run = runs().get(chosenRun());
    if (!run) return;
    const chips = run.chips ? ` · ${run.chips} chip${run.chips === 1 ? "" : "s"}` : "";
    fill(
      head,
      h(
        "header.run-head",
        h("h1", run.name, h("span.rest", ` ${run.slice ?? run.device_kind ?? ""}${chips}`)),
        h(
          "p.lead",
          stateWord(run.state, run.state_in_words),
          " · seen ",
          ago(run.last_seen),
          run.saved_at ? [" · saved ", ago(run.saved_at)] : null,
          " · ",
          h("code.path", run.path),
        ),
      ),
      run.problem ? failure(new Error(run.problem)) : null,
      cards(CARDS.map((key) => run.figures[key])),
    );
  }

  function drawBar(now) {
    const others = offered.filter((name) => !now.charts.includes(name));
    fill(
      bar,
      h(
        "fieldset.switch",
        h("legend.unseen", "Along the axis"),
        ["time", "step"].map((by) =>
          h(
            "button",
            {
              type: "button",
              "aria-pressed": String(now.by === by),
              onclick: () => change({ by, from: "", to: "" }),
            },
            by,
          ),
        ),
      ),
      h(
        "button",
        {
          type: "button",
          disabled: now.from === null,
          title: "Show everything (0)",
          onclick: () => onRange(null),
        },
        "Whole run",
      ),
      others.length
        ? h(
            "label",
            h("span.unseen", "Add a chart"),
            h(
              "select",
              {
                "data-add": "",
                onchange: (event) => change({ charts: [...now.charts, event.target.value].join(",") }),
              },
              h("option", { value: "" }, "Add a chart …"),
              others.map((name) => h("option", { value: name }, name)),
            ),
          )
        : null,
      now.charts.join() === CHARTS.join()
        ? null
        : h("button", { type: "button", onclick: () => change({ charts: "" }) }, "Usual charts"),
      h(
        "span.marks",
        Object.keys(MARKS)
          .filter((name) => events.some((one) => one.event === name))
          .map((name) => h("span.nowrap", letter(name), ` ${name}`)),
      ),
      h("span.hint", "drag to zoom, double-click for everything"),
    );
  }

  function layOut(now) {
    const want = `${now.run} ${now.by} ${now.charts}`;
    if (want === shownFor) return;
    shownFor = want;
    group?.close();
    group = new Group({ onRange });
    charts = new Map(now.charts.map((name) => [name, null]));
    fill(plots);
  }

  function marksOf(now) {
    return events.flatMap((event) => {
      const x = now.by === "time" ? event.time : event.step;
      return x === null || !(event.event in MARKS)
        ? []
        : [
            {
              x,
              event: event.event,
              words: `${event.event}${event.step === null ? "" : ` at step ${event.step}`}${event.words ? `: ${event.words}` : ""}`,
            },
          ];
    });
  }

  async function drawCharts() {
    const now = settings();
    if (!now.run) return;
    layOut(now);
    asking?.abort();
    asking = new AbortController();
    const mine = asking;
    plots.setAttribute("aria-busy", "true");
    try {
      const points = Math.max(200, Math.min(1600, Math.round(plots.clientWidth || 800)));
      const [found, happened] = await Promise.all([
        ask(
          ofRun(now.run, "series"),
          { metrics: now.charts.join(","), by: now.by, points, start: now.from, end: now.to },
          mine,
        ),
        ask(ofRun(now.run, "events"), {}, mine),
      ]);
      events = happened.events;
      offered = found.metrics;
      drawBar(now);
      group.range = now.from === null ? null : [now.from, now.to];
      for (const one of found.series) {
        if (!charts.get(one.metric)) {
          const chart = new Chart(group, {
            name: one.metric,
            unit: one.unit,
            meaning: one.meaning,
            title: TITLES[one.metric] ?? one.metric,
            canLog: one.metric.includes("loss"),
            file: () => now.run,
          });
          charts.set(one.metric, chart);
          plots.append(chart.root);
        }
        charts.get(one.metric).show({ lines: [one], marks: marksOf(now), by: now.by });
      }
      for (const chart of group.charts) chart.setRange();
      fill(said);
      document.documentElement.dataset.drawn = now.run;
      if (!performance.getEntriesByName("drawn").length) performance.mark("drawn");
      fill(side.events, eventSection(happened));
    } catch (error) {
      if (error.name !== "AbortError") fill(said, failure(error));
    } finally {
      if (asking === mine) plots.removeAttribute("aria-busy");
    }
  }

  async function drawSide() {
    const run = chosenRun();
    if (!run) return;
    try {
      const goodput = await ask(ofRun(run, "goodput"));
      fill(side.goodput, goodputSection(run, goodput));
    } catch (error) {
      fill(side.goodput, failure(error));
    }
    try {
      fill(side.stragglers, stragglerSection(run, await ask(ofRun(run, "stragglers"))));
      const { lines } = await ask(ofRun(run, "log"));
      fill(
        side.log,
        lines.length ? section("train.log", h("pre.log", { tabindex: "0" }, lines.join("\n"))) : null,
      );
    } catch (error) {
      fill(side.stragglers, failure(error));
    }
  }

  function drawAll() {
    if (!chosenRun()) {
      fill(
        head,
        empty(
          "No run to show",
          "Loss, step time, MFU, goodput and memory of a run stand here on one axis, and move while it trains.",
          "tpukit train tiny --data text.jsonl --tokenizer bytes --steps 200 --run-dir runs/first",
        ),
      );
      root.classList.add("has-none");
      return;
    }
    root.classList.remove("has-none");
    drawHead();
    drawCharts();
    drawSide();
  }

  const again = seldom(EVERY_MS, () => {
    if (!document.hidden) {
      drawCharts();
      drawSide();
    }
  });
  return {
    root,
    show: drawAll,
    hear: (names, isOtherList) => {
      if (isOtherList && !shownFor) return drawAll();
      if (names.has(chosenRun())) {
        drawHead();
        again();
      }
    },
    close: () => {
      asking?.abort();
      group?.close();
    },
  };
}
