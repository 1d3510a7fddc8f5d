"""Every performance figure of the five documents tpukit was asked for by, beside ours.

    python benchmarks/documents.py [--no-compile] [--json FILE]

The documents describe a system nobody had built; their figures are wishes. Ours say where they
come from: `measured`, `compiler`, `model` or `datasheet`, or why there is none.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tpukit import Slice, Workload, configure_tpu_environment, get_preset
from tpukit.compiler import CompiledStep, compile_for
from tpukit.errors import TPUError
from tpukit.hardware import Figure
from tpukit.hardware.prices import public_prices
from tpukit.planner.planning import plan

NO_UNIT = "no TPU has such a unit, and vector quantization is not built here"
NO_TORCH = "the PyTorch side is not built here"
NO_TPU = "nobody here has a TPU to run on"
NOT_COMPILED = "left out by --no-compile"
NOT_SAID = "the document does not say for which batch and sequence"
# Of document 000, line 47: name, chips, HBM of a chip, bf16 and int8 of the slice.
SLICES = (
    ("v4-8", "4 chips", "16 GB", "275 TFLOP/s", "550"),
    ("v4-32", "32 chips", "16 GB", "2,200 TFLOP/s", "4,400"),
    ("v5e-4", "4 chips", "16 GB", "197 TFLOP/s", "394"),
    ("v5e-64", "64 chips", "16 GB", "12,600 TFLOP/s", "25,200"),
    ("v5e-256", "256 chips", "16 GB", "50,500 TFLOP/s", "101,000"),
    ("v6e-64", "64 chips", "32 GB", "21,000 TFLOP/s", "42,000"),
    ("v6e-256", "256 chips", "32 GB", "84,000 TFLOP/s", "168,000"),
)
# Line 627: slice, sequences, tokens a second, TFLOP/s, utilisation.
TRAINING = (
    ("v4-8", 64, "125K", "850 TFLOP/s", "77 %"),
    ("v5e-64", 512, "1.2M", "9,500 TFLOP/s", "85 %"),
    ("v6e-64", 512, "1.8M", "15,000 TFLOP/s", "88 %"),
    ("v6e-256", 2048, "7.5M", "62,000 TFLOP/s", "90 %"),
)
MODEL, LENGTH = "small-1b", 2048


@dataclass(frozen=True)
class Row:
    """One figure of a document, and how ours is found."""

    document: str
    what: str
    stated: str
    ours: Callable[[], Figure]


def missing(reason: str) -> Callable[[], Figure]:
    """No figure, and why."""
    return lambda: Figure.missing("", reason)


def rows(*, compiled: bool) -> Iterator[Row]:
    """All of them, document by document."""
    yield from _slices()
    yield Row("000", "v5e, efficiency over v4", "+40 %", _per_dollar)
    yield Row("000", "v6e, HBM over v5e", "2 x", lambda: _ratio_of_hbm("v6e", "v5e"))
    yield from _checkpointing(compiled=compiled)
    for name, sequences, tokens, tflops, used in TRAINING:
        what = f"1B on {name}, {sequences} x {LENGTH}"
        yield Row("000", f"{what}, tokens/s", tokens, lambda n=name, s=sequences: _trained(n, s)[0])
        yield Row("000", f"{what}, rate", tflops, lambda n=name, s=sequences: _trained(n, s)[1])
        yield Row("000", f"{what}, MFU", used, lambda n=name, s=sequences: _trained(n, s)[2])
    for billions, weights, activations in (
        (0.125, "0.5 GB", "1.5 GB"), (0.35, "1.4 GB", "3 GB"),
        (1.3, "5.2 GB", "8 GB"), (2.7, "10.8 GB", "14 GB"),
    ):  # fmt: skip
        what = f"{billions} B parameters in bfloat16"
        yield Row("000", f"{what}, weights", weights, lambda b=billions: _weights(b))
        yield Row("000", f"{what}, activations", activations, missing(NOT_SAID))
    for what, stated in (
        ("VQ in 8 bits, matmul", "3.3 x"), ("VQ, attention", "3.1 x"), ("VQ, MLP", "3.0 x"),
        ("VQ, whole inference", "3.0 x"), ("VQ, accuracy retained", "98 %"),
    ):  # fmt: skip
        yield Row("000", what, stated, missing(NO_UNIT))
    v4 = Slice.parse("v4-32")
    yield Row("001", "v4-32, chips", "32", lambda: _chips(v4))
    yield Row("001", "v4, HBM of a chip", "32 GB", lambda: v4.chip.hbm_bytes)
    yield Row("001", "v4, peak of a chip", "275 TFLOP/s", lambda: v4.chip.peak("bf16"))
    for name, stated in (
        ("v4-8", "32"), ("v5e-4", "16"), ("v5p-8", "95"), ("v6e-4", "32"), ("7x-2x2x1", "128"),
    ):  # fmt: skip
        what = f"{name.split('-')[0]}, HBM of a chip"
        yield Row("002", what, f"{stated} GB", lambda n=name: Slice.parse(n).chip.hbm_bytes)
    for what, stated in (
        ("backend creation on CPU", "0.13 ms"), ("model preparation", "<0.001 ms"),
        ("memory allocation", "0.001 ms"), ("synchronization", "<0.01 ms"),
    ):  # fmt: skip
        yield Row("002", what, stated, missing(NO_TORCH))
    first = _compile_time if compiled else missing(NOT_COMPILED)
    yield Row("002", f"first compile ({MODEL} on v6e-8)", "1-10 s", first)
    yield Row("002", "TPU over CPU", "5-20 x", missing(NO_TPU))
    memory = _attention_memory if compiled else missing(NOT_COMPILED)
    yield Row("003", "flash attention, memory for 2 x the tokens", "1 x (O(1))", memory)
    yield Row("004", "v3-8, saved by preemptible", "70 %", lambda: _saved_by_spot("v3-8"))
    yield Row("004", "the same on v6e-8", "70 %", lambda: _saved_by_spot("v6e-8"))


def _slices() -> Iterator[Row]:
    for name, chips, hbm, bf16, int8 in SLICES:
        of = Slice.parse(name)
        yield Row("000", f"{name}, chips", chips, lambda of=of: _chips(of))
        yield Row("000", f"{name}, HBM of a chip", hbm, lambda of=of: of.chip.hbm_bytes)
        yield Row("000", f"{name}, bf16", bf16, lambda of=of: of.peak_tflops("bf16"))
        yield Row("000", f"{name}, int8", f"{int8} TOP/s", lambda of=of: of.peak_tflops("int8"))


def _chips(of: Slice) -> Figure:
    return Figure(of.chips, "chips", "datasheet", "names of slices")


def _per_dollar() -> Figure:
    """bf16 peak for a list dollar, since the document does not say efficient by what."""
    book = public_prices()
    rates: list[float] = []
    for name in ("v5e-4", "v4-8"):
        of = Slice.parse(name)
        price = book.quote(of)
        if price.value is None:
            return Figure.missing("x", price.reason)
        rates.append(of.chip.peak("bf16").require("a ratio") / price.value)
    return Figure(rates[0] / rates[1], "x peak a dollar", "datasheet", "catalog and list prices")


def _ratio_of_hbm(one: str, other: str) -> Figure:
    amounts = [Slice.parse(f"{name}-4").chip.hbm_bytes.require("a ratio") for name in (one, other)]
    return Figure(amounts[0] / amounts[1], "x", "datasheet", "catalog")


def _saved_by_spot(name: str) -> Figure:
    book, of = public_prices(), Slice.parse(name)
    region = book.cheapest_region(of)
    prices = [book.quote(of, region=region, tier=tier) for tier in ("on_demand", "spot")]
    for price in prices:
        if price.value is None:
            return Figure.missing("%", price.reason)
    saved = 1 - (prices[1].value or 0) / (prices[0].value or 1)
    return Figure(100 * saved, "%", "datasheet", f"list prices in {region}")


def _weights(billions: float) -> Figure:
    return Figure(2e9 * billions, "B", "model", "two bytes a parameter; the document counts four")


@cache
def _trained(name: str, sequences: int) -> tuple[Figure, Figure, Figure]:
    """Tokens a second, TFLOP/s and MFU of the planner's best layout with no larger batch."""
    best = plan(
        MODEL, tokens="1T", on=[name], objective="fastest", sequence_length=LENGTH,
        max_batch_tokens=sequences * LENGTH, verify=0,
    ).best  # fmt: skip
    if best is None:
        nothing = Figure.missing("", f"no layout of {MODEL} fits {name}")
        return nothing, nothing, nothing
    source = f"arithmetic of the planner: {best.mesh}, {best.batch_size} sequences, {best.remat}"
    rate = best.tokens_per_step / best.step_time_s
    flops = get_preset(MODEL).flops_per_token(LENGTH).total * rate / 1e12
    used = None if best.mfu is None else 100 * best.mfu
    return (
        Figure(rate, "tokens/s", "model", source),
        Figure(flops, "TFLOP/s", "model", source),
        Figure(used, "%", "model", source) if used else Figure.missing("%", "no peak is known"),
    )


