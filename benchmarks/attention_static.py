"""Causal attention without a TPU: our kernel against jax's and tokamax's, each at its best blocks.

    python benchmarks/attention_static.py --chips v6e --cases causal_4096 --directions forward

Every contender gets queries, keys and values as a projection makes them, (B, S, H * D), and gives
its result the same way, so scaling and transposes count on all sides. Times are static: the real
compiler's bundles, followed by `tpukit.kernels.timing`. The backward time is that of the whole
gradient less that of the forward pass which keeps what the gradient needs.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table
from tokamax._src.ops.experimental.tpu.splash_attention import (
    splash_attention_kernel as tokamax_kernel,
)
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as tokamax_mask

import tpukit
from tpukit.errors import TPUError
from tpukit.hardware import get_chip
from tpukit.kernels.flash_attention.problem import FlashBlocks
from tpukit.kernels.flash_attention.specs import OP
from tpukit.kernels.timing import estimate_kernel

CHIPS = ("v5e", "v5p", "v6e", "7x")
DIRECTIONS = ("forward", "backward")
FORWARD_BAR, BACKWARD_BAR = 0.90, 1.00
Attention = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Case:
    """One shape of causal bfloat16 self-attention."""

    tokens: int
    heads: int = 8
    kv_heads: int = 8
    window: int | None = None
    width: int = 128

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads


CASES = {
    "causal_4096": Case(4096),
    "causal_8192": Case(8192),
    "gqa_32_8_4096": Case(4096, heads=32),
    "window_1024_4096": Case(4096, window=1024),
}


@dataclass(frozen=True)
class Contender:
    """One implementation at one choice of blocks."""

    family: str
    blocks: str
    attend: Attention


def ours(case: Case, grid: bool) -> Iterator[Contender]:
    """The blocks that dispatch takes, and with `grid` others."""
    attend = partial(OP.implementations["pallas_tpu"], causal=True, window=case.window)
    yield Contender("tpukit", "as shipped", attend)
    if grid:
        for rows, compute, unroll in (
            (1024, 512, 1),
            (1024, 512, 2),
            (2048, 512, 1),
            (2048, 256, 2),
        ):
            for columns, queries in ((1024, 256), (1024, 512), (2048, 256)):
                blocks = FlashBlocks(rows, 8192, compute, unroll, 8192, queries, columns)
                name = f"{rows}/{compute}x{unroll} back {columns}/{queries}"
                yield Contender("tpukit", name, partial(attend, blocks=blocks))


def flash_of_jax(case: Case) -> Iterator[Contender]:
    """It has neither windows nor groups: keys of a group are repeated, as its users must."""
    if case.window is not None:
        return
    for size in (512, 1024):
        sizes = jax_flash.BlockSizes(
            block_q=size,
            block_k_major=size,
            block_k=size,
            block_b=1,
            block_q_major_dkv=size,
            block_k_major_dkv=size,
            block_k_dkv=size,
            block_q_dkv=size,
            block_k_major_dq=size,
            block_k_dq=size,
            block_q_dq=size,
        )

        def attend(q: Any, k: Any, v: Any, sizes: Any = sizes) -> Any:
            k, v = (jnp.repeat(x, case.group, axis=2) for x in (k, v))
            by_head = [x.swapaxes(1, 2) for x in (q, k, v)]
            out = jax_flash.flash_attention(
                *by_head, causal=True, sm_scale=case.width**-0.5, block_sizes=sizes
            )
            return out.swapaxes(1, 2)

        yield Contender("jax flash", str(size), attend)


def splash_of_jax(case: Case) -> Iterator[Contender]:
    """With its fused backward kernel."""
    shape = (case.tokens, case.tokens)
    if case.window is None:
        mask: Any = jax_splash.CausalMask(shape)
    else:
        mask = jax_splash.LocalMask(shape, window_size=(case.window - 1, 0), offset=0)
    masks = jax_splash.MultiHeadMask([mask] * case.group)
    for size, compute in ((1024, 1024), (1024, 512), (2048, 1024)):
        sizes = jax_splash.BlockSizes(
            block_q=size,
            block_kv=size,
            block_kv_compute=compute,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_kv_dkv_compute=compute,
            use_fused_bwd_kernel=True,
        )

        kernel = jax_splash.make_splash_mqa_single_device(masks, block_sizes=sizes)

        def attend(q: Any, k: Any, v: Any, kernel: Any = kernel) -> Any:
            q, k, v = (x.swapaxes(1, 2) for x in (q * case.width**-0.5, k, v))
            grouped = q.reshape(q.shape[0], case.kv_heads, case.group, *q.shape[2:])
            out = jax.vmap(jax.vmap(kernel))(grouped, k, v)
            return out.reshape(q.shape).swapaxes(1, 2)

        yield Contender("jax splash", f"{size}c{compute}", attend)


def splash_of_tokamax(case: Case) -> Iterator[Contender]:
    """The grid that its own tuner prefers at these lengths."""
    shape = (case.tokens, case.tokens)
    if case.window is None:
        mask: Any = tokamax_mask.CausalMask(shape)
    else:
        mask = tokamax_mask.LocalMask(shape, window_size=(case.window - 1, 0), offset=0)
    for size, compute, scheduler in (
        (1024, 512, True),
        (1024, 512, False),
        (1024, 1024, False),
        (2048, 512, True),
    ):
        config = tokamax_kernel.SplashConfig(
            block_q=size,
            block_kv=size,
            block_kv_compute=compute,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_kv_dkv_compute=compute,
            use_experimental_scheduler=scheduler,
        )

        # Outside of any trace, so that its tables and its grid are constants.
        kernel = tokamax_kernel.make_splash_mha(mask, config=config, q_seq_shards=1)

        def attend(q: Any, k: Any, v: Any, kernel: Any = kernel) -> Any:
            by_head = [x[0].swapaxes(0, 1) for x in (q * case.width**-0.5, k, v)]
            return kernel(*by_head).swapaxes(0, 1)[None]

        yield Contender("tokamax", f"{size}c{compute}{' sched' if scheduler else ''}", attend)


@dataclass(frozen=True)
class Timing:
    """Static figures of one program."""

    time_us: float
    kernel_cycles: float


def time_of(contender: Contender, case: Case, chip: str, program: str) -> Timing | str:
    """Of the result alone, of the result with what a gradient keeps, or of both passes."""
    flat = [
        jax.ShapeDtypeStruct((1, case.tokens, heads * case.width), jnp.bfloat16)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    ]
    facts = get_chip(chip)
    kind = jax.sharding.AbstractDevice(facts.device_kinds[0], facts.cores_per_device, "tpu")

    def run(q: Any, k: Any, v: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            arrays = [x.reshape(1, case.tokens, -1, case.width) for x in (q, k, v)]
            if program == "result":
                return contender.attend(*arrays).reshape(q.shape)
            out, pull = jax.vjp(contender.attend, *arrays)
            if program == "kept":
                # The numbers of each row only: arrays as results would be copied for nothing.
                rows = [x for x in jax.tree.leaves(pull) if x.size * 16 <= q.size]
                return out.reshape(q.shape), rows
            grads = pull(out)
            return [x.reshape(1, case.tokens, -1) for x in grads]

    try:
        found = estimate_kernel(run, flat, chip)
    except TPUError as error:
        return str(error).splitlines()[0][:160]
    if found.time_s is None:
        return found.reason[:160]
    return Timing(found.time_s * 1e6, found.cycles)


def timing(contender: Contender, case: Case, chip: str, direction: str) -> Timing | str:
    """Of one direction."""
    if direction == "forward":
        return time_of(contender, case, chip, "result")
    both, kept = (time_of(contender, case, chip, program) for program in ("both", "kept"))
    if isinstance(both, str) or isinstance(kept, str):
        return both if isinstance(both, str) else str(kept)
    return Timing(both.time_us - kept.time_us, both.kernel_cycles - kept.kernel_cycles)


def contenders(case: Case, grid: bool) -> Iterator[Contender]:
    """All of them, ours first."""
    yield from ours(case, grid)
    yield from splash_of_tokamax(case)
    yield from splash_of_jax(case)
    yield from flash_of_jax(case)


def main() -> None:
    """Time the contenders and show how ours compares with the best of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--grid", action="store_true", help="try other blocks of ours too")
    parser.add_argument("--only", default="", help="contenders whose name matches this pattern")
    parser.add_argument("--json", type=Path, help="write every figure here too")
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    console = Console(width=150)
    records: list[dict[str, Any]] = []
    for chip in asked.chips.split(","):
        for name in asked.cases.split(","):
            for direction in asked.directions.split(","):
                rows = [
                    (contender, timing(contender, CASES[name], chip, direction))
                    for contender in contenders(CASES[name], asked.grid)
                    if re.search(asked.only, f"{contender.family} {contender.blocks}")
                ]
                console.print(table_of(chip, name, direction, rows))
                records += [
                    {
                        "chip": chip,
                        "case": name,
                        "direction": direction,
                        "family": contender.family,
                        "blocks": contender.blocks,
                        "origin": "model",
                        **(
                            {"reason": found}
                            if isinstance(found, str)
                            else {
                                "time_us": found.time_us,
                                "kernel_cycles": round(found.kernel_cycles),
                            }
                        ),
                    }
                    for contender, found in rows
                ]
                if asked.json:
                    asked.json.write_text(json.dumps(records, indent=1) + "\n", "utf-8")


