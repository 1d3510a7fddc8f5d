"""Predicted training steps beside published measurements and published programs.

python benchmarks/predict.py score
python benchmarks/predict.py train
python benchmarks/predict.py rivals
python benchmarks/predict.py host-link
"""

import dataclasses
import json
import math
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from harness import PUBLISHED, Result, Subcommand, read_command_line, report, run_command

COMPILE_S = 1800.0  # a row that compiles longer is reported without a prediction


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh such as fsdp=8,zero=32; tpukit is imported here, so that --help is quick."""
    from tpukit.hardware.mesh_sizes import parse_mesh as parse

    return parse(text)


COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "score",
        "predicted steps of published runs",
        options={
            "--results": {"type": Path, "default": PUBLISHED},
            "--only": {"help": "rows whose id contains this"},
            "--compile-s": {"type": float, "default": COMPILE_S, "help": "limit for each compile"},
            "--write": {"action": "store_true", "help": "ship the rows with this package"},
            "--pieces": {"type": Path, "help": "a file that keeps what each row gave today"},
            "--recorded": {"action": "store_true", "help": "score what was written"},
        },
    ),
    Subcommand(
        "train",
        "our own step beside published ones on the same slice",
        options={
            "--only": {"default": ""},
        },
    ),
    Subcommand(
        "rivals",
        "our fp8 and MoE steps beside the published programs",
        options={
            "--results": {"type": Path, "default": PUBLISHED},
            "--only": {"default": ""},
            "--compile-s": {"type": float, "default": COMPILE_S, "help": "limit for each compile"},
            "--published-remat": {"action": "store_true", "help": "try no other remat"},
            "--recorded": {"action": "store_true", "help": "compile our program alone"},
            "--mesh": {"type": parse_mesh, "help": "of our program, where not the row's"},
        },
    ),
    Subcommand(
        "host-link",
        "bandwidth between host and chip, from published runs that offload",
        options={
            "--scheduler": {"action": "store_true", "help": "ask libtpu instead"},
        },
    ),
)

import jax
import numpy as np
from published_programs import kernel_timer
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import CompiledStep, compile_for
from tpukit.compiler.kernel_traces import trace_kernels
from tpukit.compiler.program.request import compiler_versions
from tpukit.compiler.program_flops import KernelCounter
from tpukit.compiler.timeline import Machine, StepPrediction, predict_step
from tpukit.compiler.timeline.kernels import has_own_model
from tpukit.compiler.timeline.network import waiting_share
from tpukit.errors import TPUError
from tpukit.hardware.rates import ChipRates, ScoredStep, ScoredSteps

OP_TIMES = tuple(round(0.86 + 0.01 * step, 2) for step in range(15))
SIMULATED = (0.86, 0.93, 1.0)  # the others lie between them, within 0.04 % of 18 rows
BARS = (0.04, 0.05, 0.13)  # median, mean and largest error over all rows
RANK_BAR, RANKED_ROWS = 0.85, 5  # of a generation with so many rows
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


def run_score(options):
    """Predicted against published step times, beside a baseline that compiles nothing.

    All constants of the model but two come from single ops and public microbenchmarks
    (src/tpukit/hardware/data/rates.toml). Those two, how much faster an op is inside a step than
    alone and how long slices wait for each other, are fitted here on rows that share neither
    source nor generation with the row they score; a file of runs that they were not chosen on is
    scored with them as they are shipped. The baseline knows each generation's mean MFU over the
    other rows and nothing else.

    `--write` ships the rows with what was predicted of each (hardware/data/scored_steps.json of
    the package): the band that predictions are printed with is made of them. Rows that `--only`
    leaves out stay as they were written, with the day they were predicted. Constants are fitted on
    the rows of one run: `--pieces` keeps what each row gave, so that rows can be predicted one by
    one within a day and scored together at its end. `--recorded` compiles nothing and scores what
    was written.
    """
    configure_tpu_environment()  # or jax would look for a TPU in this process
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
    known = {row["id"] for row in load_rows(PUBLISHED)}
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
        show(members, runs, chip)
        if len(members) > 2:
            pairs = [(mfu(scored[one.name].run, one), scored[one.name].run.mfu) for one in members]
            bar = RANK_BAR if len(members) >= RANKED_ROWS else None
            report(
                Result(
                    f"{chip}: rank correlation of MFU",
                    rank_correlation(pairs),
                    at_least=bar,
                    key=f"{chip}_rank",
                    form=".2f",
                    compares="model : published",
                    sample="out",
                )
            )
    plain = [one for one in counted if not is_newer(scored[one.name].run)]
    if plain and len(plain) < len(counted):
        print(f"\nlayers of one shape in bfloat16: {len(plain)} rows")
        show(plain, runs, "layers of one shape in bfloat16")
    if counted:
        band = steps.band
        print(f"\nall generations: {len(counted)} rows")
        show(list(counted), runs, "", BARS)
        report(
            Result("band of a prediction, below", 100 * band.below, "%"),
            Result("band of a prediction, above", 100 * band.above, "%"),
        )
        if len(steps.rows_by_source) > 1:
            report(
                Result(
                    "published steps inside a band made without their source",
                    (steps.covered, len(counted)),
                    key="in_band",
                    form=".0f",
                    joint=" of ",
                    compares="model : published",
                    sample="out",
                )
            )
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
    group: str,
    bars: tuple[float | None, ...] = (None, None, None),
) -> None:
    """Report errors of some rows, beside the baseline's on the same rows; "" groups all rows."""
    errors = [one.error for one in members]
    figures = {"median": statistics.median(errors), "mean": statistics.mean(errors)}
    figures["largest"] = max(errors)
    start = f"{group}_" if group else ""
    for (name, error), bar in zip(figures.items(), bars, strict=True):
        report(
            Result(
                f"predicted steps of {len(members)} published runs, {group or 'all'}, {name} error",
                100 * error,
                "%",
                at_most=bar and 100 * bar,
                key=f"{start}{name}_error".replace(" ", "_"),
                form=".1f",
                compares="model : published",
                sample="out",
            )
        )
    names = {one.name for one in members}
    guesses = [(baseline_s(run, runs), run) for run in runs if run.name in names]
    base = [abs(guess / run.step_time_s - 1) for guess, run in guesses if guess]
    if base:
        error = 100 * statistics.mean(base)
        what = f"mean error of the baseline, {group or 'all'}"
        key = f"{start}baseline".replace(" ", "_")
        report(
            Result(
                what, error, "%", key=key, form=".1f", compares="model : published", sample="out"
            )
        )


