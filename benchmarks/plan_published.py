"""The planner's step model on published runs, and its own layout against the published one.

    python benchmarks/plan_published.py [--results FILE] [--only TEXT] [--verify N]

Every published (model, slice) row goes through the arithmetic that ranks candidates, in the layout
and program it was run with: its remat policy tensor by tensor, attention with or without a kernel,
and the products its framework makes beside those of a transformer. With --verify the first N rows
are planned anew, on the same slice with no more tokens a step, and both layouts are compiled and
predicted from their schedules.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from claims import Claim, report
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.errors import TPUError
from tpukit.planner.candidates import MOMENTS, PRECISIONS, Candidates, Layout
from tpukit.planner.model_shape import shape_of
from tpukit.planner.plan import Plan
from tpukit.planner.planning import plan
from tpukit.planner.scoring import score
from tpukit.planner.step_model import Program
from tpukit.planner.torus import place_axes

DEFAULT_RESULTS = Path(__file__).parent / "data" / "published_results.json"
COMPILE_S = 300.0
BAR = 0.15
HEADROOMS = (0.05, 0.15, 0.25)  # of HBM: what is too large at one makes room for the next


@dataclass(frozen=True)
class Modelled:
    """One row and what the step model says of it."""

    run: PublishedRun
    step_time_s: float
    causes: dict[str, float]

    @property
    def off(self) -> float:
        """Modelled tokens a second over published ones, less 1."""
        return self.run.step_time_s / self.step_time_s - 1

    def __str__(self) -> str:
        tokens = self.run.workload.tokens_per_step / self.run.slice.chips
        parts = " ".join(
            f"{cause} {100 * seconds / self.step_time_s:.0f}"
            for cause, seconds in self.causes.items()
            if seconds > 0.005 * self.step_time_s
        )
        return (
            f"{self.run.name:<34} {tokens / self.run.step_time_s:8,.0f} published "
            f"{tokens / self.step_time_s:8,.0f} modelled tokens/s/chip {100 * self.off:+6.1f} %  "
            f"% of the step: {parts}"
        )


def candidate(run: PublishedRun) -> Candidates:
    """The published layout as the planner writes it."""
    across = dict(zip(run.mesh, run.dcn_mesh_shape or (), strict=False))
    sizes = {axis: size // across.get(axis, 1) for axis, size in run.mesh.items()}
    ways = run.slice.num_slices
    for axis in ("data", "fsdp"):
        ways *= sizes.get(axis, 1)
    layout = Layout(run.slice, sizes, place_axes(run.slice, sizes))
    return Candidates(
        layouts=(layout,),
        layout=np.zeros(1, int),
        batch=np.asarray([run.workload.batch_size / ways]),
        microbatches=np.ones(1, int),
        remat=np.zeros(1, int),
        precision=np.asarray([PRECISIONS.index(run.precision)]),
        moment=np.asarray([MOMENTS.index("float32")]),
        remats=(str(run.workload.remat),),
    )


def model(run: PublishedRun) -> Modelled:
    """Score the row's own layout."""
    found = score(
        shape_of(run.workload.config),
        candidate(run),
        sequence_length=run.workload.sequence_length,
        program=Program(
            attention="plain" if run.workload.attention == "xla" else "splash",
            split_sequence="sequence" in run.workload.strategy,
            other_flops_per_token=run.other_flops_per_token,
        ),
    )
    return Modelled(run, float(found.step_time_s[0]), found.step.at(0))


def tokens_per_s(run: PublishedRun, job: Plan | None = None) -> float:
    """Of the published layout, or of a plan's, from its compiled schedule; 0 if it does not fit."""
    work, mesh, dcn = run.workload, run.mesh, run.dcn_mesh_shape
    if job is not None:
        work, mesh, dcn = job.workload, job.mesh_sizes, job.dcn_mesh
    compiled = compile_for(
        work,
        run.slice,
        mesh=mesh,
        dcn_mesh_shape=dcn,
        options=run.options,  # the published flags for both
        until="schedule",
        timeout_s=COMPILE_S,
    )
    gib = compiled.memory.total_bytes / 2**30
    rate = work.tokens_per_step / compiled.predict().step_time_s
    fits = "" if compiled.fits else " DOES NOT FIT"
    print(
        f"    {mesh} {work.remat}, {work.examples} examples: {rate / run.slice.chips:,.0f} "
        f"tokens/s/chip, {gib:.1f} GiB{fits}",
        flush=True,
    )
    return rate if compiled.fits else 0.0


def own_layout_wins(run: PublishedRun) -> bool | None:
    """Whether what the planner picks for this slice and no larger a batch is at least as fast.

    A pick that the compiler says is too large makes room for a leaner one, as in `plan`. None
    where the published layout does not fit here, so that there is nothing to compare with.
    """
    published = tokens_per_s(run)
    if not published:
        return None
    for headroom in HEADROOMS:
        found = plan(
            run.workload.config,
            tokens="1T",
            sequence_length=run.workload.sequence_length,
            on=[str(run.slice)],
            objective="fastest",
            max_batch_tokens=run.workload.tokens_per_step,
            min_headroom=headroom,
            verify=0,
        )
        if found.best is None:
            break
        own = tokens_per_s(run, found.best.job)
        if own:
            return own >= published
    print(f"    no plan for {run.slice}")
    return False


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--only", help="rows whose id contains this")
    parser.add_argument("--verify", type=int, default=0, metavar="N")
    options = parser.parse_args()
    rows: list[Modelled] = []
    for row in load_rows(options.results, only=options.only):
        try:
            rows.append(model(as_run(row, quantized=True)))
        except NotExpressible as reason:
            print(f"left out {row['id']}: {reason}")
            continue
        print(rows[-1], flush=True)
    errors = [abs(row.off) for row in rows]
    within = sum(error <= BAR for error in errors)
    report(
        Claim("step model, rows", len(rows), ""),
        Claim("step model, median error", 100 * statistics.median(errors), "%"),
        Claim("step model, rows within 15 %", 100 * within / len(rows), "%", at_least=100),
        Claim("step model, largest error", 100 * max(errors), "%", at_most=100 * BAR),
    )
    wins: list[bool] = []
    wide = [row for row in rows if row.run.precision == "bf16"]
    for row in wide[: options.verify]:
        print(row.run.name)
        try:
            verdict = own_layout_wins(row.run)
        except TPUError as error:
            print(f"    not compared: {error}")
            continue
        if verdict is None:
            print("    not compared: the published layout does not fit here")
            continue
        wins.append(verdict)
    if wins:
        share = 100 * sum(wins) / len(wins)
        report(Claim("planner's layout at least as fast", share, "% of rows", at_least=100))


if __name__ == "__main__":
    main()
