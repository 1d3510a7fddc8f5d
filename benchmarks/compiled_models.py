"""Every family of models under every mesh axis, through the TPU compiler for v5p, v6e and 7x.

    python benchmarks/compiled_models.py                      # what was found
    python benchmarks/compiled_models.py --compile [--again]
        [--slices v6e-8] [--families deepseek-v3] [--meshes fsdp]

Training steps of models that keep their family's heads, kinds of layers and options, and have few
and narrow layers and few experts. A cell is compiled up to its schedule, with the HBM of a device
and the Pallas kernels in it (origin compiler), or refused with the reason before the compiler is
asked. Anything else is a defect: the exit code is 1. `--codegen` goes all the way.

`--compile` writes every cell to data/compiled_models.json as it ends, and leaves out those that
compiled before unless `--again` is given: a run that was cut goes on where it ended.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from claims import Claim, report
from rich.console import Console
from rich.table import Table

import tpukit
from tpukit.compiler import compile_for
from tpukit.compiler.kernel_traces import kernel_calls
from tpukit.errors import ShardingError, TPUError, TPUModelError
from tpukit.models import TransformerConfig, get_preset
from tpukit.runtime.files import write_text
from tpukit.step import Workload

SLICES = ("v5p-16", "v6e-8", "7x-2x2x1")  # eight devices each
NARROW = {"d_model": 1024, "d_ff": 1024, "vocab_size": 8192, "max_seq_len": 8192}
EXPERTS = {"n_experts": 8, "experts_per_token": 2, "expert_d_ff": 512}
TOKENS, BATCH = 2048, 16
DATA = Path(__file__).parent / "data" / "compiled_models.json"


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
    libtpu: str
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
        took = round(time.monotonic() - began, 1)
        return Cell(family, layout, on, outcome, took, libtpu=version("libtpu"), **rest)

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


def asked_cells(asked: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Family, mesh and slice of every cell that is asked for and makes sense."""
    return [
        (family, layout, on)
        for family in asked.families.split(",")
        for layout in asked.meshes.split(";")
        for on in asked.slices.split(",")
        if "expert" not in layout or FAMILIES[family].has_experts
    ]


def load() -> dict[tuple[str, str, str], Cell]:
    """What was found before, by family, mesh and slice."""
    rows = json.loads(DATA.read_text("utf-8")) if DATA.exists() else []
    cells = [Cell(**row) for row in rows]
    return {(cell.family, cell.layout, cell.slice): cell for cell in cells}


def save(cells: dict[tuple[str, str, str], Cell]) -> None:
    """Keep what was found, in the order of families, meshes and slices."""
    order: list[list[str]] = [list(FAMILIES), list(LAYOUTS), list(SLICES)]
    places = sorted(cells, key=lambda at: [o.index(x) for o, x in zip(order, at, strict=True)])
    lines = [json.dumps(asdict(cells[place])) for place in places]
    write_text(DATA, "[\n" + ",\n".join(lines) + "\n]\n")


def main() -> int:
    """Compile what is asked for, show it; 1 where a cell failed or was never compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", default=",".join(SLICES))
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--meshes", default=";".join(LAYOUTS), help="apart by semicolons")
    parser.add_argument("--compile", action="store_true", help="what was not compiled before")
    parser.add_argument("--again", action="store_true", help="what was compiled before too")
    parser.add_argument("--codegen", action="store_true", help="generate code too")
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    wanted, cells = asked_cells(asked), load()
    for place in wanted if asked.compile else []:
        known = cells.get(place)
        if known is not None and known.outcome == "compiled" and not asked.again:
            continue
        cells[place] = compile_cell(*place, until="codegen" if asked.codegen else "schedule")
        print(f"{' '.join(place)} ({cells[place].seconds} s): {cells[place]}", flush=True)
        save(cells)
    found = [cells[place] for place in wanted if place in cells]
    Console(width=180).print(table_of(found))
    outcomes = Counter(cell.outcome for cell in found)
    report(
        Claim("cells asked for", len(wanted), ""),
        *(Claim(f"cells {name}", count, "") for name, count in sorted(outcomes.items())),
    )
    return int(len(found) < len(wanted) or outcomes["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
