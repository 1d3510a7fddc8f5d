"""Attention of today's models without a TPU: our kernel beside what XLA makes of the same shape.

    python benchmarks/attention_models.py [--chips v6e,7x] [--cases gpt_oss_window,mla]

One example in bfloat16, from projected (B, S, H * D) arrays to the result in the same form, so that
padding, transposes and concatenations count. Ours runs with the blocks that dispatch takes. XLA's
is the faster of two: all scores at once (`jax.nn.dot_product_attention`, or the same with sinks
where they fit in HBM), and rows of scores in turn. Times are static and of origin model: bundles of
kernels followed by `tpukit.kernels.timing`, everything else by the compiler's schedule. Both passes
are a gradient from nothing, forward pass included.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import tpukit
from tpukit.errors import TPUError
from tpukit.hardware import get_chip
from tpukit.kernels.ops.flash_attention import reference
from tpukit.kernels.ops.flash_attention.chunks import attend_in_chunks
from tpukit.kernels.ops.flash_attention.specs import OP
from tpukit.kernels.timing import estimate_kernel

KINDS = {"forward": "flash_attention", "both passes": "flash_attention_backward"}


@dataclass(frozen=True)
class Case:
    """Causal self-attention of one layer of a model, one example long."""

    tokens: int
    heads: int
    kv_heads: int
    width: int
    v_width: int | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    rope_width: int = 0  # of the key that all heads share, as MLA has it

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """As projections make them."""
        v_width = self.v_width or self.width
        widths = [self.heads * self.width]
        if self.rope_width:
            widths += [self.kv_heads * (self.width - self.rope_width + v_width), self.rope_width]
        else:
            widths += [self.kv_heads * self.width, self.kv_heads * v_width]
        flat = [jax.ShapeDtypeStruct((1, self.tokens, n), jnp.bfloat16) for n in widths]
        return [*flat, *([jax.ShapeDtypeStruct((self.heads,), jnp.float32)] * self.sinks)]

    def arrays(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values by head."""
        q, k = (x.reshape(1, self.tokens, n, -1) for x, n in ((q, self.heads), (k, self.kv_heads)))
        if not self.rope_width:
            return q, k, v.reshape(1, self.tokens, self.kv_heads, -1)
        own = self.width - self.rope_width
        shared = jnp.broadcast_to(v[:, :, None], (1, self.tokens, self.kv_heads, self.rope_width))
        return q, jnp.concatenate([k[..., :own], shared], axis=-1), k[..., own:]

    @property
    def score_bytes(self) -> int:
        """Of all scores in float32, in the one chunk that is longest."""
        return self.heads * self.tokens * min(self.tokens, self.chunk or self.tokens) * 4


CASES = {
    "GPT-OSS window": Case(8192, 64, 8, 64, window=128, sinks=True),
    "GPT-OSS full": Case(8192, 64, 8, 64, sinks=True),
    "MLA 192/128": Case(4096, 128, 128, 192, v_width=128, rope_width=64),
    "Gemma 4 global": Case(8192, 32, 4, 512),
    "Gemma 4 local": Case(8192, 32, 16, 256, window=1024),
    "Llama 4 chunked": Case(16384, 40, 8, 128, chunk=8192),
}

Attention = Callable[..., Any]


def ours(case: Case) -> Attention:
    return partial(OP.implementations["pallas_tpu"], causal=True, window=case.window)


def rows_of_xla(case: Case) -> Attention:
    return partial(OP.implementations["xla"], causal=True, window=case.window)


def scores_of_xla(case: Case) -> Attention:
    """All at once: jax's own where it has what is asked for."""
    if case.sinks or case.v_width:
        return partial(reference.attention, causal=True, window=case.window)

    def attend(q: Any, k: Any, v: Any, *_: Any) -> Any:
        near = None if case.window is None else (case.window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=near)

    return attend


def program(case: Case, attention: Attention, direction: str) -> Callable[..., Any]:
    def forward(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, None, None, None, sinks)

        out = attend_in_chunks(attend, *case.arrays(q, k, v), chunk=case.chunk)
        return out.reshape(1, case.tokens, -1)

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(forward, *arrays)
        return pull(out)

    return forward if direction == "forward" else both


def time_of(case: Case, attention: Attention, chip: str, direction: str) -> tuple[Any, str]:
    """The estimate or None, and why there is none."""
    try:
        run = program(case, attention, direction)
        found = estimate_kernel(run, case.arguments, chip, kind=KINDS[direction])
    except TPUError as error:
        return None, str(error).splitlines()[0][:160]
    return (None, found.reason[:160]) if found.time_s is None else (found, "")


def row_of(name: str, chip: str, direction: str) -> dict[str, Any]:
    case = CASES[name]
    mine, reason = time_of(case, ours(case), chip, direction)
    rivals = {"rows": rows_of_xla(case)}
    if case.score_bytes * (2 if direction == "forward" else 4) < get_chip(chip).hbm_bytes.value:
        rivals["all scores"] = scores_of_xla(case)
    times, reasons = dict[str, float](), [reason] if reason else []
    for rival, attention in rivals.items():
        found, why = time_of(case, attention, chip, direction)
        if found is None:
            reasons.append(f"{rival}: {why}")
        else:
            times[rival] = found.time_s * 1e6
    best = min(times, key=lambda one: times[one], default=None)
    return {
        "case": name,
        "chip": chip,
        "direction": direction,
        "origin": "model",
        "ours_us": None if mine is None else mine.time_s * 1e6,
        "kernel_us": None if mine is None else mine.kernel_s * 1e6,
        "xla_us": None if best is None else times[best],
        "xla": best,
        "reasons": reasons,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    names = ("case", "chip", "direction", "ours us", "in kernels", "XLA us", "as", "ratio")
    table = Table(*names, "without a time")
    for row in rows:
        mine, theirs = row["ours_us"], row["xla_us"]
        figures = [None if x is None else f"{x:.0f}" for x in (mine, row["kernel_us"], theirs)]
        ratio = "-" if mine is None or theirs is None else f"{mine / theirs:.2f}"
        cells = [row["case"], row["chip"], row["direction"], *(x or "-" for x in figures)]
        table.add_row(*cells, row["xla"] or "-", ratio, "; ".join(row["reasons"]))
    return table


def main() -> int:
    """Time every case on every chip, and say where ours is not the faster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e,7x")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--directions", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    # Places in the source are part of a kernel, and would make it another one for the cache.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    console, rows = Console(width=150), list[dict[str, Any]]()
    for name in asked.cases.split(","):
        for chip in asked.chips.split(","):
            for direction in asked.directions.split(","):
                rows.append(row_of(name, chip, direction))
                console.print(rows[-1])
                if asked.json:
                    asked.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    console.print(table_of(rows))
    slower = [row for row in rows if (row["ours_us"] or 0) > (row["xla_us"] or 1e30)]
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