@cache
def _compiled(remat: str) -> CompiledStep:
    work = Workload(MODEL, batch_size=32, sequence_length=LENGTH, remat=remat)
    return compile_for(work, "v6e-8", mesh={"fsdp": 8}, until="schedule")


def _checkpointing(*, compiled: bool) -> Iterator[Row]:
    def of_memory() -> Figure:
        plain, again = (_compiled(remat).memory.total_bytes for remat in ("none", "full"))
        source = f"{MODEL}, 32 x {LENGTH} on v6e-8, remat full over none"
        return Figure(100 * (again / plain - 1), "%", "compiler", source)

    def of_compute() -> Figure:
        plain, again = (_compiled(remat).flops for remat in ("none", "full"))
        if plain.value is None or again.value is None:
            return Figure.missing("%", plain.reason or again.reason)
        source = "FLOPs of the same two programs"
        return Figure(100 * (again.value / plain.value - 1), "%", "compiler", source)

    not_now = missing(NOT_COMPILED)
    yield Row("000", "checkpointing, memory", "-50 %", of_memory if compiled else not_now)
    yield Row("000", "checkpointing, compute", "+20 %", of_compute if compiled else not_now)


def _compile_time() -> Figure:
    """What the compile took when it was made, up to the schedule."""
    return Figure(_compiled("none").compile_s, "s", "measured", "up to the schedule, 2 cores")