# Published row -> what to try instead of the published remat (None).
TRIED: dict[str, tuple[str | None, ...]] = {
    "tri-llama3.1-8b-v6e-8": (
        None,
        "offload=decoder_layer_input,qkv_proj,out_proj save=attention",
        "offload=decoder_layer_input,qkv_proj,out_proj,attention",
    ),
    "tri-llama3.1-8b-v6e-256": (
        None,
        "offload=decoder_layer_input,qkv_proj,out_proj save=attention",
        "offload=decoder_layer_input,qkv_proj,out_proj,attention",
    ),
    "tri-llama3.1-70b-v6e-256": (
        None,
        "offload=decoder_layer_input,qkv_proj save=attention",
        "offload=decoder_layer_input,qkv_proj,attention",
    ),
}


def run_train(options):
    """Predict our training step on TPU slices and compare it with published ones.

    Same model, slice, batch and sequence as the published run; what the backward pass keeps may be
    chosen otherwise, as a user of tpukit would. The predictor's own error on published runs is
    what `predict.py score` prints; a ratio within that error is a tie.
    """
    configure_tpu_environment()
    claims = []
    for name, candidates in TRIED.items():
        if options.only not in name:
            continue
        run = as_run(load_rows(PUBLISHED, only=name)[0])
        best = None
        for remat in candidates:
            # As published but for what a workload of ours chooses itself: its attention kernel.
            work = run.workload.replace(attention="auto")
            work = work if remat is None else work.replace(remat=remat)
            try:
                compiled = compile_for(
                    work,
                    run.slice,
                    mesh=run.mesh,
                    options=run.options,
                    until="schedule",
                    timeout_s=COMPILE_S,
                )
            except TPUError as error:
                print(f"{name} {remat or 'published remat'}: {error}")
                continue
            step = compiled.predict().step_time_s if compiled.fits else None
            gib = compiled.memory.total_bytes / 2**30
            verdict = "does not fit" if step is None else f"{step:.3f} s"
            print(
                f"{name} {remat or 'published remat'}: {gib:.2f} GiB, {verdict} "
                f"(published {run.step_time_s:.3f} s)",
                flush=True,
            )
            if step is not None and (best is None or step < best):
                best = step
        if best is not None:
            claims.append(
                Result(
                    f"our step of {name} over the published one",
                    best / run.step_time_s,
                    at_most=1.0,
                    key=f"own_{name}",
                    form=".3f",
                    compares="model : published",
                    sample="in",
                )
            )
    report(*claims)


