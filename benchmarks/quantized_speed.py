"""How fast each format is multiplied on each TPU generation, estimated with no TPU (origin: model).

    python benchmarks/quantized_speed.py [--chips v5e,v5p,v6e,7x] [--rows 16] [--json FILE]

Kernels are compiled for the chip and run through bundle by bundle; no quantized kernel was ever
measured on a chip, so the error of these times is not known. The first table is one product of a
decode step; the second is the table of document 000 ("VQ Performance (TPU v6e)"), whose sizes
nobody stated: here a layer of Llama 3 8B, 16 sequences of 2,048 tokens on one v6e. Its "VQ-8bit" is
`vq2`: codes for four weights, entries in 8 bits. Attention and total count the cache, read at the
datasheet's bandwidth, and total counts the unembedding; both are the same on both sides.

Every product takes seconds to compile the first time, and is kept.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tpukit
from tpukit.hardware import get_chip

CHIPS = ("v5e", "v5p", "v6e", "7x")
SHAPE = (4096, 14336)
# (format, activations)
FORMATS = (
    ("bf16", "bfloat16"),
    ("int8", "bfloat16"),
    ("int4", "bfloat16"),
    ("fp8", "bfloat16"),
    ("vq1.75", "bfloat16"),
    ("vq2", "bfloat16"),
    ("vq2", "int8"),
    ("vq4", "bfloat16"),
)
# Llama 3 8B: 32 heads of 128, 8 of keys and values.
ATTENTION = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096))
MLP = ((4096, 14336), (4096, 14336), (14336, 4096))
UNEMBED, LAYERS, CONTEXT, KEY_VALUES = (4096, 128_256), 32, 2048, 2 * 8 * 128
DOCUMENT = {"MatMul": (10, 3), "Attention": (25, 8), "MLP": (15, 5), "Total Inference": (120, 40)}


def seconds(shape: tuple[int, int], format: str, chip: str, rows: int, activations: str) -> Any:
    """The time of a product, or why there is none."""
    from tpukit.quantization.measures.chip_speed import product_estimate

    print(f"{format} {activations} {shape} on {chip}", file=sys.stderr, flush=True)
    found = product_estimate(shape, format, chip, rows=rows, activations=activations)
    if isinstance(found, str):
        return found
    return found.time_s if found.time_s is not None else found.reason


def by_format(chips: list[str], rows: int) -> list[dict[str, Any]]:
    """One product in every format on every chip."""
    found: list[dict[str, Any]] = []
    for format, activations in FORMATS:
        times = {chip: seconds(SHAPE, format, chip, rows, activations) for chip in chips}
        found.append({"format": format, "activations": activations, "seconds": times})
    return found


def print_formats(table: list[dict[str, Any]], chips: list[str], rows: int) -> None:
    """Microseconds, and how many times faster than bfloat16."""
    print(f"{rows} × {SHAPE[0]} × {SHAPE[1]}, µs (times as fast as bf16); origin: model")
    wide = table[0]["seconds"]
    for row in table:
        cells: list[str] = []
        for chip in chips:
            own, full = row["seconds"][chip], wide[chip]
            known = isinstance(own, float) and isinstance(full, float)
            cells.append(f"{own * 1e6:7.1f} ({full / own:.2f})" if known else f"— ({own})"[:60])
        label = row["format"] + (" × int8" if row["activations"] == "int8" else "")
        print(f"{label:<14}" + "  ".join(f"{cell:<16}" for cell in cells))


def document_rows(chip: str, rows: int) -> dict[str, dict[str, float]]:
    """The rows of document 000 in milliseconds: bfloat16, vq2 and int4."""
    bandwidth = get_chip(chip).hbm_gbps.require("the time a cache is read in")
    cache = rows * CONTEXT * KEY_VALUES * 2 / (bandwidth * 1e9)
    found: dict[str, dict[str, float]] = {}
    unembed = seconds(UNEMBED, "bf16", chip, rows, "bfloat16")
    for label, format, activations in (
        ("bf16", "bf16", "bfloat16"),
        ("vq2", "vq2", "bfloat16"),
        ("vq2, int8 activations", "vq2", "int8"),
        ("int4", "int4", "bfloat16"),
    ):
        times = {
            shape: seconds(shape, format, chip, rows, activations)
            for shape in dict.fromkeys((*ATTENTION, *MLP))
        }
        attention = sum(times[shape] for shape in ATTENTION) + cache
        mlp = sum(times[shape] for shape in MLP)
        total = LAYERS * (attention + mlp) + unembed
        parts = (times[SHAPE], attention, mlp, total)
        found[label] = dict(zip(DOCUMENT, (1e3 * part for part in parts), strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--rows", type=int, default=16, help="Sequences decoded together")
    parser.add_argument("--document-chip", default="v6e", help="Of the table of document 000")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tpukit.configure_tpu_environment()  # or jax would look for a TPU in this process
    chips = options.chips.split(",")
    table = by_format(chips, options.rows)
    print_formats(table, chips, options.rows)
    document = document_rows(options.document_chip, options.rows)
    wide = document["bf16"]
    print(f"\nDocument 000's rows on {options.document_chip}, ms (times as fast as bf16)")
    for name, (before, after) in DOCUMENT.items():
        cells = [
            f"{label} {row[name]:.3f} ({wide[name] / row[name]:.2f})"
            for label, row in document.items()
        ]
        claim = f"the document says {before} and {after} ({before / after:.1f})"
        print(f"{name:<16}" + ", ".join(cells) + f"; {claim}")
    if options.json:
        options.json.write_text(json.dumps({"formats": table, "document": document}, indent=1))


if __name__ == "__main__":
    main()
