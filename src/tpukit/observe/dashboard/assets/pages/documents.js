// Plan and Compile: answers that were kept as JSON, each shown as the page it has everywhere else.

import { ask } from "../data.js";
import { fill, h } from "../dom.js";
import { exports } from "../export.js";
import { ago, figure } from "../format.js";
import { empty, failure, section, table } from "../parts.js";
import { address, state } from "../state.js";

const LOOKED_FOR_EVERY_MS = 10_000; // files that are new, while the page is open
const ABOUT = {
  plan: {
    title: "Plans",
    none: "No plan is kept here",
    words:
      "Which slice, mesh and batch train a model in time and money. A plan that is written to a JSON file in this folder appears here:",
    commands: ["tpukit plan llama3.1-8b --tokens 1e12 --json > plan.json"],
  },
  compile: {
    title: "Checks",
    none: "No check is kept here",
    words:
      "What the real TPU compiler says of a job with no TPU: memory by buffer, the predicted step, collectives. A check that is written to a JSON file in this folder appears here:",
    commands: ["tpukit check job.yaml --on v6e-8 --json > check.json"],
  },
};

export function documentsPage(kind) {
  const list = h("div");
  const page = h("div");
  const root = h("div.page", list, page);
  let files = [];
  let framed = "";

  async function draw() {
    try {
      ({ files } = await ask(kind));
    } catch (error) {
      fill(list, failure(error));
      return;
    }
    if (!files.length) {
      const { none, words, commands } = ABOUT[kind];
      fill(list, empty(none, words, ...commands));
      fill(page);
      return;
    }
    const chosen = state().file ?? files[0].name;
    fill(list, section(ABOUT[kind].title, exportRows(), rows(chosen)));
    drawPage(chosen);
    document.documentElement.dataset.drawn = chosen;
  }

  function rows(chosen) {
    const last = kind === "plan" ? ["cost", "number"] : ["HBM a device", "number"];
    return table(
      ABOUT[kind].title,
      [["file"], ["of"], ["answer"], ["slice"], ["step", "number"], last, ["written"]],
      files.map((file) => [
        h(
          "a",
          {
            href: address({ page: kind, file: file.name }),
            "aria-current": file.name === chosen ? "true" : null,
          },
          file.name,
        ),
        file.about ?? "",
        file.problem
          ? h("span.bad", file.problem)
          : h(`span.${file.good ? "good" : "bad"}`, `${file.good ? "✓" : "✗"} ${file.verdict}`),
        file.slice ?? "–",
        figure(file.step ?? { value: null, reason: "there is no prediction" }),
        figure(file.cost ?? file.memory ?? { value: null, reason: "it is not in the file" }),
        ago(file.written_at),
      ]),
    );
  }

  function exportRows() {
    const keys = ["name", "about", "verdict", "slice"];
    return h(
      "div.section-actions",
      exports({
        name: () => `${kind}s`,
        data: () => files,
        table: () => ({
          columns: [...keys, "step_s", kind === "plan" ? "usd" : "hbm_bytes"],
          rows: files.map((file) => [
            ...keys.map((key) => file[key]),
            file.step?.value,
            (file.cost ?? file.memory)?.value,
          ]),
        }),
      }),
    );
  }

  function drawPage(chosen) {
    if (framed === chosen) return;
    framed = chosen;
    const at = `/${kind}/page?file=${encodeURIComponent(chosen)}`;
    // A page of one file, in a sandbox: its scripts are of no server, and can ask nobody.
    const frame = h("iframe", {
      src: at,
      sandbox: "allow-scripts allow-downloads",
      title: `${kind} ${chosen}`,
    });
    fill(
      page,
      h(
        "div.frame-head",
        h("h2", chosen),
        h(
          "span.exports",
          h("a.button", { href: at, target: "_blank", rel: "noopener" }, "Open alone"),
          h(
            "a.button",
            { href: at, download: `${chosen.replaceAll("/", "-").replace(/\.json$/, "")}.html` },
            "HTML",
          ),
          h(
            "a.button",
            {
              href: `/api/${kind}?file=${encodeURIComponent(chosen)}`,
              download: chosen.replaceAll("/", "-"),
            },
            "JSON",
          ),
        ),
      ),
      h("div.frame-hold", frame),
    );
  }

  const timer = setInterval(() => {
    if (!document.hidden) draw();
  }, LOOKED_FOR_EVERY_MS);
  return {
    root,
    show: draw,
    hear: () => {},
    close: () => clearInterval(timer),
  };
}
