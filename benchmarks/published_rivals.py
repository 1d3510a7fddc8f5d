"""Our fp8 and MoE steps against the published programs, both by the compiler and our predictor.

    python benchmarks/published_rivals.py [--only 70b] [--results FILE]

Same model, slice, mesh, batch, sequence and format of products. The published program is compiled
as its source says (`published_rows.py`); ours has what a workload of ours has by itself: our
attention kernels, the loss in chunks, embeddings looked up by rows, gradients as wide as
activations; and the better of the published remat and of those named here. Both are predictions of
one model, so its error on one row is mostly the same on both sides.
"""

import argparse
import statistics
from pathlib import Path

from claims import Claim, report
from predict import COMPILE_S, DEFAULT_RESULTS, FROZEN, predict
from published_rows import NotExpressible, PublishedRun, as_run, load_rows

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.errors import TPUError

BAR = 0.95
# What a user of tpukit may keep instead, by what the published run keeps.
INSTEAD: dict[str, tuple[str, ...]] = {
    "offload=decoder_layer_input": ("offload=decoder_layer_input save=attention",),
    "offload=decoder_layer_input,expert_rows": ("offload=decoder_layer_input save=attention",),
    "offload=decoder_layer_input,qkv_proj,out_proj": (
        "offload=decoder_layer_input,qkv_proj,out_proj,attention",
    ),
}


def is_rival(run: PublishedRun) -> bool:
    """Whether a run has experts, or products in eight bits."""
    kinds = run.workload.config.kinds.values()
    return run.precision == "fp8" or any(layer.n_experts for layer in kinds)


def ours_s(run: PublishedRun, compile_s: float) -> float | None:
    """The step of our program, of the remat that is fastest and fits."""
    config = run.workload.config.replace(embedding_lookup="rows", wide_gradients=False)
    published = str(run.workload.remat)
    best: float | None = None
    for remat in (published, *INSTEAD.get(published, ())):
        work = run.workload.replace(model=config, attention="auto", loss_chunks="auto", remat=remat)
        try:
            compiled = compile_for(
                work,
                run.slice,
                mesh=run.mesh,
                dcn_mesh_shape=run.dcn_mesh_shape,
                options=run.options,
                until="schedule",
                timeout_s=compile_s,
            )
        except TPUError as error:
            print(f"    {remat}: {error}", flush=True)
            continue
        step = compiled.predict().step_time_s
        gib = compiled.memory.total_bytes / 2**30
        verdict = f"{step:.3f} s" if compiled.fits else "does not fit"
        print(f"    ours, {remat}: {gib:.2f} GiB, {verdict}", flush=True)
        if compiled.fits and (best is None or step < best):
            best = step
    return best


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--compile-s", type=float, default=COMPILE_S, help="limit for each compile")
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
            rival = predict(run, compile_s=asked.compile_s).step_s(FROZEN)
        except TPUError as error:
            print(f"    published program: {error}")
            continue
        own = ours_s(run, asked.compile_s)
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
