// Fleet: pods, what they cost, and every run with how it is doing.

import { ask, isLive, ofRun, runs } from "../data.js";
import { fill, h, seldom } from "../dom.js";
import { exports } from "../export.js";
import { ago, figure, quantity } from "../format.js";
import { cards, empty, failure, progress, section, spark, table } from "../parts.js";
import { address } from "../state.js";

const SPARKS = 24;
const CURVES_MS = 20_000; // how old they may be
const STATES = {
  running: "●",
  ended: "■",
  silent: "▲",
  ready: "●",
  wanted: "○",
  creating: "○",
  deleting: "✕",
};

export const stateWord = (state, words = state) =>
  h(
    "span",
    { class: `nowrap state is-${state}` },
    h("span", { "aria-hidden": "true" }, `${STATES[state] ?? "○"} `),
    words,
  );

export function fleetPage() {
  const top = h("div");
  const list = h("div");
  const pods = h("div");
  const root = h("div.page", top, list, pods);
  const curves = new Map();
  let fleet = null;

  function draw() {
    const found = [...runs().values()];
    const isKnown = found.length > 0 || isLive() === "live";
    const running = found.filter((run) => run.state === "running").length;
    const silent = found.filter((run) => run.state === "silent").length;
    const costs = fleet?.costs;
    fill(
      top,
      cards([
        {
          key: "running",
          title: "Runs",
          value: isKnown ? running : null,
          reason: "the server has not said yet",
          unit: "running",
          origin: "measured",
          below: isKnown ? `${found.length} found${silent ? `, ${silent} silent` : ""}` : "",
        },
        podFigure(fleet),
        hourFigure(fleet),
        costFigure(costs),
      ]),
    );
    if (!isKnown) return;
    fill(
      list,
      found.length
        ? section("Runs", exportRuns(found), runTable(found))
        : empty(
            "No runs yet",
            "A run appears here as soon as `tpukit train` makes its folder, and moves while it is written. Start one on this machine, with no TPU:",
            "tpukit train tiny --data text.jsonl --tokenizer bytes --steps 200 --run-dir runs/first",
          ),
    );
  }

  function runTable(found) {
    return table(
      "Runs",
      [
        ["run"],
        ["state"],
        ["step"],
        ["loss"],
        ["", "curve"],
        ["step time", "number"],
        ["MFU", "number"],
        ["goodput", "number"],
        ["where"],
        ["seen"],
      ],
      found.map((run, at) => {
        const { figures } = run;
        if (at < SPARKS && !curves.has(run.name)) curve(run.name);
        return [
          h("a", { href: address({ page: "run", run: run.name }) }, run.name),
          h(
            "span",
            { title: run.state_in_words },
            stateWord(run.state, run.state === "silent" ? "silent" : run.state_in_words),
          ),
          progress(figures.step, figures.total_steps),
          figure(figures.loss),
          curves.get(run.name) ?? "",
          figure(figures.step_time),
          figure(figures.mfu),
          figure(figures.goodput),
          run.slice ?? run.device_kind ?? "–",
          ago(run.last_seen),
        ];
      }),
    );
  }

  async function curve(name) {
    curves.set(name, h("span"));
    try {
      const { y } = await ask(ofRun(name, "curve"), { metric: "loss" });
      fill(curves.get(name), spark(y, `loss of ${name}, sampled`));
    } catch {
      curves.delete(name); // shown again with the next change
    }
  }

  async function askFleet() {
    try {
      fleet = await ask("fleet");
      fill(
        pods,
        fleet.problems.map((one) => failure(new Error(one))),
        podSection(fleet),
        costSection(fleet.costs),
      );
      draw();
    } catch (error) {
      fill(pods, failure(error));
    }
  }

  const timer = setInterval(askFleet, 10_000);
  const redraw = seldom(1000, draw, -Infinity); // the first news at once
  let curvesFrom = performance.now();
  return {
    root,
    show: () => {
      draw();
      askFleet();
    },
    hear: (names, isOtherList) => {
      if (!names.size && !isOtherList) return;
      if (performance.now() - curvesFrom > CURVES_MS) {
        curves.clear();
        curvesFrom = performance.now();
      }
      redraw();
    },
    close: () => clearInterval(timer),
  };
}

