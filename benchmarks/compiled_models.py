"""Every family of models under every mesh axis, through the TPU compiler for v5p, v6e and 7x.

    python benchmarks/compiled_models.py [--slices v6e-8] [--families deepseek-v3] [--meshes fsdp]

Training steps of models that keep their family's heads, kinds of layers and options, and have few
and narrow layers and few experts. A cell is compiled up to its schedule, with the HBM of a device
and the Pallas kernels in it (origin compiler), or refused with the reason before the compiler is
asked. Anything else is a defect: the exit code is 1. `--codegen` goes all the way.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tpukit
from tpukit.compiler import compile_for
from tpukit.compiler.kernel_traces import kernel_calls
from tpukit.errors import ShardingError, TPUError, TPUModelError
from tpukit.models import TransformerConfig, get_preset
from tpukit.step import Workload

SLICES = ("v5p-16", "v6e-8", "7x-2x2x1")  # eight devices each
NARROW = {"d_model": 1024, "d_ff": 1024, "vocab_size": 8192, "max_seq_len": 8192}
EXPERTS = {"n_experts": 8, "experts_per_token": 2, "expert_d_ff": 512}
TOKENS, BATCH = 2048, 16


def narrow(preset: str, **changes: Any) -> TransformerConfig:
    """A preset with few, narrow layers; kinds of layers change in the fields they name."""
    given = get_preset(preset)
    kinds = {name: dict(fields) for name, fields in given.layer_kinds.items()}
    for name, fields in changes.pop("kinds", {}).items():
        kinds[name] |= fields
    return given.replace(**{**NARROW, **changes}, layer_kinds=kinds)


FAMILIES: dict[str, TransformerConfig] = {
    "deepseek-v3": narrow(
        "deepseek-v3",
        n_layers=5,
        n_heads=8,
        n_kv_heads=8,
        mtp_layers=1,
        layer_pattern="dense then moe",
        kinds={"moe": {**EXPERTS, "shared_d_ff": 512, "router_groups": 4, "router_groups_kept": 2}},
    ),
    "qwen3-next": narrow(
        "qwen3-next-80b-a3b",
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        **EXPERTS,
        shared_d_ff=512,
        layer_pattern="linear, full",
        kinds={
            "linear": {
                "delta": {"key_heads": 4, "value_heads": 8, "key_dim": 128, "value_dim": 128}
            }
        },
    ),
    "gpt-oss": narrow("gpt-oss-120b", n_layers=4, n_heads=16, n_kv_heads=4, **EXPERTS),
    "gemma4-31b": narrow(
        "gemma4-31b",
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        layer_pattern="local, global",
        kinds={"global": {"n_kv_heads": 4}},
    ),
    "gemma4-26b-a4b": narrow(
        "gemma4-26b-a4b",
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        **EXPERTS,
        layer_pattern="local, global",
        kinds={"global": {"n_kv_heads": 4}},
    ),
    "gemma4-e2b": narrow(
        "gemma4-e2b",
        n_layers=4,
        n_heads=4,
        n_kv_heads=1,
        layer_pattern="local, global then reading_local, reading_global",
        kinds={"reading_local": {"d_ff": 2048}, "reading_global": {"d_ff": 2048}},
    ),
    "llama4": narrow(
        "llama4-scout",
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        **{**EXPERTS, "experts_per_token": 1},
        shared_d_ff=512,
        layer_pattern="chunked, global",
        kinds={"chunked": {"attention_chunk": 1024}},
    ),
}


@dataclass(frozen=True)
class Layout:
    """A mesh of eight devices, and the strategy that uses its axes."""

    strategy: str
    mesh: dict[str, int]
    microbatches: int = 1


LAYOUTS = {
    "fsdp": Layout("fsdp", {"fsdp": 8}),
    "tensor": Layout("fsdp+megatron", {"fsdp": 2, "tensor": 4}),
    "expert": Layout("fsdp+expert", {"fsdp": 2, "expert": 4}),
    "expert, tensor": Layout("fsdp+expert+megatron", {"fsdp": 2, "expert": 2, "tensor": 2}),
    "context": Layout("fsdp+context", {"fsdp": 2, "context": 4}),
    "pipeline": Layout("pipeline+fsdp", {"stage": 2, "fsdp": 4}, microbatches=4),
}


@dataclass(frozen=True)
class Cell:
    """What became of one family on one mesh of one slice."""

    family: str
    layout: str
    slice: str
    outcome: str  # "compiled", "refused" (before the compiler was asked) or "failed"
    seconds: float
    reason: str = ""
    hbm_bytes: int | None = None
    kernels: dict[str, int] | None = None  # calls by name; a loop's body counts once

    def __str__(self) -> str:
        if self.outcome != "compiled":
            return f"{self.outcome}: {self.reason}"
        assert self.hbm_bytes is not None
        assert self.kernels is not None
        found = ", ".join(self.kernels) or "no kernels"
        return f"{self.hbm_bytes / 2**30:.2f} GiB; {found}"


def workload(family: str, layout: str) -> Workload:
    """The training step of one cell."""
    how = LAYOUTS[layout]
    return Workload(
        FAMILIES[family],
        batch_size=BATCH,
        sequence_length=TOKENS,
        strategy=how.strategy,
        microbatches=how.microbatches,
        remat="full",
    )


def compile_cell(family: str, layout: str, on: str, *, until: Any = "schedule") -> Cell:
    """Compile one cell, or say why there is no such program."""
    began = time.monotonic()

    def cell(outcome: str, **rest: Any) -> Cell:
        return Cell(family, layout, on, outcome, round(time.monotonic() - began, 1), **rest)

    try:
        work = workload(family, layout)
        compiled = compile_for(work, on, mesh=LAYOUTS[layout].mesh, until=until)
    except (ShardingError, TPUModelError) as error:
        return cell("refused", reason=str(error))
    except TPUError as error:
        return cell("failed", reason=str(error))
    if not compiled.fits:
        return cell("failed", reason="does not fit")
    calls = Counter(call.name.split(".")[0] for call, _ in kernel_calls(compiled.module))
    return cell(
        "compiled", hbm_bytes=compiled.memory.total_bytes, kernels=dict(sorted(calls.items()))
    )


def table_of(cells: list[Cell]) -> Table:
    """One line for each family and mesh, a column for each slice."""
    slices = list(dict.fromkeys(cell.slice for cell in cells))
    table = Table("family", "mesh", *slices)
    by_place = {(cell.family, cell.layout, cell.slice): cell for cell in cells}
    for family, layout in dict.fromkeys((cell.family, cell.layout) for cell in cells):
        row = [by_place.get((family, layout, one)) for one in slices]
        table.add_row(family, layout, *("-" if cell is None else str(cell) for cell in row))
    return table


def main() -> int:
    """Compile every cell that is asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", default=",".join(SLICES))
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--meshes", default=";".join(LAYOUTS), help="apart by semicolons")
    parser.add_argument("--codegen", action="store_true", help="generate code too")
    parser.add_argument("--json", type=Path, help="write the cells here too")
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    console, cells = Console(width=180), list[Cell]()
    for family in asked.families.split(","):
        for layout in asked.meshes.split(";"):
            if "expert" in layout and not FAMILIES[family].has_experts:
                continue
            for on in asked.slices.split(","):
                until = "codegen" if asked.codegen else "schedule"
                cell = compile_cell(family, layout, on, until=until)
                cells.append(cell)
                print(f"{family} {layout} {on} ({cell.seconds} s): {cell}", flush=True)
                if asked.json:
                    found = [asdict(one) for one in cells]
                    asked.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    console.print(table_of(cells))
    return int(any(cell.outcome == "failed" for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