BAR = 0.95
# What a user of tpukit may keep instead, by what the published run keeps.
INSTEAD: dict[str, tuple[str, ...]] = {
    "offload=decoder_layer_input": (
        "offload=decoder_layer_input save=expert_tokens",
        "offload=decoder_layer_input save=attention",
    ),
    "offload=decoder_layer_input,expert_rows": ("offload=decoder_layer_input save=attention",),
    "offload=decoder_layer_input,qkv_proj,out_proj": (
        "offload=decoder_layer_input,qkv_proj,out_proj,attention",
    ),
}


def is_rival(run: PublishedRun) -> bool:
    """Whether a run has experts, or products in eight bits."""
    kinds = run.workload.config.kinds.values()
    return run.precision == "fp8" or any(layer.n_experts for layer in kinds)


def published_s(run: PublishedRun, compile_s: float) -> tuple[float, dict[str, Any]]:
    """The step of the published program, and the options it is fastest with among those that fit.

    Raises:
        TPUError: It does not compile.
    """
    tried = [
        (predict_with(run, options, compile_s, op_times=()), options) for options in run.option_sets
    ]
    best, options = min(tried, key=lambda one: (not one[0].fits, one[0].step_s(FROZEN)))
    return best.step_s(FROZEN), options


def recorded_s(run: PublishedRun) -> tuple[float, dict[str, Any]]:
    """The same as it was written down, with the options that leave transfers most room."""
    step = next(one for one in ScoredSteps.shipped().steps if one.name == run.name)
    return step.predicted_s, run.option_sets[-1]


def ours_s(
    run: PublishedRun,
    mesh: dict[str, int],
    remats: tuple[str, ...],
    options: dict[str, Any],
    compile_s: float,
) -> float | None:
    """The step of our program, of the remat that is fastest and fits."""
    config = run.workload.config.replace(embedding_lookup="rows", wide_gradients=False)
    best: float | None = None
    for remat in remats:
        work = run.workload.replace(model=config, attention="auto", loss_chunks="auto", remat=remat)
        try:
            compiled = compile_for(
                work,
                run.slice,
                mesh=mesh,
                dcn_mesh_shape=run.dcn_mesh_shape,
                options=options,
                until="schedule",
                timeout_s=compile_s,
            )
        except TPUError as error:
            print(f"    {remat}: {error}", flush=True)
            continue
        found = predicted(compiled, run)
        step = found.step_time_s
        gib = compiled.memory.total_bytes / 2**30
        verdict = f"{step:.3f} s" if compiled.fits else "does not fit"
        causes = " ".join(f"{name} {s:.2f}" for name, s in found.seconds_by_cause.items())
        print(f"    ours, {remat}: {gib:.2f} GiB, {verdict} ({causes})", flush=True)
        if compiled.fits and (best is None or step < best):
            best = step
    return best


