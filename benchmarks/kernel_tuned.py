"""Tune the blocks that tpukit ships, or show what tuning gained, by op, shape and generation.

    python benchmarks/kernel_tuned.py                                   # what is shipped
    python benchmarks/kernel_tuned.py --tune [--ops OP,… [--cases …]] [--chips …] [--seconds 120]

`--tune` climbs from the default blocks by static timing (origin model), as `tpukit kernel tune`
does for one op, and writes `src/tpukit/kernels/<op>/data/<chip>.json`. Estimates are kept on disk,
so a run that was cut short goes on where it stopped.
"""

import argparse

from rich.console import Console
from rich.table import Table

import tpukit

CHIPS = "v5e,v5p,v6e,7x"
# The cases of each op that are common in training and serving. Forward alone: kernels without a
# backward pass of their own, and those that dispatch takes where no gradient is asked for.
SHIPPED: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("llama3_8b_2048",),
    "flash_attention": (
        "causal_4096x128_bfloat16",
        "causal_8192x128_bfloat16",
        "window1024_4096x128_bfloat16",
        "causal_2048x128_bfloat16",
        "causal_4096x256_bfloat16",
    ),
    "gated_activation": ("bfloat16_8192x14336",),
    "gated_delta": ("bfloat16_1x4096_16on32x128",),
    "gated_mlp": ("bfloat16_128x4096x14336",),
    "gemm": ("int8_4096", "fp8_4096"),
    "grouped_matmul": ("mixtral_8x7b", "qwen3_30b_a3b"),
    "layer_norm": ("bfloat16_8192x4096", "bfloat16_16384x2048", "bfloat16_8192x8192"),
    "moe_gating": ("mixtral_8x7b", "qwen3_30b_a3b"),
    "quantized_matmul": ("int8_bfloat16_16x4096x14336", "int4_bfloat16_16x4096x14336"),
    "residual_norm": ("bfloat16_8192x4096", "bfloat16_16384x2048"),
    "rms_norm": ("bfloat16_8192x4096", "bfloat16_16384x2048", "bfloat16_8192x8192"),
    "rope": ("bfloat16_4x4096x32x128",),
}
FORWARD_ALONE = ("cross_entropy", "gated_mlp", "gemm", "moe_gating", "quantized_matmul")


def main() -> int:
    """Tune what is asked for, then show everything that is shipped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="tune and write; else only show")
    parser.add_argument("--ops", default=",".join(SHIPPED))
    parser.add_argument("--cases", help="of those ops; all that are shipped by default")
    parser.add_argument("--chips", default=CHIPS)
    parser.add_argument("--seconds", type=float, help="for each case and generation, at most")
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    console = Console(width=150)
    if asked.tune:
        tune(asked, console)
    console.print(shipped(asked))
    return 0


def tune(asked: argparse.Namespace, console: Console) -> None:
    """Search each case on each generation, and keep the choice at once."""
    from tpukit.errors import TPUKernelError
    from tpukit.kernels.registry.registry import get_tpu_op
    from tpukit.kernels.tuning import tune_op

    for name in asked.ops.split(","):
        op = get_tpu_op(name)
        wanted = asked.cases.split(",") if asked.cases else SHIPPED[name]
        for case in map(op.case, wanted):
            for chip in asked.chips.split(","):
                try:
                    found = tune_op(
                        op,
                        case,
                        chip,
                        gradient=name not in FORWARD_ALONE,
                        seconds=asked.seconds,
                    )
                except TPUKernelError as error:  # eight bits that the generation has not
                    console.print(f"{name} {case.name} on {chip}: {error}")
                    continue
                found.save()
                console.print(found)


def shipped(asked: argparse.Namespace) -> Table:
    """What the data files say: the time by default and as tuned, and how many were tried."""
    from tpukit.kernels.blocks.tuned import data_folder, load_tuned

    table = Table("op", "bucket", "chip", "default us", "tuned us", "gain", "tried", title="model")
    for name in asked.ops.split(","):
        for chip in asked.chips.split(","):
            for entry in load_tuned(data_folder(name), chip).values():
                usual = entry.default_us or float("nan")
                gain = f"{usual / entry.time_us - 1:.1%}" if usual > entry.time_us else "default"
                figures = (f"{usual:.1f}", f"{entry.time_us:.1f}", gain, str(entry.tried))
                table.add_row(name, entry.bucket, chip, *figures)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
