"""The planner's step model on published runs.

    python benchmarks/plan_published.py [--results FILE] [--only TEXT]

Every published (model, slice) row goes through the arithmetic that ranks candidates, in the layout
and program it was run with: its remat policy tensor by tensor, attention with or without a kernel,
and the products its framework makes beside those of a transformer. `plan_layouts.py` compares the
layout that the planner itself picks with the published one.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from claims import Claim, report
from published_programs import program_of
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.torus import place_axes
from tpukit.planner.search.candidates import PRECISIONS, Candidates
from tpukit.planner.search.scoring import score
from tpukit.planner.search.slice_meshes import SliceMesh

DEFAULT_RESULTS = Path(__file__).parent / "data" / "published_results.json"
BAR = 0.15


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
    sizes["fsdp"] = sizes.get("fsdp", 1) * sizes.pop("zero", 1)  # the planner counts by role
    ways = run.slice.num_slices
    for axis in ("data", "fsdp"):
        ways *= sizes.get(axis, 1)
    joined_by = "fsdp" if across.get("fsdp", 1) > 1 else "data"
    mesh = SliceMesh(run.slice, sizes, place_axes(run.slice, sizes), joined_by)
    return Candidates(
        meshes=(mesh,),
        mesh=np.zeros(1, int),
        batch=np.asarray([run.workload.batch_size / ways]),
        microbatches=np.ones(1, int),
        remat=np.zeros(1, int),
        precision=np.asarray([PRECISIONS.index(run.precision)]),
        optimizer=np.zeros(1, int),
        remats=(str(run.workload.remat),),
    )


def model(run: PublishedRun) -> Modelled:
    """Score the row's own layout."""
    found = score(
        shape_of(run.workload.config),
        candidate(run),
        sequence_length=run.workload.sequence_length,
        variant=program_of(run),
    )
    return Modelled(run, float(found.step_time_s[0]), found.step.at(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--only", help="rows whose id contains this")
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


if __name__ == "__main__":
    main()
