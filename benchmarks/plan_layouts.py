"""The layout the planner picks against the one that was published, both by compiled schedules.

    python benchmarks/plan_layouts.py [--only TEXT] [--seconds N] [--again]

Every published (model, slice) row is planned anew on the same slice, with no more tokens a step and
products of the same format. Both layouts are compiled with the published flags, the planner's also
with those of its own job, and the timeline of each schedule says its tokens a second. A published
layout with a tensor axis is compiled with whole products too, as for predict.py, and the faster
counts; the planner's counts as its job is written. The published
one has the attention it was run with, the planner's job ours. What was found is kept in
data/plan_layouts.json, row by row: rows that are there are not compiled again.

That compares model with model. Beside it stands the planner's predicted rate against the measured
one that was published, in which the error of the prediction is part of the difference.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claims import Claim, report
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import Workload, configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.errors import TPUError
from tpukit.hardware.formats import spelled_as
from tpukit.job import build_step
from tpukit.models.transformer.config import OPERANDS
from tpukit.planner.planning import plan

DATA = Path(__file__).parent / "data"
RESULTS, FOUND = DATA / "published_results.json", DATA / "plan_layouts.json"
HEADROOMS = (0.05, 0.15, 0.25)  # of HBM: what is too large at one makes room for the next


def compiled(
    run: PublishedRun,
    work: Workload,
    mesh: dict[str, int],
    dcn: tuple[int, ...] | None,
    seconds: float,
    own_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A layout and what its compiled schedule comes to."""
    step = compile_for(
        work,
        run.slice,
        mesh=mesh,
        dcn_mesh_shape=dcn,
        options={**run.options, **(own_options or {})},
        until="schedule",
        timeout_s=seconds,
    )
    rate = work.tokens_per_step / step.predict().step_time_s / run.slice.chips
    found = {
        "mesh": mesh,
        "remat": str(work.remat),
        "examples": work.examples,
        "tokens_per_s_per_chip": round(rate, 1),
        "gib": round(step.memory.total_bytes / 2**30, 2),
        "fits": bool(step.fits),
    }
    print(f"    {found}", flush=True)
    return found


def published_layout(run: PublishedRun, work: Workload, seconds: float) -> dict[str, Any]:
    """The published layout with the faster of the options it may have been run with."""
    tried = [
        compiled(run, work, run.mesh, run.dcn_mesh_shape, seconds, options)
        for options in run.option_sets
    ]
    return max(tried, key=lambda one: (one["fits"], one["tokens_per_s_per_chip"]))


def compare(run: PublishedRun, seconds: float) -> dict[str, Any]:
    """The published layout and the planner's own, which has to fit.

    A pick that the compiler says is too large makes room for a leaner one, as in `plan`.
    """
    matmul = spelled_as(run.precision, OPERANDS) or "dtype"
    config = run.workload.config.replace(matmul=matmul)
    work = run.workload.replace(model=config)
    published = published_layout(run, work, seconds)
    if not published["fits"]:
        return {"published": published, "left_out": "the published layout does not fit here"}
    # A first pick that is slower is looked at as `plan` does by default, which compiles a rival.
    tries = [(headroom, 0) for headroom in HEADROOMS] + [(HEADROOMS[0], 1)]
    found: dict[str, Any] = {"published": published, "left_out": "no plan fits by the compiler"}
    for headroom, verify in tries:
        best = plan(
            run.workload.config,
            tokens="1T",
            sequence_length=run.workload.sequence_length,
            on=[str(run.slice)],
            objective="fastest",
            max_batch_tokens=run.workload.tokens_per_step,
            min_headroom=headroom,
            precisions=[run.precision],
            verify=verify,
            verify_seconds=2 * seconds,
        ).best
        if best is None or ("own" in found and not verify):
            continue
        job = best.job
        # The published optimizer, so that only layouts are compared.
        step = build_step(job).work.replace(optimizer=run.workload.optimizer)
        own = compiled(run, step, job.mesh_sizes, job.dcn_mesh, seconds, job.options)
        if own["fits"]:
            found = {"published": published, "own": own}
            if (gain(found) or 0.0) >= 0:
                break
    return found


def gain(found: dict[str, Any]) -> float | None:
    """The own layout's tokens a second over the published one's, less 1."""
    if "own" not in found:
        return None
    rates = [found[name]["tokens_per_s_per_chip"] for name in ("own", "published")]
    return rates[0] / rates[1] - 1


def measured_rate(run: PublishedRun) -> float:
    """Tokens a second and chip of the published run itself."""
    return run.workload.tokens_per_step / run.step_time_s / run.slice.chips


def gains(known: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Of every row compared, the gain over the published layout's timeline and over its run."""
    compared: dict[str, tuple[float, float]] = {}
    for row in load_rows(RESULTS):
        found = known.get(row["id"], {})
        if "own" in found:
            own = found["own"]["tokens_per_s_per_chip"]
            over_run = own / measured_rate(as_run(row, quantized=True)) - 1
            compared[row["id"]] = (gain(found) or 0.0, over_run)
    return compared


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="rows whose id contains this")
    parser.add_argument("--seconds", type=float, default=180.0, help="for one compile")
    parser.add_argument("--again", action="store_true", help="rows that are known too")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for row in load_rows(RESULTS, only=options.only):
        name = row["id"]
        if name in known and not options.again:
            continue
        try:
            run = as_run(row, quantized=True)
        except NotExpressible:
            continue
        print(name, flush=True)
        try:
            known[name] = compare(run, options.seconds)
        except TPUError as error:
            known[name] = {"left_out": str(error).splitlines()[0]}
            print(f"    not compared: {known[name]['left_out']}", flush=True)
        FOUND.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    compared = gains(known)
    print(f"{'row':<34} {'model : model':>14} {'model : measured':>17}")
    for name, (by_model, by_run) in sorted(compared.items(), key=lambda item: item[1][1]):
        print(f"{name:<34} {100 * by_model:+13.1f}% {100 * by_run:+16.1f}%")
    for name in sorted(set(known) - set(compared)):
        print(f"{name:<34} not compared: {known[name]['left_out']}")
    for what, side in (("published layout's timeline", 0), ("measured rate", 1)):
        values = [pair[side] for pair in compared.values()]
        if values:
            faster = sum(value >= 0 for value in values)
            report(
                Claim(f"rows not slower than the {what}", faster, f"of {len(values)}"),
                Claim("  median gain", 100 * statistics.median(values), "%"),
                Claim("  smallest", 100 * min(values), "%"),
                Claim("  largest", 100 * max(values), "%"),
            )


if __name__ == "__main__":
    main()