def _attention_memory() -> Figure:
    """Memory of attention's forward pass with twice the tokens, over that with once."""
    import jax
    import jax.numpy as jnp

    from tpukit.kernels import flash_attention

    def bytes_of(tokens: int) -> int:
        array = jax.ShapeDtypeStruct((1, tokens, 8, 128), jnp.bfloat16)
        attend = lambda q, k, v: flash_attention(q, k, v, causal=True)  # noqa: E731
        compiled = compile_for(attend, "v6e-1", array, array, array, until="memory")
        return compiled.memory.total_bytes

    ratio = bytes_of(65536) / bytes_of(32768)
    return Figure(ratio, "x", "compiler", "arguments, result and temporaries of 8 heads of 128")


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-compile", action="store_true", help="leave compiled figures out")
    parser.add_argument("--json", type=Path, help="write every row here")
    options = parser.parse_args()
    table = Table("document", "figure", "stated", "ours", "origin", "how, or why not")
    found: list[dict[str, object]] = []
    for row in rows(compiled=not options.no_compile):
        try:
            ours = row.ours()
        except TPUError as error:
            ours = Figure.missing("", str(error))
        how = ours.source if ours.value is not None else ours.reason
        table.add_row(row.document, row.what, row.stated, ours.text, ours.origin or "–", how)
        found.append(
            {"document": row.document, "what": row.what, "stated": row.stated} | ours.to_dict()
        )
    Console(width=170).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
