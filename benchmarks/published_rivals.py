"""Our fp8 and MoE steps against the published programs, both by the compiler and our predictor.

    python benchmarks/published_rivals.py [--only 70b] [--results FILE] [--published-remat]
                                          [--recorded] [--mesh fsdp=8,zero=32]

Same model, slice, devices, batch, sequence and format of products, and the compiler options that
are the faster ones for the published program. That is compiled as its source says
(`published_rows.py`); ours has what a workload of ours has by itself: our attention kernels, our
grouped products, the loss in chunks, embeddings looked up by rows, gradients as wide as
activations; and the better of the published remat and of those named here. Both are predictions of
one model, so its error on one row is mostly the same on both sides. `--recorded` takes the
published program's step as `predict.py --write` left it, and compiles ours alone; `--mesh` is
another way to divide the devices of the row for ours.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from claims import Claim, report
from predict import COMPILE_S, DEFAULT_RESULTS, FROZEN, predict_with
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import CompiledStep, compile_for
from tpukit.compiler.kernel_traces import trace_kernels
from tpukit.compiler.timeline import Machine, StepPrediction, predict_step
from tpukit.compiler.timeline.kernels import has_own_model
from tpukit.errors import TPUError
from tpukit.hardware.mesh_sizes import parse_mesh
from tpukit.hardware.scored_steps import ScoredSteps

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


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--compile-s", type=float, default=COMPILE_S, help="limit for each compile")
    parser.add_argument("--published-remat", action="store_true", help="try no other remat")
    parser.add_argument("--recorded", action="store_true", help="compile our program alone")
    parser.add_argument("--mesh", type=parse_mesh, help="of our program, where not the row's")
    asked = parser.parse_args()
    ratios: list[float] = []
    for row in load_rows(asked.results, only=asked.only):
        try:
            run = as_run(row)
        except NotExpressible:
            continue  # benchmarks/predict.py says why
        if not is_rival(run):
            continue
        print(f"{run.name}:", flush=True)
        try:
            known = recorded_s(run) if asked.recorded else None
            rival, options = known or published_s(run, asked.compile_s)
        except TPUError as error:
            print(f"    published program: {error}")
            continue
        kept = str(run.workload.remat)
        remats = (kept, *(() if asked.published_remat else INSTEAD.get(kept, ())))
        own = ours_s(run, asked.mesh or run.mesh, remats, options, asked.compile_s)
        if own is None:
            continue
        ratios.append(own / rival)
        report(Claim(f"{run.name}: ours / published program", ratios[-1], "x", at_most=BAR))
    if ratios:
        report(
            Claim("ours / published program, rows", len(ratios), ""),
            Claim("ours / published program, median", statistics.median(ratios), "x", at_most=BAR),
        )


if __name__ == "__main__":
    main()
