"""Attention without a TPU, timed by compiled bundles: masks, and layers of today's models.

python benchmarks/attention.py masks
python benchmarks/attention.py models
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "masks",
        "masked attention: our kernel by mask",
        options={
            "--chips": {"default": "v5e,v5p,v6e,7x"},
            "--tokens": {"type": int, "default": 4096},
        },
    ),
    Subcommand(
        "models",
        "attention of today's models, our kernel beside XLA",
        options={
            "--chips": {"default": "v5e,v5p,v6e,7x"},
            "--cases": {"help": "separated by commas; all by default"},
            "--directions": {"default": "forward,both passes"},
        },
    ),
)

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import tpukit
from tpukit.errors import TPUError
from tpukit.hardware import get_chip
from tpukit.kernels.ops.flash_attention import reference
from tpukit.kernels.ops.flash_attention.api import OP
from tpukit.kernels.ops.flash_attention.spec import AttentionSpec
from tpukit.kernels.timing import estimate_kernel

HEADS, WIDTH = 8, 128
KINDS = {"forward": "flash_attention", "both passes": "flash_attention_backward"}
# The shape of a mask for so many tokens, and what else is said.
CASES: dict[str, tuple[Callable[[int], tuple[int, ...]] | None, dict[str, Any]]] = {
    "every key": (None, {}),
    "every key, mask of keys": (lambda n: (1, 1, 1, n), {}),
    "every key, mask of scores": (lambda n: (1, 1, n, n), {}),
    "causal": (None, {"causal": True}),
    "causal, mask of scores": (lambda n: (1, 1, n, n), {"causal": True}),
    "window of 1023 both ways": (None, {"window": 1024}),
}


def attend(q: Any, k: Any, v: Any, *mask: Any, **options: Any) -> Any:
    from tpukit.kernels import flash_attention

    heads = [x.reshape(*x.shape[:2], HEADS, WIDTH) for x in (q, k, v)]
    given = mask[0] if mask else None
    return flash_attention(*heads, mask=given, implementation="pallas_tpu", **options).reshape(
        q.shape
    )


def both_passes(q: Any, k: Any, v: Any, *mask: Any, **options: Any) -> Any:
    out, pull = jax.vjp(lambda *a: attend(*a, *mask, **options), q, k, v)
    return pull(out)


def time_of(case: str, tokens: int, chip: str, direction: str) -> Result | str:
    from tpukit.errors import TPUError
    from tpukit.kernels.timing import estimate_kernel

    shape, options = CASES[case]
    x = jax.ShapeDtypeStruct((1, tokens, HEADS * WIDTH), jnp.bfloat16)
    mask = [] if shape is None else [jax.ShapeDtypeStruct(shape(tokens), jnp.bool_)]
    function = partial(attend if direction == "forward" else both_passes, **options)
    what = f"{chip} {direction}: {case}"
    try:
        found = estimate_kernel(function, [x, x, x, *mask], chip, kind=KINDS[direction])
    except TPUError as error:
        return f"{what}: {error}"
    if found.time_s is None:
        return f"{what}: {found.reason}"
    key = f"{case}_{chip}_{direction}_{tokens}".replace(",", "").replace(" ", "_")
    what = f"µs of attention of {tokens} tokens, {what}"
    kind = {"compares": "model : model", "sample": "none"}
    return Result(what, found.time_s * 1e6, key=key, form=".0f", **kind)


def run_masks(options):
    """What a dense mask costs flash attention on a TPU: static times with and without one.

    8 bfloat16 heads of 128, from projected (B, S, H * D) arrays to the result in the same form,
    with the blocks that dispatch takes. Times are of origin model, as in attention_rivals.py; a
    chip whose kernel cannot be followed says why. Both passes include the copy of the mask that
    the backward kernel reads.
    """
    tpukit.configure_tpu_environment()
    # Places in the source are part of a kernel, and would make it another one for the cache.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    for chip in options.chips.split(","):
        for direction in KINDS:
            for case in CASES:
                found = time_of(case, options.tokens, chip, direction)
                print(found, flush=True) if isinstance(found, str) else report(found)


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


MODELS_CASES = {
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
        def attend(q: Any, k: Any, v: Any, spec: AttentionSpec) -> Any:
            return attention(q, k, v, None, None, None, spec.sinks)

        spec = AttentionSpec(causal=True, chunk=case.chunk, sinks=sinks)
        out = spec.by_chunk(attend, *case.arrays(q, k, v))
        return out.reshape(1, case.tokens, -1)

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(forward, *arrays)
        return pull(out)

    return forward if direction == "forward" else both


def models_time_of(case: Case, attention: Attention, chip: str, direction: str) -> tuple[Any, str]:
    """The estimate or None, and why there is none."""
    try:
        run = program(case, attention, direction)
        found = estimate_kernel(run, case.arguments, chip, kind=KINDS[direction])
    except TPUError as error:
        return None, str(error).splitlines()[0][:160]
    return (None, found.reason[:160]) if found.time_s is None else (found, "")


def row_of(name: str, chip: str, direction: str) -> dict[str, Any]:
    case = MODELS_CASES[name]
    mine, reason = models_time_of(case, ours(case), chip, direction)
    rivals = {"rows": rows_of_xla(case)}
    if case.score_bytes * (2 if direction == "forward" else 4) < get_chip(chip).hbm_bytes.value:
        rivals["all scores"] = scores_of_xla(case)
    times, reasons = dict[str, float](), [reason] if reason else []
    for rival, attention in rivals.items():
        found, why = models_time_of(case, attention, chip, direction)
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


def run_models(options):
    """Estimate attention of today's models: our kernel beside what XLA makes of the same shape.

    One example in bfloat16, from projected (B, S, H * D) arrays to the result in the same form, so
    that padding, transposes and concatenations count. Ours runs with the blocks that dispatch
    takes. XLA's is the faster of two: all scores at once (`jax.nn.dot_product_attention`, or the
    same with sinks where they fit in HBM), and rows of scores in turn. Times are static and of
    origin model: bundles of kernels followed by `tpukit.kernels.timing`, everything else by the
    compiler's schedule. Both passes are a gradient from nothing, forward pass included.
    """
    tpukit.configure_tpu_environment()
    # Places in the source are part of a kernel, and would make it another one for the cache.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    console, rows = Console(width=150), list[dict[str, Any]]()
    for name in (options.cases or ",".join(MODELS_CASES)).split(","):
        for chip in options.chips.split(","):
            for direction in options.directions.split(","):
                rows.append(row_of(name, chip, direction))
                console.print(rows[-1])
                mine, theirs = rows[-1]["ours_us"], rows[-1]["xla_us"]
                if mine is not None and theirs is not None:
                    report(
                        Result(
                            f"ms of attention of {name} on {chip}, ours beside XLA's, {direction}",
                            (mine / 1e3, theirs / 1e3),
                            key=f"{name}_{chip}_{direction}".replace(" ", "_"),
                            form=".1f",
                            joint=" : ",
                            compares="model : model",
                            sample="none",
                        )
                    )
    console.print(table_of(rows))
    slower = [row for row in rows if (row["ours_us"] or 0) > (row["xla_us"] or 1e30)]
    return 1 if slower else 0


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        masks=run_masks,
        models=run_models,
    )