function exportRuns(found) {
  const keys = [
    "step",
    "total_steps",
    "loss",
    "step_time",
    "step_time_p99",
    "predicted_step",
    "mfu",
    "tokens_per_s_per_chip",
    "goodput",
  ];
  return h(
    "div.section-actions",
    exports({
      name: () => "runs",
      table: () => ({
        columns: ["run", "state", "slice", ...keys],
        rows: found.map((run) => [
          run.name,
          run.state,
          run.slice,
          ...keys.map((key) => run.figures[key].value),
        ]),
      }),
      data: () => found,
    }),
  );
}

function podFigure(fleet) {
  const pods = fleet?.pods ?? [];
  const ready = pods.filter((pod) => pod.state === "ready").length;
  return {
    key: "pods",
    title: "Pods",
    value: fleet ? ready : null,
    unit: "ready",
    origin: "measured",
    below: `${pods.length} wanted`,
    reason: "not asked yet",
  };
}

function hourFigure(fleet) {
  const prices = (fleet?.pods ?? []).map((pod) => pod.usd_per_hour);
  const unknown = prices.filter((price) => price === null).length;
  return {
    key: "hourly",
    title: "Price now",
    unit: "USD/h",
    origin: "third-party",
    value: prices.length && unknown < prices.length ? prices.reduce((sum, one) => sum + (one ?? 0), 0) : null,
    below: unknown ? `${unknown} without a price` : "of all pods",
    reason: prices.length ? "no price is known for these pods" : "there are no pods",
  };
}

function costFigure(costs) {
  const known = (costs?.runs ?? []).map((run) => run.total.value).filter((value) => value !== null);
  return {
    key: "cost",
    title: "Spent so far",
    unit: "USD",
    origin: "third-party",
    below: costs?.summary ?? "",
    value: known.length ? known.reduce((sum, one) => sum + one, 0) : null,
    reason: "no pod of this store was ever ready, or none has a price",
  };
}

function podSection(fleet) {
  if (!fleet.pods.length) {
    return empty(
      "No pods",
      "Pods that are wanted from a provider stand here with state, zone and price. Rehearse on this machine, or get a real one:",
      "tpukit launch job.yaml --provider local",
      "tpukit pods up my-pod --on v6e-8",
    );
  }
  return section(
    "Pods",
    table(
      "Pods",
      [
        ["pod"],
        ["slice"],
        ["tier"],
        ["state"],
        ["provider"],
        ["zone"],
        ["attempt", "number"],
        ["age", "number"],
        ["price", "number"],
        ["step", "number"],
      ],
      fleet.pods.map((pod) => [
        h("span", { title: pod.pod_name }, pod.name),
        pod.asked_for,
        pod.tier,
        stateWord(pod.state, pod.supervised === false ? `${pod.state} (unsupervised)` : pod.state),
        pod.provider,
        pod.zone ?? "–",
        String(pod.attempt),
        quantity(pod.age_s, "s"),
        figure({
          value: pod.usd_per_hour,
          unit: "USD/h",
          origin: "third-party",
          reason: "no price is known",
        }),
        figure({ value: pod.steps, origin: "measured", reason: "no attempt has reported a step" }),
      ]),
    ),
  );
}

function costSection(costs) {
  if (!costs?.runs.length) return null;
  return section(
    "Spent",
    table(
      "Spent by run",
      [["run"], ["pods"], ["pod-hours", "number"], ["cost", "number"]],
      costs.runs.map((run) => [
        run.run + (run.running ? " (running)" : ""),
        [...new Set(run.pods.map((pod) => `${pod.slice} ${pod.tier}`))].join(", "),
        run.hours.toFixed(2),
        figure({ unit: "USD", ...run.total }),
      ]),
    ),
  );
}
