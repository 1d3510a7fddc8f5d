"""What the kernels of both passes share: block sizes, arrays in the kernels' layout, windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.catalog import CHIP_FOR_KERNEL_BLOCKS
from ....hardware.target import current_target
from ...blocks.tiling import LANES, Interpret, round_up
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_capacity_bytes, vmem_limit_bytes
from ...registry.op import BlockSizes, KernelCase, shape_bucket
from .reference import EPS
from .xla import DeltaResiduals, chunk_rates

OP_NAME = "gated_delta"
# Matrices of a chunk then fill the lanes, and the matrix units of every generation.
CHUNK = 128
RATES = 8  # numbers per token and head of values, one per sublane
# Heads of values whose chains of matmuls overlap.
HEADS = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class DeltaBlocks(BlockSizes):
    """How many heads of keys one grid step takes, each with its heads of values."""

    key_heads: int


def group_of(case: KernelCase) -> int:
    """Return the heads of values per head of keys."""
    return case.arguments[2].shape[2] // case.arguments[1].shape[2]


def bucket(case: KernelCase) -> str:
    """Return the bucket by heads and widths, whatever the number of tokens and sequences."""
    q, v = case.arguments[0], case.arguments[2]
    shapes = (jax.ShapeDtypeStruct((*x.shape[2:],), x.dtype) for x in (q, v))
    return shape_bucket(KernelCase(case.name, tuple(shapes)))


def vmem_bytes(case: KernelCase, blocks: DeltaBlocks) -> int:
    """Return the VMEM of the backward pass, the larger one."""
    item = jnp.dtype(case.arguments[0].dtype).itemsize
    width, value_width = (round_up(case.arguments[at].shape[3], LANES) for at in (0, 2))
    heads = blocks.key_heads * group_of(case)
    state = heads * width * value_width
    # Queries, keys and their gradients; values, cotangents and gradients.
    tokens = item * CHUNK * (4 * blocks.key_heads * width + 3 * heads * value_width)
    rates = 2 * 4 * CHUNK * RATES * heads
    kept = item * (state + heads * CHUNK * CHUNK)
    windows = tokens + rates + kept + 2 * 4 * state
    return 2 * windows + 4 * state + 6 * 4 * heads * CHUNK * CHUNK


def block_space(case: KernelCase, chip: str) -> Iterator[DeltaBlocks]:
    """Yield the numbers of key heads that divide all of them and fit."""
    key_heads, group = case.arguments[1].shape[2], group_of(case)
    for heads in HEADS:
        ours = heads // group
        if ours and key_heads % ours == 0:
            blocks = DeltaBlocks(ours)
            if vmem_bytes(case, blocks) <= vmem_capacity_bytes(chip):
                yield blocks


def default_blocks(case: KernelCase, chip: str | None) -> DeltaBlocks:
    """Return as many heads as fit in half of VMEM, at least one head of keys."""
    limit = vmem_capacity_bytes(chip) // 2
    space = block_space(case, chip or CHIP_FOR_KERNEL_BLOCKS)
    return next((b for b in space if vmem_bytes(case, b) <= limit), DeltaBlocks(1))


@dataclass(frozen=True)
class Operands:
    """Sizes of one call, heads of a grid step, and the windows of its arrays.

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
        """Return those of one call, with the given or the tuned blocks."""
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
        """Heads of values per step."""
        return self.key_heads * self.group

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return round_up(self.tokens, CHUNK) // CHUNK

    @property
    def state(self) -> tuple[int, int]:
        """The sizes of one head's state, in full groups of lanes."""
        return round_up(self.width, LANES), round_up(self.value_width, LANES)

    def side_by_side(self, x: jax.Array) -> jax.Array:
        """Reshape (B, S, H, D) to (B, S, H D), padded to full chunks and groups of lanes."""
        padding = [(0, 0), (0, -x.shape[1] % CHUNK), (0, 0), (0, -x.shape[3] % LANES)]
        x = jnp.pad(x, padding)
        return x.reshape(*x.shape[:2], -1)

    def apart(self, x: jax.Array, *, heads: int, width: int) -> jax.Array:
        """Undo `side_by_side`."""
        return x.reshape(*x.shape[:2], heads, -1)[:, : self.tokens, :, :width]

    def pad_state(self, x: jax.Array) -> jax.Array:
        """Pad (B, HV, DK, DV) to full groups of lanes, in float32."""
        edges = ((0, padded - size) for padded, size in zip(self.state, x.shape[2:], strict=True))
        return jnp.pad(x.astype(jnp.float32), [(0, 0), (0, 0), *edges])

    def rates(self, given: DeltaResiduals) -> jax.Array:
        """Return (B, HV RATES, S): the fields of `ChunkRates` per head, one per sublane."""
        rates = chunk_rates(given.g, given.beta, given.starts, CHUNK)
        lines = [jnp.broadcast_to(x, rates.steps.shape) for x in rates]
        stacked = jnp.stack([*lines, *[jnp.zeros_like(lines[0])] * (RATES - len(lines))])
        # (rate, n, b, h, i) -> (b, h rate, n i)
        return stacked.transpose(2, 3, 0, 1, 4).reshape(self.batch, -1, self.chunks * CHUNK)

    def window(self, *sizes: int, of: str, backwards: bool = False) -> pl.BlockSpec:
        """Return a step's window of "tokens" (B, S, …), "rates", a "state", or "kept" data."""
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
        """Run a kernel over all chunks, with a state per head."""
        return pl.pallas_call(
            kernel,
            grid=(self.batch, self.all_key_heads // self.key_heads, self.chunks),
            in_specs=[spec for _, spec in arrays],
            out_specs=[spec for _, spec in results],
            out_shape=[shape for shape, _ in results],
            scratch_shapes=[pltpu.VMEM((self.heads, *self.state), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                # The state passes from chunk to chunk; heads and sequences are independent.
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
        """Return (C, C) decays between tokens, 0 where a token does not see the other."""
        columns, rows = self.columns, self.rows
        between = (columns[:, 0:1] - rows[0:1]) + (columns[:, 1:2] - rows[1:2])
        if cuts:
            seen = seen & (columns[:, 5:6] == rows[5:6])
        return jnp.exp(jnp.where(seen, between, -jnp.inf))

    @property
    def beta(self) -> jax.Array:
        """(C, 1) the share of a value that is written."""
        return self.columns[:, 2:3]

    @property
    def fade(self) -> jax.Array:
        """(C, 1) decay of the state before the chunk, until each token."""
        return self.columns[:, 3:4]

    @property
    def rest(self) -> jax.Array:
        """(C, 1) decay of what each token writes, until the end."""
        return self.columns[:, 4:5]

    @property
    def fade_whole(self) -> jax.Array:
        """(1, 1) decay of the state over the full chunk."""
        return self.rows[3:4, CHUNK - 1 :]


def head_rates(rates: jax.Array) -> list[HeadRates]:
    """Return the rates of each head of a window (heads RATES, C)."""
    columns = rates.T
    firsts = range(0, rates.shape[0], RATES)
    return [HeadRates(columns[:, at : at + RATES], rates[at : at + RATES]) for at in firsts]


def places() -> tuple[jax.Array, jax.Array]:
    """Return the row and the column of each element of a chunk's matrix."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row, column


def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalise rows to length one in float32; return them and their factors."""
    x = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
    return x * factor, factor
