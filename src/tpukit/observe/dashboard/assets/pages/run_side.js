// What stands beside the charts of a run: where its time went, slow hosts, events.

import { h } from "../dom.js";
import { exports } from "../export.js";
import { ago, clock, quantity } from "../format.js";
import { letter } from "../marks.js";
import { section, shares, table } from "../parts.js";
import { address } from "../state.js";

const EVENTS_SHOWN = 60;
const CAUSE_KINDS = {
  initialise: "c-host",
  compile: "c-vector",
  restore: "c-kernel",
  input_stall: "c-hbm",
  checkpoint: "p-weight-copies",
  evaluate: "p-results",
  lost: "c-ici",
  restart: "c-dcn",
  other: "c-overhead",
};

const WHERE = "Where the time went";

/** Steps that count, and everything else by cause. */
export function goodputSection(run, goodput) {
  if (goodput.goodput === null)
    return section(WHERE, h("p.absent", "No attempt is recorded, so nobody knows where the time went."));
  const pieces = [
    {
      kind: "c-matrix",
      amount: goodput.productive_s,
      words: `steps that count ${quantity(goodput.productive_s, "s")}`,
    },
    ...goodput.badput.map((one) => ({
      kind: CAUSE_KINDS[one.cause] ?? "c-overhead",
      amount: one.seconds,
      words: `${one.label} ${quantity(one.seconds, "s")}`,
    })),
  ];
  const lost = goodput.lost_steps ? `, ${goodput.lost_steps.toLocaleString("en-US")} steps lost` : "";
  const rows = [
    ["steps that count", goodput.productive_s],
    ...goodput.badput.map((one) => [one.label, one.seconds]),
  ];
  const save = exports({
    name: () => `${run}-goodput`,
    table: () => ({ columns: ["where", "seconds"], rows }),
    data: () => goodput,
  });
  return section(
    WHERE,
    h("div.section-actions", save),
    h(
      "p.intro",
      `${quantity(goodput.goodput, "share")} of ${quantity(goodput.wall_s, "s")} productive, ${goodput.attempts} attempt${goodput.attempts === 1 ? "" : "s"}${lost}.`,
    ),
    shares(pieces, WHERE),
  );
}

/** Slow hosts, what shows it, and what to look at. */
export function stragglerSection(run, { found, hosts, steps, notes }) {
  return section(
    "Hosts",
    found.length
      ? table(
          "Slow hosts",
          [["host"], ["why"]],
          found.map((one) => [
            h("b", one.host),
            [
              `slow at ${one.cause}${one.share === null ? "" : `, ${quantity(one.share, "share")} of the time`}`,
              h("div.details", one.evidence),
              h("div.details", `→ ${one.advice}`),
            ],
          ]),
        )
      : h(
          "p.intro",
          hosts > 1
            ? `No straggler among ${hosts} hosts over ${steps} steps.`
            : "One host, so there is none to compare it with.",
        ),
    notes.length && hosts > 1 ? h("p.intro", notes.join("; ")) : null,
    h("p", h("a", { href: address({ page: "chips", run }) }, "Chips of this run")),
  );
}

/** What happened, the newest first. */
export function eventSection({ events, left_out: leftOut }) {
  const newest = events.slice(-EVENTS_SHOWN).reverse();
  const older = events.length + leftOut - newest.length;
  const rows = newest.map((event) => [
    h("span.nowrap", { title: clock(event.time) }, ago(event.time)),
    [
      letter(event.event),
      ` ${event.event}${event.step === null ? "" : ` · step ${event.step.toLocaleString("en-US")}`}`,
      event.words ? h("div.details", event.words) : null,
    ],
  ]);
  return section(
    "Events",
    rows.length
      ? table("Events", [["when"], ["what"]], rows)
      : h("p.absent", "This run wrote no events.jsonl: it is of an older tpukit, or has not begun."),
    older ? h("p.intro", `${older} older ones are in events.jsonl.`) : null,
  );
}