def predicted(compiled: CompiledStep, run: PublishedRun) -> StepPrediction:
    """As `CompiledStep.predict` does, on the machine that the published program is predicted on."""
    kernels = trace_kernels(
        compiled.module, compiled.slice, wanted=lambda call: not has_own_model(call)
    )
    return predict_step(
        compiled.module,
        compiled.slice,
        coordinates=compiled.coordinates,
        slice_of_device=compiled.slice_of_device,
        kernel_traces=kernels,
        machine=Machine.of(compiled.slice, reduces_at_once=run.reduces_at_once),
    )


def run_rivals(options):
    """Our fp8 and MoE steps against the published programs, both by the compiler and our predictor.

    Same model, slice, devices, batch, sequence and format of products, and the compiler options
    that are the faster ones for the published program. That is compiled as its source says
    (`published_rows.py`); ours has what a workload of ours has by itself: our attention kernels,
    our grouped products, the loss in chunks, embeddings looked up by rows, gradients as wide as
    activations; and the better of the published remat and of those named here. Both are
    predictions of one model, so its error on one row is mostly the same on both sides.
    `--recorded` takes the published program's step as `predict.py --write` left it, and compiles
    ours alone; `--mesh` is another way to divide the devices of the row for ours.
    """
    configure_tpu_environment()
    ratios: list[float] = []
    for row in load_rows(options.results, only=options.only):
        try:
            run = as_run(row)
        except NotExpressible:
            continue  # benchmarks/predict.py says why
        if not is_rival(run):
            continue
        print(f"{run.name}:", flush=True)
        try:
            known = recorded_s(run) if options.recorded else None
            rival, flags = known or published_s(run, options.compile_s)
        except TPUError as error:
            print(f"    published program: {error}")
            continue
        kept = str(run.workload.remat)
        remats = (kept, *(() if options.published_remat else INSTEAD.get(kept, ())))
        own = ours_s(run, options.mesh or run.mesh, remats, flags, options.compile_s)
        if own is None:
            continue
        ratios.append(own / rival)
        report(
            Result(
                f"{run.name}: ours / published program", ratios[-1], "×", at_most=BAR, form=".3f"
            )
        )
    if ratios:
        report(
            Result(
                f"our steps with experts or in fp8 over the published programs, {len(ratios)} rows",
                (min(ratios), max(ratios)),
                at_most=BAR,
                key="rivals",
                form=".2f",
                compares="model : model",
                sample="none",
            ),
            Result("ours / published program, median", statistics.median(ratios), "×", at_most=BAR),
        )


LOG = "vlasenkoalexey/tpu_performance_autoresearch_wiki, wiki/experiments"
RATES_GBPS = {"PCIe 4.0 x16": 28.0, "PCIe 5.0 x16": 56.0, "no limit": 1e6}


@dataclass(frozen=True)
class Case:
    """A published run, as a change to a row of the results file.

    Attributes:
        source: Its page in the log.
    """

    row: str
    source: str
    step_s: float
    changes: dict[str, Any]


CASES = (
    Case("wk-q8-mt-2k-bs4", "…/maxtext/…/2026-06-13-mt-v002-2k.md", 3.106, {"batch_size": 96}),
    Case(
        "wk-q8-mt-2k-bs4",
        "…/maxtext/…/2026-06-12-mt-v001-base.md",
        3.535,
        {"batch_size": 24, "sequence_length": 8192},
    ),
    Case(
        "wk-q8-jax-8k-bs2",
        "…/jax/…/2026-06-12-v044-context-checkpoint.md",
        2.4369,
        {"remat": "save=qkv_proj offload=attention"},
    ),
    Case(
        "wk-ll8-jax-exp27-bs4",
        "…/jax/…/2026-04-27-jax-exp36-qkv-proj-offloaded-bs4-rejected.md",
        4 * 8192 / 7641,
        {"remat": "offload=qkv_proj"},
    ),
)


