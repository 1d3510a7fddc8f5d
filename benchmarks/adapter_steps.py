"""Steps that train adapters alone: time by the planner's arithmetic beside the compiled schedule's.

    python benchmarks/adapter_steps.py [--only TEXT] [--whole]

Both are of the same step: the one that `tpukit train` runs with `train: {lora: …}`. No rate was
fitted to any of them. With `--whole` adapters lie whole on every device instead of being cut like
their weights: what cutting them saves and costs is the difference.
"""

import argparse

import numpy as np
from claims import Claim, report
from memory_estimate import QUERIES_AND_VALUES, Case, workload

from tpukit import Slice, compile_for, configure_tpu_environment, get_preset
from tpukit.models.lora import low_rank
from tpukit.parallel.sharding.layout import make_layout
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.torus import place_axes
from tpukit.planner.search.candidates import PRECISIONS, Candidates
from tpukit.planner.search.scoring import score
from tpukit.planner.search.slice_meshes import SliceMesh
from tpukit.step import workload as workloads

COMPILE_S = 900
EVERYWHERE = [("", ())]
CASES = {
    "llama3.1-8b in bf16": Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16}),
    "llama3.1-8b in int8": Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int8"}),
    "llama3.1-8b in int4": Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int4"}),
    "llama3.1-8b, q and v": Case("llama3.1-8b", "v6e-8", 2, 8192, lora=QUERIES_AND_VALUES),
    "llama3.1-70b in int4": Case(
        "llama3.1-70b", "v6e-16", 1, 4096, fsdp=16, lora={"rank": 16, "base": "int4"}
    ),
    "llama3.2-1b on v5e": Case("llama3.2-1b", "v5litepod-8", 4, 2048, lora={"rank": 16}),
}


def counted_s(case: Case) -> float:
    """Seconds of the step by arithmetic."""
    slice, sizes = Slice.parse(case.slice), {"fsdp": case.fsdp}
    candidate = Candidates(
        meshes=(SliceMesh(slice, sizes, place_axes(slice, sizes)),),
        mesh=np.zeros(1, int),
        batch=np.asarray([case.per_device]),
        microbatches=np.ones(1, int),
        remat=np.zeros(1, int),
        precision=np.asarray([PRECISIONS.index("bf16")]),
        optimizer=np.zeros(1, int),
        remats=(case.remat,),
    )
    lora = workload(case, sizes).lora
    shape = shape_of(get_preset(case.model), lora)
    found = score(shape, candidate, sequence_length=case.sequence)
    return float(found.step_time_s[0])


def scheduled_s(case: Case) -> float:
    """Seconds of the step by the compiled schedule."""
    mesh = {"fsdp": case.fsdp}
    compiled = compile_for(
        workload(case, mesh), case.slice, mesh=mesh, until="schedule", timeout_s=COMPILE_S
    )
    print(f"    {compiled.memory.total_bytes / 2**30:.2f} GiB a device by the compiler")
    return compiled.predict().step_time_s


def lay_whole() -> None:
    """Have every device hold all adapters, and gather none."""
    workloads.thin_layout = lambda params, base: make_layout(
        params, base.mesh, None, rules=EVERYWHERE
    )
    low_rank.constrain = lambda x, *axes: x


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--whole", action="store_true", help="adapters whole on every device")
    asked = parser.parse_args()
    if asked.whole:
        lay_whole()
    for name, case in CASES.items():
        if asked.only not in name:
            continue
        counted, scheduled = counted_s(case), scheduled_s(case)
        print(f"{name:<22} {case.slice:<12} arithmetic {counted:.3f} s, schedule {scheduled:.3f} s")
        off = 100 * (counted / scheduled - 1)
        if not asked.whole:
            report(Claim(f"adapters, step by arithmetic over the schedule's, {name}", off, "%"))


if __name__ == "__main__":
    main()
