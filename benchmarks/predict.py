"""Predicted against published step times, beside a baseline that compiles nothing.

    python benchmarks/predict.py --results FILE [--only TEXT] [--compile-s 600]

All constants of the model but two come from single ops and public microbenchmarks
(src/tpukit/hardware/data/rates.toml). Those two, how much faster an op is inside a
step than alone and how long slices wait for each other, are fitted here on the generations that
are not scored; a file of runs that they were not chosen on is scored with them as they are shipped.
The baseline knows each generation's mean MFU over the other rows and nothing else.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import Claim, report
from published_programs import kernel_timer
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.compiler.kernel_traces import trace_kernels
from tpukit.compiler.timeline import Machine, StepPrediction, predict_step
from tpukit.compiler.timeline.exchange import waiting_share
from tpukit.compiler.timeline.kernels import has_own_model
from tpukit.errors import TPUError
from tpukit.hardware.rates import ChipRates

OP_TIMES = tuple(round(0.86 + 0.01 * step, 2) for step in range(15))
COMPILE_S = 600.0  # a row that compiles longer is reported without a prediction
DEFAULT_RESULTS = Path(__file__).parent / "data" / "published_results.json"


@dataclass(frozen=True)
class Fitted:
    """The two constants that whole steps decide."""

    op_time_in_a_step: float
    wait_per_doubling: float

    def __str__(self) -> str:
        return f"op time {self.op_time_in_a_step}, wait per doubling {self.wait_per_doubling}"


FROZEN = Fitted(ChipRates.of().op_time_in_a_step, ChipRates.of().wait_per_doubling)


@dataclass(frozen=True)
class Scored:
    """A published run with our program's schedule, and its step by op time, without waiting."""

    run: PublishedRun
    fits: bool
    alone_s: dict[float, float]

    def step_s(self, fitted: Fitted) -> float:
        """The predicted step."""
        waiting = waiting_share(self.run.slice.num_slices, per_doubling=fitted.wait_per_doubling)
        return self.alone_s[fitted.op_time_in_a_step] * (1 + waiting)

    def error(self, fitted: Fitted) -> float:
        """How far the prediction is off, as a share of the published time."""
        return abs(self.step_s(fitted) / self.run.step_time_s - 1)


def predict(run: PublishedRun, *, compile_s: float) -> Scored:
    """Compile the row's own program and predict it with every value of the fitted constants."""
    tried = [predict_with(run, options, compile_s) for options in run.option_sets]
    return min(tried, key=lambda one: (not one.fits, one.step_s(FROZEN)))


def predict_with(run: PublishedRun, options: dict[str, Any], compile_s: float) -> Scored:
    """The same for one set of compiler options."""
    compiled = compile_for(
        run.workload,
        run.slice,
        mesh=run.mesh,
        dcn_mesh_shape=run.dcn_mesh_shape,
        options=options,
        until="schedule",
        timeout_s=compile_s,
    )
    traces = trace_kernels(
        compiled.module, compiled.slice, wanted=lambda call: not has_own_model(call)
    )

    def step(op_time: float) -> StepPrediction:
        machine = Machine.of(compiled.slice, op_time_in_a_step=op_time, wait_per_doubling=0.0)
        return predict_step(
            compiled.module,
            compiled.slice,
            coordinates=compiled.coordinates,
            slice_of_device=compiled.slice_of_device,
            kernel_timer=kernel_timer(run, machine, traces),
            machine=machine,
        )

    usual = step(FROZEN.op_time_in_a_step)
    verdict = "fits" if compiled.fits else "DOES NOT FIT"
    gib = compiled.memory.total_bytes / 2**30
    print(f"    {verdict} {gib:.2f} GiB, alone {usual.step_time_s:.3f} s {' '.join(usual.caveats)}")
    steps = {op_time: step(op_time).step_time_s for op_time in OP_TIMES}
    return Scored(run, compiled.fits, steps)


def best_fit(rows: list[Scored], runs: list[PublishedRun]) -> Fitted:
    """The wait that `runs` show, and with it the op time of the smallest mean error on `rows`."""
    waits = waits_per_doubling(runs)
    wait = round(statistics.median(waits), 4) if waits else FROZEN.wait_per_doubling
    grid = [Fitted(op_time, wait) for op_time in OP_TIMES]
    return min(grid, key=lambda fitted: statistics.mean(row.error(fitted) for row in rows))


def waits_per_doubling(runs: list[PublishedRun]) -> list[float]:
    """What each doubling of slices cost where one program was published on fewer and on more.

    Published times alone say it: our program takes no part.
    """
    programs: dict[tuple[object, ...], list[PublishedRun]] = {}
    for run in runs:
        work, target = run.workload, run.slice
        each = (work.batch_size or 0) // target.num_slices
        key = (repr(work.model), target.chip.name, target.topology, each, work.sequence_length)
        programs.setdefault(key, []).append(run)
    waits: list[float] = []
    for same in programs.values():
        fewest = min(same, key=lambda run: run.slice.num_slices)
        fewer = math.log2(fewest.slice.num_slices)
        for run in same:
            more = math.log2(run.slice.num_slices)
            if more > fewer:  # times are as 1 + wait * doublings
                ratio = run.step_time_s / fewest.step_time_s
                waits.append((ratio - 1) / (more - ratio * fewer))
    return waits