COPIED_BYTES = 2**28
SMALLEST = ("v3-8", "v4-8", "v5e-4", "v5p-8", "v6e-4", "7x-2x2x1")
_OP = r'name: "[^"]+"\n\s+opcode: "copy-{}".*?\n\s+id: (\d+)\n'
_WHEN = r"id: {}\n(?:\s+start_timestamp_cycles: ([\d.]+)\n)?\s+end_timestamp_cycles: ([\d.]+)"


def scheduled_gbps(slice_name: str) -> float:
    """The rate at which libtpu's scheduler takes a copy to the host to run."""

    def through_host(x: jax.Array) -> jax.Array:
        kept = jax.device_put(x, jax.memory.Space.Host)
        return jax.device_put(kept, jax.memory.Space.Device) + x @ x

    with tempfile.TemporaryDirectory() as folder:
        compile_for(
            through_host,
            slice_name,
            jax.ShapeDtypeStruct((8192, COPIED_BYTES // 8192 // 4), "float32"),
            options={
                "xla_dump_latency_hiding_schedule": True,
                "xla_tpu_pcie_bandwidth_multiplier": 1.0,
            },
            until="schedule",
            use_cache=False,
            dump_to=Path(folder),
        )
        text = (Path(folder) / "jit_call.schedule.txt").read_text()
    program, _, schedule = text.partition("\ncomputation_schedules {")
    times: list[float] = []
    for end in ("start", "done"):
        op = re.search(_OP.format(end), program, re.DOTALL)
        when = re.search(_WHEN.format(op[1]), schedule) if op else None
        if when is None:
            raise SystemExit(f"libtpu scheduled no copy-{end} for {slice_name}")
        times.append(float(when[2]))
    clock = re.search(r"cycles_per_microsecond: ([\d.]+)", schedule)
    seconds = (times[1] - times[0]) / (float(clock[1] if clock else "nan") * 1e6)
    return COPIED_BYTES / seconds / 1e9


def run_host_link(options):
    """Which PCIe link a TPU has: what the compiler reckons with, and published runs that need it.

    Nobody has published a measured rate between a v6e and its host; the scaling book states 32
    GB/s, a PCIe 4.0 link. Four runs of a public log decide. `predict.py score` does not score
    them: their batch or remat is in no results file. A link carries 90 % of its rate.

    `--scheduler` asks libtpu alone: how long its scheduler takes a copy to the host for, by
    generation, when nothing scales that (it takes every link for a fifth as fast as it is by
    itself).
    """
    configure_tpu_environment()
    if options.scheduler:
        for name in SMALLEST:
            report(Result(f"link to the host by libtpu, {name}", scheduled_gbps(name), "GB/s"))
        return
    rows = {row["id"]: row for row in load_rows(PUBLISHED)}
    errors: dict[str, list[float]] = {name: [] for name in RATES_GBPS}
    for case in CASES:
        run = as_run(rows[case.row])
        compiled = compile_for(
            run.workload.replace(**case.changes),
            run.slice,
            mesh=run.mesh,
            options=run.options,
            until="schedule",
        )
        print(f"{LOG}/{case.source}: {case.step_s:.3f} s")
        for name, gbps in RATES_GBPS.items():
            machine = dataclasses.replace(Machine.of(run.slice), host_bytes_per_s=gbps * 1e9)
            step = predict_step(
                compiled.module,
                compiled.slice,
                coordinates=compiled.coordinates,
                slice_of_device=compiled.slice_of_device,
                machine=machine,
                kernel_timer=kernel_timer(run, machine),
            )
            ratio = step.step_time_s / case.step_s
            waits = step.seconds_by_cause.get("host", 0.0)
            print(f"  {name:<13} {step.step_time_s:.3f} s, {ratio:.3f}, {waits:.3f} s waiting")
            errors[name].append(abs(ratio - 1))
    for name, found in errors.items():
        report(
            Result(
                f"four runs that offload to the host, mean error with {name}",
                100 * sum(found) / len(found),
                "%",
                key=f"host_link_{name.replace(' ', '_')}",
                form=".1f",
                compares="model : published",
                sample="in",
            )
        )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        score=run_score,
        train=run_train,
        rivals=run_rivals,
        host_link=run_host_link,
    )
