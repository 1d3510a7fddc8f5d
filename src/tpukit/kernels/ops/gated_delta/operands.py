"""What the kernels of both passes have in common: arrays as they read them, and their windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import LANES, round_up
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from ..gemm.tile import Interpret
from .blocks import CHUNK, OP_NAME, RATES, DeltaBlocks, vmem_bytes
from .reference import EPS
from .xla import DeltaResiduals, chunk_rates


@dataclass(frozen=True)
class Operands:
    """Sizes of one call, heads of a grid step, and how its arrays are cut.

    A step of the grid is a chunk of `key_heads` heads of keys, each with its `group` heads of
    values; chunks are in order, or from the last to the first.
    """

    batch: int
    tokens: int
    all_key_heads: int
    key_heads: int
    group: int
    width: int
    value_width: int
    cuts: bool
    limit_bytes: int | None
    interpret: Interpret

    @classmethod
    def of(
        cls, given: DeltaResiduals, blocks: DeltaBlocks | None, interpret: Interpret
    ) -> "Operands":
        """Those of one call, with the blocks given or the tuned ones."""
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:5])
        case = KernelCase("traced", tuple(shapes))
        blocks = blocks_for(OP_NAME, case, blocks)
        batch, tokens, key_heads, width = given.k.shape
        return cls(
            *(batch, tokens, key_heads, blocks.key_heads, given.v.shape[2] // key_heads),
            *(width, given.v.shape[3], given.starts is not None),
            limit_bytes=vmem_limit_bytes(vmem_bytes(case, blocks), current_target()),
            interpret=interpret,
        )

    @property
    def heads(self) -> int:
        """Heads of values of a step."""
        return self.key_heads * self.group

    @property
    def chunks(self) -> int:
        """How many there are."""
        return round_up(self.tokens, CHUNK) // CHUNK

    @property
    def state(self) -> tuple[int, int]:
        """The sizes of one head's state, in whole groups of lanes."""
        return round_up(self.width, LANES), round_up(self.value_width, LANES)

    def side_by_side(self, x: jax.Array) -> jax.Array:
        """(B, S, H, D) as (B, S, H D), whole chunks of heads in whole groups of lanes."""
        padding = [(0, 0), (0, -x.shape[1] % CHUNK), (0, 0), (0, -x.shape[3] % LANES)]
        x = jnp.pad(x, padding)
        return x.reshape(*x.shape[:2], -1)

    def apart(self, x: jax.Array, *, heads: int, width: int) -> jax.Array:
        """Undo `side_by_side`."""
        return x.reshape(*x.shape[:2], heads, -1)[:, : self.tokens, :, :width]

    def pad_state(self, x: jax.Array) -> jax.Array:
        """(B, HV, DK, DV) in float32 and whole groups of lanes."""
        edges = ((0, whole - size) for whole, size in zip(self.state, x.shape[2:], strict=True))
        return jnp.pad(x.astype(jnp.float32), [(0, 0), (0, 0), *edges])

    def rates(self, given: DeltaResiduals) -> jax.Array:
        """(B, HV RATES, S): for each head the fields of `Rates`, one a sublane."""
        found = chunk_rates(given.g, given.beta, given.starts, CHUNK)
        lines = [jnp.broadcast_to(x, found.steps.shape) for x in found]
        stacked = jnp.stack([*lines, *[jnp.zeros_like(lines[0])] * (RATES - len(lines))])
        # (rate, n, b, h, i) -> (b, h rate, n i)
        return stacked.transpose(2, 3, 0, 1, 4).reshape(self.batch, -1, self.chunks * CHUNK)

    def window(self, *sizes: int, of: str, backwards: bool = False) -> pl.BlockSpec:
        """A step's part of "tokens" (B, S, …), "rates", a "state", or what is "kept" a chunk."""
        last = self.chunks - 1

        def at(n: Any) -> Any:
            return last - n if backwards else n

        places = {
            "tokens": lambda b, h, n: (b, at(n), h),
            "rates": lambda b, h, n: (b, h, at(n)),
            "state": lambda b, h, n: (b, h, 0, 0),
            "kept": lambda b, h, n: (b, at(n), h, 0, 0),
        }
        leading = {"kept": (1, 1)}.get(of, (1,))
        return pl.BlockSpec((*leading, *sizes), places[of])

    def call(
        self,
        kernel: Any,
        name: str,
        arrays: Sequence[tuple[jax.Array, pl.BlockSpec]],
        results: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    ) -> Sequence[jax.Array]:
        """Run a kernel over all chunks with a state of its own for each head."""
        return pl.pallas_call(
            kernel,
            grid=(self.batch, self.all_key_heads // self.key_heads, self.chunks),
            in_specs=[spec for _, spec in arrays],
            out_specs=[spec for _, spec in results],
            out_shape=[shape for shape, _ in results],
            scratch_shapes=[pltpu.VMEM((self.heads, *self.state), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                # The state passes from chunk to chunk; heads and sequences are apart.
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=self.limit_bytes,
            ),
            interpret=self.interpret,
            name=name,
        )(*(array for array, _ in arrays))


@dataclass(frozen=True)
class HeadRates:
    """The rates of one head in a chunk, as columns (C, 1) and rows (1, C)."""

    columns: jax.Array
    rows: jax.Array

    def decays(self, seen: jax.Array, *, cuts: bool) -> jax.Array:
        """(C, C): how much of what a token wrote is left at a later one, 0 where it is not seen."""
        columns, rows = self.columns, self.rows
        between = (columns[:, 0:1] - rows[0:1]) + (columns[:, 1:2] - rows[1:2])
        if cuts:
            seen = seen & (columns[:, 5:6] == rows[5:6])
        return jnp.exp(jnp.where(seen, between, -jnp.inf))

    @property
    def beta(self) -> jax.Array:
        """(C, 1)."""
        return self.columns[:, 2:3]

    @property
    def fade(self) -> jax.Array:
        """(C, 1): of the state before the chunk, until each token."""
        return self.columns[:, 3:4]

    @property
    def rest(self) -> jax.Array:
        """(C, 1): of what each token writes, until the end."""
        return self.columns[:, 4:5]

    @property
    def fade_whole(self) -> jax.Array:
        """(1, 1)."""
        return self.rows[3:4, CHUNK - 1 :]


def head_rates(rates: jax.Array) -> list[HeadRates]:
    """Those of each head of a window (heads RATES, C)."""
    columns = rates.T
    firsts = range(0, rates.shape[0], RATES)
    return [HeadRates(columns[:, at : at + RATES], rates[at : at + RATES]) for at in firsts]


def places() -> tuple[jax.Array, jax.Array]:
    """The row and the column of each element of a chunk's matrix."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row, column


def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows brought to length one in float32, and by which factor."""
    x = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
    return x * factor, factor
