"""The planner: its speed, its step model on published runs, and its layouts beside published ones.

python benchmarks/plan.py speed
python benchmarks/plan.py published
python benchmarks/plan.py layouts
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import DATA, PUBLISHED, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "speed",
        "candidates per second, and seconds of the command",
        options={
            "--verified": {"action": "store_true", "help": "also the verified run: minutes"},
        },
    ),
    Subcommand(
        "published",
        "the step model on published runs",
        options={
            "--results": {"type": Path, "default": PUBLISHED},
            "--only": {"help": "rows whose id contains this"},
        },
    ),
    Subcommand(
        "layouts",
        "the planner's layouts beside published ones, both compiled",
        options={
            "--only": {"help": "rows whose id contains this"},
            "--seconds": {"type": float, "default": 180.0, "help": "for one compile"},
            "--again": {"action": "store_true", "help": "rows that are known too"},
            "--recorded": {"action": "store_true", "help": "compile nothing, score what is known"},
        },
    ),
)

import numpy as np
from published_programs import program_of
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import Workload, configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.errors import TPUError
from tpukit.hardware.formats import spelled_as
from tpukit.job import build_step
from tpukit.models.transformer.config import OPERANDS
from tpukit.planner.cost.candidates import PRECISIONS, Candidates, SliceMesh, Space
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.torus import place_axes
from tpukit.planner.planning import plan
from tpukit.planner.search.search import Ask, Search

COMMAND = ["llama3.1-70b", "--tokens", "1e12", "--deadline", "30d"]
RUNS = 3


def candidates_in_two_seconds() -> list[Result]:
    """Score the whole space, all precisions included, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asked = plan("llama3.1-70b", tokens=1e12, verify=0).ask
    wide = Ask(**{**vars(asked), "space": Space(precisions=PRECISIONS)})
    seconds, count = min((wall(wide) for _ in range(RUNS)), key=lambda pair: pair[0])
    return [
        Result("candidates of the whole space", count, "", at_least=20_000),
        Result("seconds for all of them, one core", seconds, "s"),
        Result("seconds for 20,000 candidates", seconds / count * 20_000, "s", at_most=2),
    ]


def wall(ask: Ask) -> tuple[float, int]:
    """Seconds of one search, and how many it weighed."""
    started = time.perf_counter()
    found = Search.run(ask)
    return time.perf_counter() - started, len(found.scores.candidates)


def command_s(*more: str, environment: dict[str, str] | None = None) -> float:
    """Wall time of the command in its own process."""
    code = (
        "import typer; from tpukit.cli import plan\n"
        "app = typer.Typer(); app.command()(plan.plan); app()"
    )
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *COMMAND, *more],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    return time.perf_counter() - started


def run_speed(options):
    """What `tpukit plan` costs: candidates a second, the wall time of the command, verification.

    Targets: 20,000 candidates within 2 s on one core, the 70B command without verification within
    5 s, and with its best three verified by the compiler within 360 s on two cores (`--verified`;
    the compile cache is a fresh one).
    """
    if options.verified:
        with tempfile.TemporaryDirectory() as folder:
            seconds = command_s("--verify-seconds", "360", environment={"TPUKIT_CACHE_DIR": folder})
        report(Result("70B, best three verified, wall", seconds, "s", at_most=360))
    before = os.times()
    quickest = min(command_s("--no-verify") for _ in range(RUNS))
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    report(
        Result("70B, --no-verify, wall", quickest, "s", at_most=5),
        Result("70B, --no-verify, processor time", used / RUNS, "s"),
    )
    report(*candidates_in_two_seconds())


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


def run_published(options):
    """The planner's step model on published runs.

    Every published (model, slice) row goes through the arithmetic that ranks candidates, in the
    layout and program it was run with: its remat policy tensor by tensor, attention with or
    without a kernel, and the products its framework makes beside those of a transformer.
    `plan.py layouts` compares the layout that the planner itself picks with the published one.
    """
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
        Result("step model, rows", len(rows), ""),
        Result(
            f"the planner's arithmetic on {len(rows)} published runs, median error",
            100 * statistics.median(errors),
            "%",
            key="step_model_median",
            form=".1f",
            compares="model : published",
            sample="in",
        ),
        Result("step model, rows within 15 %", 100 * within / len(rows), "%", at_least=100),
        Result(
            f"the planner's arithmetic on {len(rows)} published runs, largest error",
            100 * max(errors),
            "%",
            at_most=100 * BAR,
            key="step_model_largest",
            form=".1f",
            compares="model : published",
            sample="in",
        ),
    )


FOUND = DATA / "plan_layouts.json"
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
    for row in load_rows(PUBLISHED):
        found = known.get(row["id"], {})
        if "own" in found:
            own = found["own"]["tokens_per_s_per_chip"]
            over_run = own / measured_rate(as_run(row, quantized=True)) - 1
            compared[row["id"]] = (gain(found) or 0.0, over_run)
    return compared


def run_layouts(options):
    """The layout the planner picks against the one that was published, both by compiled schedules.

    Every published (model, slice) row is planned anew on the same slice, with no more tokens a
    step and products of the same format. Both layouts are compiled with the published flags, the
    planner's also with those of its own job, and the timeline of each schedule says its tokens a
    second. A published layout with a tensor axis is compiled with whole products too, as for
    predict.py, and the faster counts; the planner's counts as its job is written. The published
    one has the attention it was run with, the planner's job ours. What was found is kept in
    data/plan_layouts.json, row by row: rows that are there are not compiled again.

    That compares model with model. Beside it stands the planner's predicted rate against the
    measured one that was published, in which the error of the prediction is part of the
    difference.
    """
    configure_tpu_environment()
    known: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for row in load_rows(PUBLISHED, only=options.only):
        name = row["id"]
        if options.recorded or (name in known and not options.again):
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
    sides = {"timeline": "timelines of the published ones", "run": "published runs"}
    for side, (key, others) in enumerate(sides.items()):
        values = [pair[side] for pair in compared.values()]
        if not values:
            continue
        faster = sum(value >= 0 for value in values)
        kind = {"compares": "model : published" if side else "model : model"}
        kind["sample"] = "in" if side else "none"
        report(
            Result(
                f"planned layouts not slower than the {others}",
                (faster, len(values)),
                key=f"layouts_over_{key}",
                form=".0f",
                joint=" of ",
                **kind,
            ),
            Result(
                f"median gain of planned layouts over the {others}",
                100 * statistics.median(values),
                "%",
                key=f"layouts_gain_{key}",
                form=".0f",
                **kind,
            ),
            Result(
                f"smallest gain over the {others}",
                100 * min(values),
                "%",
                key=f"layouts_least_{key}",
                form=".0f",
                **kind,
            ),
            Result(
                f"largest gain over the {others}",
                100 * max(values),
                "%",
                key=f"layouts_most_{key}",
                form=".0f",
                **kind,
            ),
        )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        speed=run_speed,
        published=run_published,
        layouts=run_layouts,
    )
