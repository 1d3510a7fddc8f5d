"""The memory model against the compiler's own figure, on preset models: error of each and median.

    python benchmarks/memory_estimate.py [--only llama] [--lora]

The compiler's figure is the total of its buffer assignment, the one its out-of-memory test uses.
The amounts in the model were read off the reports of the cases that are not `held_out`; those that
are were compiled afterwards and changed nothing.
"""

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from claims import Claim, report

from tpukit import Slice, Workload, compile_for, configure_tpu_environment, get_preset
from tpukit.errors import TPUError
from tpukit.job import Job
from tpukit.job.step import build_step
from tpukit.parallel.sharding.strategy import strategy_for
from tpukit.planner.cost.memory_model import MeshRoles, estimate_memory_bytes, rounds_first
from tpukit.planner.cost.model_shape import shape_of
from tpukit.step import OptimizerSpec, build_optimizer
from tpukit.step.optimizer.spec import state_bytes_per_parameter

ADAMW, INT8_MOMENTS = OptimizerSpec(), OptimizerSpec(moment_dtype="int8")
LION = OptimizerSpec(name="lion", moment_dtype="bfloat16")
ADAFACTOR = OptimizerSpec(name="adafactor")


@dataclass(frozen=True)
class Case:
    model: str
    slice: str
    per_device: int
    sequence: int
    remat: str = "full"
    tensor: int = 1
    fsdp: int = 8
    expert: int = 1
    microbatches: int = 1
    optimizer: OptimizerSpec = ADAMW
    lora: dict[str, Any] | None = None
    held_out: bool = False


QUERIES_AND_VALUES = {"rank": 64, "targets": ["q_proj", "v_proj"]}
FLOAT8_BASE, INT4_BASE = {"rank": 16, "base": "fp8"}, {"rank": 16, "base": "int4"}
KEEP_MOST = "save=qkv_proj,attention,out_proj,mlpwi"
CASES = (
    Case("llama3.2-1b", "v6e-8", 4, 2048),
    Case("llama3.2-1b", "v6e-8", 2, 2048, "minimal"),
    Case("llama3.2-1b", "v6e-8", 1, 2048, "none"),
    Case("mistral-7b", "v6e-8", 2, 4096),
    Case("llama3.1-8b", "v6e-8", 2, 2048),
    Case("llama3.1-8b", "v6e-8", 2, 8192),
    Case("llama3.1-8b", "v5p-16", 4, 8192),
    Case("llama3.1-8b", "v5p-16", 2, 4096, "minimal"),
    Case("llama3.1-8b", "v6e-16", 2, 8192, tensor=2),
    Case("qwen3-8b", "v6e-8", 4, 2048),
    Case("llama3.1-70b", "v6e-64", 1, 4096, fsdp=64),
    Case("mixtral-8x7b", "v6e-64", 1, 4096, fsdp=64),
    Case("llama3.1-8b", "v6e-8", 4, 2048, microbatches=2),
    Case("llama3.1-8b", "v6e-8", 2, 8192, "offload=decoder_layer_input"),
    Case("llama3.1-8b", "v5p-16", 1, 2048, "none"),
    Case("gemma3-12b", "v6e-16", 1, 4096, fsdp=16),
    Case("llama2-7b", "v5p-16", 4, 4096, "minimal"),
    Case("maxtext2023-16B", "v5p-32", 2, 2048, fsdp=16),
    Case("small-1b", "v5litepod-4", 2, 2048, fsdp=4),
    Case("llama3.1-8b", "v5p-16", 4, 8192, "save=attention"),
    Case("llama3.1-8b", "v5p-16", 2, 4096, KEEP_MOST),
    Case("qwen3-8b", "v5p-16", 1, 8192, KEEP_MOST),
    Case("qwen3-8b", "v5litepod-16", 1, 4096, fsdp=16, held_out=True),
    Case("llama2-70b", "v5p-128", 1, 4096, fsdp=64, held_out=True),
    Case("mistral-7b", "v6e-16", 2, 8192, "save=attention", fsdp=16, held_out=True),
    Case("llama3.1-8b", "v6e-8", 2, 8192, optimizer=LION, held_out=True),
    Case("llama3.1-8b", "v6e-8", 2, 8192, optimizer=ADAFACTOR, held_out=True),
    Case("llama3.1-8b", "v6e-8", 2, 8192, optimizer=INT8_MOMENTS, held_out=True),
    Case("llama3.1-8b", "v5p-16", 4, 8192, optimizer=INT8_MOMENTS, held_out=True),
    # Layers of several kinds: latent attention and a leading dense layer, sinks and windows, two
    # sizes of heads with embeddings of each layer, dense blocks beside experts, linear attention.
    Case("deepseek-v2-lite", "v5p-32", 2, 4096, fsdp=16, held_out=True),
    Case("gpt-oss-20b", "v5p-32", 2, 4096, fsdp=16),
    Case("gemma4-e4b", "v5p-16", 1, 4096, held_out=True),
    Case("gemma4-26b-a4b", "v5p-32", 2, 4096, fsdp=16),
    Case("gemma4-26b-a4b", "v6e-16", 2, 4096, fsdp=16),
    Case("gemma4-31b", "v5p-32", 2, 4096, fsdp=16, held_out=True),
    Case("qwen3-next-80b-a3b", "v5p-128", 1, 4096, fsdp=64),
    Case("gpt-oss-20b", "v5p-32", 2, 4096, fsdp=4, expert=4),
    Case("gpt-oss-120b", "v5p-128", 2, 4096, fsdp=16, expert=4, held_out=True),
    Case("deepseek-v2-lite", "v5p-32", 2, 4096, fsdp=4, expert=4),
    # Adapters alone trained, beside weights in bfloat16 or quantized.
    Case("llama3.2-1b", "v6e-8", 4, 2048, lora={"rank": 16}),
    Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16}),
    Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int8"}),
    Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int4"}),
    Case("llama3.1-8b", "v6e-1", 1, 2048, fsdp=1, lora={"rank": 16, "base": "int4"}),
    Case("llama3.1-8b", "v5p-16", 4, 8192, lora=QUERIES_AND_VALUES),
    Case("qwen3-8b", "v6e-8", 1, 8192, "save=attention", lora=FLOAT8_BASE, held_out=True),
    Case("llama3.1-70b", "v6e-16", 1, 4096, fsdp=16, lora=INT4_BASE, held_out=True),
    Case("mistral-7b", "v5litepod-8", 1, 4096, lora={"rank": 32}, held_out=True),
)