def table_of(
    chip: str, case: str, direction: str, rows: list[tuple[Contender, Timing | str]]
) -> Table:
    """The contenders from fast to slow, with our ratio to the best of the others."""
    timed = [(one, found) for one, found in rows if isinstance(found, Timing)]
    timed.sort(key=lambda row: row[1].time_us)
    best = {
        mine: min((t for c, t in timed if (c.family == "tpukit") is mine), default=None, key=_time)
        for mine in (True, False)
    }
    title = f"{chip} {case} {direction} (static estimate, origin model)"
    if best[True] and best[False]:
        bar = FORWARD_BAR if direction == "forward" else BACKWARD_BAR
        whole = best[True].time_us / best[False].time_us
        kernels = best[True].kernel_cycles / min(
            t.kernel_cycles for c, t in timed if c.family != "tpukit"
        )
        title += f"\nours / best other: {whole:.2f} (bar {bar:.2f}); kernels alone {kernels:.2f}"
    table = Table("contender", "blocks", "total us", "kernel cycles", title=title)
    for contender, found in timed:
        table.add_row(
            contender.family,
            contender.blocks,
            f"{found.time_us:.1f}",
            f"{found.kernel_cycles:,.0f}",
        )
    for contender, found in rows:
        if isinstance(found, str):
            table.add_row(contender.family, contender.blocks, "-", found)
    return table


def _time(found: Timing) -> float:
    return found.time_us


if __name__ == "__main__":
    main()
