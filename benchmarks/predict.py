"""Predicted against published step times, beside a baseline that compiles nothing.

    python benchmarks/predict.py [--results FILE] [--only TEXT] [--compile-s 600] [--write]
                                 [--pieces FILE] [--recorded]

All constants of the model but two come from single ops and public microbenchmarks
(src/tpukit/hardware/data/rates.toml). Those two, how much faster an op is inside a
step than alone and how long slices wait for each other, are fitted here on rows that share neither
source nor generation with the row they score; a file of runs that they were not chosen on is scored
with them as they are shipped. The baseline knows each generation's mean MFU over the other rows and
nothing else.

`--write` ships the rows with what was predicted of each (hardware/data/scored_steps.json of the
package): the band that predictions are printed with is made of them. Rows that `--only` leaves out
stay as they were written, with the day they were predicted. Constants are fitted on the rows of one
run: `--pieces` keeps what each row gave, so that rows can be predicted one by one within a day and
scored together at its end. `--recorded` compiles nothing and scores what was written.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from claims import Claim, report
from published_programs import kernel_timer
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.compiler.kernel_traces import trace_kernels
from tpukit.compiler.program.request import compiler_versions
from tpukit.compiler.program_flops import KernelCounter
from tpukit.compiler.timeline import Machine, StepPrediction, predict_step
from tpukit.compiler.timeline.kernels import has_own_model
from tpukit.compiler.timeline.network import waiting_share
from tpukit.errors import TPUError
from tpukit.hardware.rates import ChipRates
from tpukit.hardware.scored_steps import ScoredStep, ScoredSteps

OP_TIMES = tuple(round(0.86 + 0.01 * step, 2) for step in range(15))
SIMULATED = (0.86, 0.93, 1.0)  # the others lie between them, within 0.04 % of 18 rows
COMPILE_S = 1800.0  # a row that compiles longer is reported without a prediction
BARS = (0.04, 0.05, 0.13)  # median, mean and largest error over all rows
RANK_BAR, RANKED_ROWS = 0.85, 5  # of a generation with so many rows
DEFAULT_RESULTS = Path(__file__).parent / "data" / "published_results.json"
SHIPPED = Path(__file__).parents[1] / "src" / "tpukit" / "hardware" / "data" / "scored_steps.json"


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


@dataclass(frozen=True)
class Pieces:
    """What rows gave earlier today with the same compiler, in a file."""

    path: Path | None

    def find(self, run: PublishedRun) -> Scored | None:
        """What is kept of a row."""
        kept = self._read().get(run.name)
        if kept is None or kept["from"] != self._origin:
            return None
        steps = {float(op_time): step for op_time, step in kept["alone_s"].items()}
        return Scored(run, kept["fits"], steps)

    def keep(self, one: Scored) -> None:
        """Add a row."""
        if self.path is not None:
            piece = {"from": self._origin, "fits": one.fits, "alone_s": one.alone_s}
            self.path.write_text(json.dumps({**self._read(), one.run.name: piece}))

    def _read(self) -> dict[str, dict[str, Any]]:
        exists = self.path is not None and self.path.is_file()
        return json.loads(self.path.read_text()) if self.path is not None and exists else {}

    @property
    def _origin(self) -> str:
        return f"{date.today()}, {compiler_versions()}"


def predict(run: PublishedRun, *, compile_s: float) -> Scored:
    """Compile the row's own program and predict it with every value of the fitted constants."""
    tried = [predict_with(run, options, compile_s) for options in run.option_sets]
    return min(tried, key=lambda one: (not one.fits, one.step_s(FROZEN)))


def predict_with(
    run: PublishedRun,
    options: dict[str, Any],
    compile_s: float,
    *,
    op_times: tuple[float, ...] = SIMULATED,
) -> Scored:
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

    counter = KernelCounter(compiled.module)

    def step(op_time: float) -> StepPrediction:
        machine = Machine.of(
            compiled.slice,
            op_time_in_a_step=op_time,
            wait_per_doubling=0.0,
            reduces_at_once=run.reduces_at_once,
        )
        return predict_step(
            compiled.module,
            compiled.slice,
            coordinates=compiled.coordinates,
            slice_of_device=compiled.slice_of_device,
            kernel_timer=kernel_timer(run, machine, traces, counter),
            machine=machine,
        )

    usual = step(FROZEN.op_time_in_a_step)
    verdict = "fits" if compiled.fits else "DOES NOT FIT"
    gib = compiled.memory.total_bytes / 2**30
    print(f"    {verdict} {gib:.2f} GiB, alone {usual.step_time_s:.3f} s {' '.join(usual.caveats)}")
    known = {op_time: step(op_time).step_time_s for op_time in op_times}
    known = dict(sorted({**known, FROZEN.op_time_in_a_step: usual.step_time_s}.items()))
    steps = np.interp(OP_TIMES, list(known), list(known.values())).tolist()
    return Scored(run, compiled.fits, dict(zip(OP_TIMES, steps, strict=True)))