def workload(case: Case, mesh: dict[str, int]) -> Workload:
    if case.lora is not None:
        job = Job(
            model=case.model,
            on=case.slice,
            mesh=mesh,
            batch_size=case.per_device * case.fsdp,
            sequence_length=case.sequence,
            remat=case.remat,
            train={"lora": case.lora},
        )
        return build_step(job, values=False).work
    return Workload(
        case.model,
        batch_size=case.per_device * case.fsdp * case.expert,
        sequence_length=case.sequence,
        remat=case.remat,
        strategy=strategy_for(mesh),
        microbatches=case.microbatches,
        optimizer=build_optimizer(case.optimizer, 3e-4),
    )


def measure(case: Case) -> tuple[float, float]:
    """Estimated and compiled bytes of one device."""
    beside = {"tensor": case.tensor, "expert": case.expert}
    mesh = {"fsdp": case.fsdp} | {axis: size for axis, size in beside.items() if size > 1}
    work = workload(case, mesh)
    compiled = compile_for(work, case.slice, mesh=mesh, until="memory", timeout_s=300)
    shape = shape_of(get_preset(case.model), work.lora)
    estimate = estimate_memory_bytes(
        shape,
        MeshRoles(fsdp=case.fsdp, tensor=case.tensor, expert=case.expert),
        per_device_batch=case.per_device,
        sequence_length=case.sequence,
        remat=case.remat,
        microbatches=case.microbatches,
        optimizer_bytes=state_bytes_per_parameter(case.optimizer, shape.trained_shapes),
        whole_copy=rounds_first(Slice.parse(case.slice).chip.name),
    )
    split = "  ".join(f"{k} {v / 2**30:.2f}" for k, v in estimate.to_dict().items())
    purposes = "  ".join(
        f"{k} {v / 2**30:.2f}" for k, v in compiled.memory.purposes.items() if v > 2**24
    )
    print(f"    model    {split}\n    compiler {purposes}", flush=True)
    return float(estimate.total), float(compiled.memory.total_bytes)


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--experts", action="store_true", help="cases with an expert axis alone")
    parser.add_argument("--lora", action="store_true", help="cases of adapters alone")
    asked = parser.parse_args()
    errors: dict[tuple[bool, bool], list[float]] = {}
    for case in CASES:
        named = asked.only in case.model and (case.expert > 1 or not asked.experts)
        if not named or (asked.lora and case.lora is None):
            continue
        try:
            estimated, compiled = measure(case)
        except TPUError as error:
            print(f"{case}: {error}")
            continue
        off = estimated / compiled - 1
        errors.setdefault((case.lora is not None, case.held_out), []).append(abs(off))
        print(
            f"{case.model:<14} {case.slice:<8} experts on {case.expert} "
            f"batch {case.per_device} x {case.sequence} "
            f"{case.remat:<8} {case.optimizer.name} {case.optimizer.moment_dtype} "
            f"{'' if case.lora is None else f'lora {case.lora} '}"
            f"model {estimated / 2**30:6.2f}  compiler {compiled / 2**30:6.2f} GiB "
            f"{100 * off:+.1f} %{'  held out' if case.held_out else ''}",
            flush=True,
        )
    for (adapters, held_out), some in errors.items():
        which = "held-out cases" if held_out else "cases it was made from"
        which += " of adapters" if adapters else ""
        median, largest = 100 * statistics.median(some), 100 * max(some)
        report(
            Claim(f"memory model, median error, {which}", median, "%"),
            Claim(f"memory model, largest error, {which}", largest, "%", at_most=10),
        )


if __name__ == "__main__":
    main()