def baseline_s(run: PublishedRun, runs: list[PublishedRun]) -> float | None:
    """The step time the generation's mean MFU gives, this row left out."""
    others = [
        other.mfu for other in runs if other.slice.chip == run.slice.chip and other.name != run.name
    ]
    return run.model_flops / (statistics.mean(others) * run.peak_flops) if others else None


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's rho."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    left, right = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    return statistics.correlation(left, right)


def main() -> None:
    configure_tpu_environment()  # or jax would look for a TPU in this process
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--only", help="rows whose id contains this")
    parser.add_argument("--compile-s", type=float, default=COMPILE_S, help="limit for each compile")
    parser.add_argument("--save", type=Path, help="write every row's figures here as JSON")
    options = parser.parse_args()
    runs: list[PublishedRun] = []
    for row in load_rows(options.results, only=options.only):
        try:
            runs.append(as_run(row))
        except NotExpressible as reason:
            print(f"left out {row['id']}: {reason}")
    scored: list[Scored] = []
    for run in runs:
        started = time.perf_counter()
        try:
            one = predict(run, compile_s=options.compile_s)
        except TPUError as error:
            print(f"{run.name}: no prediction: {error}")
            continue
        scored.append(one)
        step = one.step_s(FROZEN)
        times = f"published {run.step_time_s:8.3f} s  predicted {step:8.3f} s"
        spent = time.perf_counter() - started
        ratio = step / run.step_time_s
        print(f"{run.name:<32} {times}  ratio {ratio:.3f}  ({spent:.0f} s)", flush=True)
    known = {row["id"] for row in load_rows(DEFAULT_RESULTS)}
    score(scored, runs, refit=any(run.name in known for run in runs))
    if options.save:
        rows = [{"id": s.run.name, "published_s": s.run.step_time_s, **s.alone_s} for s in scored]
        options.save.write_text(json.dumps(rows, indent=1))


def score(scored: list[Scored], runs: list[PublishedRun], *, refit: bool) -> None:
    """Print errors and rank correlation per generation and over all, beside the baseline.

    With `refit` the constants that whole steps decide are fitted without the generation that is
    scored.

    Rows whose program does not fit are scored apart: they take no step as they are. So are those
    with eight-bit products: nothing measured fits the rates of these in a step, and an MFU over the
    bf16 peak compares them with nothing.
    """
    narrow = [one for one in scored if one.run.precision != "bf16"]
    fitting = [one for one in scored if one.fits and one.run.precision == "bf16"]
    refused = [one for one in scored if not one.fits]
    runs = [run for run in runs if run.precision == "bf16"]
    errors: dict[str, float] = {}
    for name in dict.fromkeys(one.run.slice.chip.name for one in fitting):
        members = [one for one in fitting if one.run.slice.chip.name == name]
        others = [one for one in fitting if one.run.slice.chip.name != name]
        elsewhere = [run for run in runs if run.slice.chip.name != name]
        fitted = best_fit(others, elsewhere) if others and refit else FROZEN
        errors.update((one.run.name, one.error(fitted)) for one in members)
        origin = "as shipped" if fitted is FROZEN else "fitted on the others"
        print(f"\n{name}: {len(members)} rows, {origin}: {fitted}")
        show([errors[one.run.name] for one in members], members, fitting)
        if len(members) > 2:
            pairs = [
                (one.run.model_flops / one.step_s(fitted) / one.run.peak_flops, one.run.mfu)
                for one in members
            ]
            report(Claim("  rank correlation of MFU", rank_correlation(pairs), "", at_least=0.8))
    if errors:
        best = f"; best of all: {best_fit(fitting, runs)}" if refit else ""
        print(f"\nall generations: {len(fitting)} rows{best}")
        show(list(errors.values()), fitting, fitting)
    if narrow:
        print(f"\neight-bit products, whose rates nobody measured: {len(narrow)} rows")
        for one in narrow:
            print(f"  {one.run.name}: error {one.error(FROZEN):.3f}")
    if refused:
        print(f"\nour program does not fit, the published one did: {len(refused)} rows")
        for one in refused:
            print(f"  {one.run.name}: error {one.error(FROZEN):.3f}")


def show(errors: list[float], members: list[Scored], everyone: list[Scored]) -> None:
    """Errors of some rows, beside the baseline's on the same rows."""
    report(
        Claim("  median error", statistics.median(errors), "", at_most=0.06),
        Claim("  mean error", statistics.mean(errors), "", at_most=0.08),
        Claim("  largest error", max(errors), "", at_most=0.20),
    )
    runs = [one.run for one in everyone]
    guesses = [(baseline_s(one.run, runs), one.run) for one in members]
    base = [abs(guess / run.step_time_s - 1) for guess, run in guesses if guess]
    if base:
        report(Claim("  mean error of the baseline", statistics.mean(base), ""))


if __name__ == "__main__":
    main()
