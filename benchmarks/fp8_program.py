"""Our step in bfloat16 and in static fp8 on TPU7x, by the real compiler: memory, gathers, step.

    python benchmarks/fp8_program.py [--only llama3.1-8b] [--layers N]

No TPU is needed. Bytes moved are those that gathers and permutes make on one device in a step, by
number format, loops counted as often as they run; the predicted step is our predictor's, whose
error on published runs `benchmarks/predict.py` prints. With `--layers` the model is cut to so many,
which compiles faster; shares of a step are then not those of the whole model.
"""

import argparse
from collections import Counter

from claims import Claim, report

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.compiler.hlo import Computation, HloModule, trip_count
from tpukit.compiler.hlo.collectives import kind_of
from tpukit.models import get_preset
from tpukit.step import Workload

# model -> slice, examples of 8192 tokens, what the backward pass recomputes
PROGRAMS = {
    "llama3.1-8b": ("tpu7x-2x2x2", 16, "full"),
    "llama3.1-70b": ("tpu7x-4x4x4", 128, "full"),
    "mixtral-8x7b": ("tpu7x-2x2x4", 32, "full"),
}
LENGTH = 8192
FORMATS = {"bf16": "dtype", "fp8 static": "float8_static"}
MOVES = ("all-gather", "collective-permute")
# As the planner writes for a mesh without a tensor axis: products with gathered weights stay whole.
OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
COMPILE_S = 1800


def moved_bytes(module: HloModule) -> Counter[str]:
    """Bytes that gathers and permutes of one run make on a device, by number format."""
    found: Counter[str] = Counter()

    def visit(computation: Computation, times: int) -> None:
        for instruction in computation:
            if kind_of(instruction.opcode) in MOVES:
                whole = max(instruction.shapes, key=lambda shape: shape.bytes)
                found[whole.dtype] += times * whole.bytes
            elif not instruction.opcode.endswith(("-done", "-update")):
                loops = 1
                if instruction.opcode == "while":
                    loops = trip_count(instruction, computation, module) or 1
                for called in module.called_by(instruction):
                    visit(called, times * loops)

    visit(module.entry, 1)
    return found


def compare(model: str, layers: int | None) -> list[Claim]:
    """Compile one model in both formats."""
    on, examples, remat = PROGRAMS[model]
    cut = {} if layers is None else {"n_layers": layers}
    steps: dict[str, float] = {}
    moved: dict[str, int] = {}
    for name, matmul in FORMATS.items():
        work = Workload(
            get_preset(model, matmul=matmul, **cut),
            batch_size=examples,
            sequence_length=LENGTH,
            remat=remat,
        )
        compiled = compile_for(
            *(work, on),
            mesh={"fsdp": -1},
            options=OPTIONS,
            until="schedule",
            timeout_s=COMPILE_S,
        )
        found = moved_bytes(compiled.module)
        steps[name] = compiled.predict().step_time_s
        moved[name] = found.total()
        by_format = ", ".join(f"{dtype} {size / 1e9:.2f} GB" for dtype, size in found.most_common())
        print(
            f"{model} on {on}, {name}: {compiled.memory.total_bytes / 2**30:.2f} GiB, predicted "
            f"step {steps[name]:.4f} s, moved {moved[name] / 1e9:.2f} GB ({by_format})",
            flush=True,
        )
    wide, narrow = FORMATS
    return [
        Claim(f"{model}: fp8 static / bf16, step", steps[narrow] / steps[wide], "x", at_most=1.0),
        Claim(f"{model}: fp8 static / bf16, moved", moved[narrow] / moved[wide], "x"),
    ]


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", type=int)
    asked = parser.parse_args()
    for model in PROGRAMS:
        if asked.only in model:
            report(*compare(model, asked.layers))


if __name__ == "__main__":
    main()