def best_fit(rows: list[Scored], runs: list[PublishedRun]) -> Fitted:
    """The wait that `runs` show, and with it the op time of the smallest mean error on `rows`.

    The shipped constants where there are no rows to fit on, as when few were asked for.
    """
    if not rows:
        return FROZEN
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
    parser.add_argument("--write", action="store_true", help="ship the rows with this package")
    parser.add_argument("--pieces", type=Path, help="a file that keeps what each row gave today")
    parser.add_argument("--recorded", action="store_true", help="score what was written")
    options = parser.parse_args()
    runs: list[PublishedRun] = []
    for row in load_rows(options.results, only=options.only):
        try:
            runs.append(as_run(row))
        except NotExpressible as reason:
            print(f"left out {row['id']}: {reason}")
    if options.recorded:
        kept = ScoredSteps.from_dict(json.loads(SHIPPED.read_text()))
        score(kept, {run.name: Scored(run, True, {}) for run in runs})
        return
    pieces = Pieces(options.pieces)
    scored: list[Scored] = []
    for run in runs:
        started = time.perf_counter()
        try:
            one = pieces.find(run) or predict(run, compile_s=options.compile_s)
        except TPUError as error:
            print(f"{run.name}: no prediction: {error}")
            continue
        pieces.keep(one)
        scored.append(one)
        step = one.step_s(FROZEN)
        times = f"published {run.step_time_s:8.3f} s  predicted {step:8.3f} s"
        spent = time.perf_counter() - started
        ratio = step / run.step_time_s
        print(f"{run.name:<32} {times}  ratio {ratio:.3f}  ({spent:.0f} s)", flush=True)
    known = {row["id"] for row in load_rows(DEFAULT_RESULTS)}
    steps = scored_steps(scored, runs, refit=any(run.name in known for run in runs))
    score(steps, {one.run.name: one for one in scored})
    if options.write:
        kept = ScoredSteps.from_dict(json.loads(SHIPPED.read_text())).updated_by(steps)
        SHIPPED.write_text(json.dumps(kept.to_dict(), indent=1) + "\n")


def scored_steps(scored: list[Scored], runs: list[PublishedRun], *, refit: bool) -> ScoredSteps:
    """Every row with its prediction by constants that were fitted without its like.

    Rows whose program does not fit do not count: they take no step as they are.
    """
    counted = [one for one in scored if not left_out(one)]
    steps: list[ScoredStep] = []
    for one in scored:
        own = one.run
        fitted = FROZEN
        if refit:
            others = [other for other in counted if is_apart(other.run, own)]
            fitted = best_fit(others, [run for run in runs if is_apart(run, own)])
        steps.append(
            ScoredStep(
                name=own.name,
                source=own.source,
                chip=own.slice.chip.name,
                published_s=round(own.step_time_s, 4),
                predicted_s=round(one.step_s(FROZEN), 4),
                held_out_s=round(one.step_s(fitted), 4),
                left_out=left_out(one),
                date=f"{date.today()}",
            )
        )
    if refit and counted:
        print(f"\nconstants that fit all rows best: {best_fit(counted, runs)}")
    versions = ", ".join(f"{name} {number}" for name, number in compiler_versions().items())
    return ScoredSteps(versions, tuple(steps))


def is_apart(run: PublishedRun, other: PublishedRun) -> bool:
    """Whether two runs share neither source nor generation."""
    return run.source != other.source and run.slice.chip != other.slice.chip


def left_out(one: Scored) -> str:
    """Why a row does not count, or ""."""
    return "" if one.fits else "our program does not fit, the published one did"


def score(steps: ScoredSteps, scored: dict[str, Scored]) -> None:
    """Print errors and rank correlation per generation and over all, beside the baseline."""
    counted = steps.counted
    runs = [scored[one.name].run for one in counted]
    for chip in dict.fromkeys(one.chip for one in counted):
        members = [one for one in counted if one.chip == chip]
        print(f"\n{chip}: {len(members)} rows")
        show(members, runs)
        if len(members) > 2:
            pairs = [(mfu(scored[one.name].run, one), scored[one.name].run.mfu) for one in members]
            bar = RANK_BAR if len(members) >= RANKED_ROWS else None
            report(Claim("  rank correlation of MFU", rank_correlation(pairs), "", at_least=bar))
    plain = [one for one in counted if not is_newer(scored[one.name].run)]
    if plain and len(plain) < len(counted):
        print(f"\nlayers of one shape in bfloat16: {len(plain)} rows")
        show(plain, runs)
    if counted:
        band = steps.band
        print(f"\nall generations: {len(counted)} rows")
        show(list(counted), runs, BARS)
        report(
            Claim("  band, below", 100 * band.below, "%"),
            Claim("  band, above", 100 * band.above, "%"),
        )
        if len(steps.rows_by_source) > 1:
            report(Claim("  rows in a band made without their source", steps.covered, "rows"))
        print("  rows by source:")
        for source, rows in steps.rows_by_source.items():
            print(f"    {rows:3} {source}")
    for one in steps.steps:
        if one.left_out:
            print(f"  {one.name}: error {one.error:.3f}, left out: {one.left_out}")


def mfu(run: PublishedRun, step: ScoredStep) -> float:
    """Of the predicted step."""
    return run.model_flops / step.held_out_s / run.peak_flops


def is_newer(run: PublishedRun) -> bool:
    """Whether a run has what the first 41 rows did not: eight bits, or layers of other kinds."""
    kinds = run.workload.config.kinds.values()
    return run.precision != "bf16" or any(
        layer.latent or layer.shared_d_ff or layer.attention_sinks or layer.keys_as_values
        for layer in kinds
    )


def show(
    members: list[ScoredStep],
    runs: list[PublishedRun],
    bars: tuple[float | None, ...] = (None, None, None),
) -> None:
    """Errors of some rows, beside the baseline's on the same rows."""
    errors = [one.error for one in members]
    report(
        Claim("  median error", statistics.median(errors), "", at_most=bars[0]),
        Claim("  mean error", statistics.mean(errors), "", at_most=bars[1]),
        Claim("  largest error", max(errors), "", at_most=bars[2]),
    )
    names = {one.name for one in members}
    guesses = [(baseline_s(run, runs), run) for run in runs if run.name in names]
    base = [abs(guess / run.step_time_s - 1) for guess, run in guesses if guess]
    if base:
        report(Claim("  mean error of the baseline", statistics.mean(base), ""))


if __name__ == "__main__":
    main()
