"""Tiles: the layout of arrays in TPU memory, padding and packing to it, and tile matmuls."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...annotations import PyTree
from ...errors import TPUKernelError
from ...hardware import get_chip, parse_format
from ...hardware.target import current_target
from ...shown import Shown

Array = TypeVar("Array", jax.Array, np.ndarray)

LANES = 128
USUAL_SUBLANES = 8  # without a target generation
BLOCK_SIZE = 128  # edge of a block in the blocked layout
MIN_PARALLEL_SIZE = LANES  # a shorter last dimension leaves lanes of every tile empty


@dataclass(frozen=True)
class Padding(Shown):
    """The result of padding a shape to tiles.

    Attributes:
        shape: Shape before padding.
        padded_shape: Shape after padding.
        dtype: Dtype of the elements.
    """

    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: str

    @property
    def added(self) -> tuple[int, ...]:
        """Elements of padding at the end of each axis."""
        return tuple(
            after - before for before, after in zip(self.shape, self.padded_shape, strict=True)
        )

    @property
    def added_fraction(self) -> float:
        """The share of the padded array that is padding."""
        padded = math.prod(self.padded_shape)
        return 1 - math.prod(self.shape) / padded if padded else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the shapes, the padding per axis, and its share."""
        return {
            "shape": list(self.shape),
            "padded_shape": list(self.padded_shape),
            "dtype": self.dtype,
            "added": list(self.added),
            "added_fraction": self.added_fraction,
        }

    def __rich__(self) -> str:
        return (
            f"{self.dtype}{list(self.shape)} padded to {list(self.padded_shape)}: "
            f"{self.added_fraction:.1%} of it is padding"
        )


def word_sublanes(chip: str | None = None) -> int:
    """Return the rows of a tile of 32-bit values: 8, and 16 on 8t.

    Args:
        chip: A generation; by default the one that is traced for.
    """
    target = chip or current_target()
    if target is None:
        return USUAL_SUBLANES
    return int(get_chip(target).sublanes.require("The tile of an array"))


def tile_shape(dtype: Any, chip: str | None = None) -> tuple[int, int]:
    """Return rows and lanes of one tile: (8, 128) of 32 bits, (16, 128) of 16, (32, 128) of 8.

    Narrower values are packed, so that a tile has more rows of them; 8t has twice as many.

    Args:
        dtype: Dtype of the values.
        chip: A generation; by default the one that is traced for.

    Raises:
        TPUKernelError: The TPU has no values of that width.
    """
    bits = parse_format(jnp.dtype(dtype).name).bits
    if bits not in (4, 8, 16, 32):
        raise TPUKernelError(
            f"A TPU has no {bits}-bit tiles (dtype {jnp.dtype(dtype).name}); expected 4, 8, 16 or "
            "32 bits: cast to float32, bfloat16 or an integer of those widths."
        )
    return word_sublanes(chip) * 32 // bits, LANES


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def dividing_columns(width: int, *, most: int) -> int:
    """Return the largest power of two up to `most`, itself a power of two, that divides the width.

    Triton takes only blocks of such sizes.
    """
    return min(most, width & -width)


def tile_padding(
    shape: tuple[int, ...], dtype: Any, *, tile: tuple[int, ...] | None = None
) -> Padding:
    """Return the padding of the last axes of `shape` to full tiles.

    Args:
        shape: Shape of the array; a single axis is padded to lanes alone.
        dtype: Decides the tile unless one is given.
        tile: Multiples for the last axes, in their order.
    """
    multiples = (tile or tile_shape(dtype))[-len(shape) :] if shape else ()
    kept = len(shape) - len(multiples)
    padded = tuple(
        round_up(size, multiple) for size, multiple in zip(shape[kept:], multiples, strict=True)
    )
    return Padding(tuple(shape), (*shape[:kept], *padded), jnp.dtype(dtype).name)


def pad_to_tiles(
    x: Array, *, tile: tuple[int, ...] | None = None, value: float = 0
) -> tuple[Array, Padding]:
    """Pad the ends of the last axes of `x` to full tiles; `unpad` reverses it."""
    padding = tile_padding(x.shape, x.dtype, tile=tile)
    if not any(padding.added):
        return x, padding
    namespace: Any = x.__array_namespace__()  # numpy pads the weights of a host
    filled = namespace.pad(x, [(0, extra) for extra in padding.added], constant_values=value)
    return filled, padding


def unpad(x: Array, padding: Padding) -> Array:
    """Return the array that `pad_to_tiles` was given.

    Raises:
        TPUKernelError: `x` does not have the padded shape.
    """
    if x.shape != padding.padded_shape:
        raise TPUKernelError(
            f"The array has the shape {x.shape}, but the padding was made for "
            f"{padding.padded_shape}; slice it before changing its shape."
        )
    return x[tuple(slice(size) for size in padding.shape)]


def pack_tiles(x: Array, *, tile: tuple[int, int] | None = None) -> Array:
    """Pad and reorder (…, H, W) to (…, H/rows, W/lanes, rows, lanes), as TPU memory has it.

    Raises:
        TPUKernelError: The array has fewer than two axes.
    """
    if x.ndim < 2:
        raise TPUKernelError(
            f"Tiles span the last two axes, but the array has the shape {x.shape}; reshape it to "
            "two axes or more."
        )
    rows, lanes = tile or tile_shape(x.dtype)
    padded, _ = pad_to_tiles(x, tile=(rows, lanes))
    *leading, height, width = padded.shape
    split = padded.reshape(*leading, height // rows, rows, width // lanes, lanes)
    return split.swapaxes(-3, -2)


def unpack_tiles(packed: Array, shape: tuple[int, ...]) -> Array:
    """Return the array of `shape` that `pack_tiles` was given.

    Raises:
        TPUKernelError: The tiles are not those of that shape.
    """
    *leading, down, across, rows, lanes = packed.shape
    expected = tile_padding(shape, packed.dtype, tile=(rows, lanes)).padded_shape
    if expected != (*leading, down * rows, across * lanes):
        raise TPUKernelError(
            f"Tiles of the shape {packed.shape} are {(*leading, down * rows, across * lanes)} in "
            f"all, but {shape} is padded to {expected}; give the shape that was packed."
        )
    joined = packed.swapaxes(-3, -2).reshape(expected)
    return joined[tuple(slice(size) for size in shape)]


def to_blocked(x: Array, *, block: int = BLOCK_SIZE) -> Array:
    """Reorder (batch, H, W, channels) to (batch, H/128, W/128, 128, 128, channels).

    Height and width are padded with zeros to full blocks.

    Raises:
        TPUKernelError: The array does not have four axes.
    """
    if x.ndim != 4:
        raise TPUKernelError(
            f"The blocked layout takes (batch, height, width, channels), but the array has the "
            f"shape {x.shape}; add or merge axes until it has four."
        )
    padded, _ = pad_to_tiles(x, tile=(block, block, 1))
    batch, height, width, channels = padded.shape
    split = padded.reshape(batch, height // block, block, width // block, block, channels)
    return split.swapaxes(2, 3)


def from_blocked(blocked: Array, *, height: int, width: int) -> Array:
    """Return the array of that height and width that `to_blocked` was given.

    Raises:
        TPUKernelError: The blocks are not those of that height and width.
    """
    batch, down, across, block, _, channels = blocked.shape
    if (round_up(height, block), round_up(width, block)) != (down * block, across * block):
        raise TPUKernelError(
            f"{down} x {across} blocks of {block} are not those of {height} x {width}; give the "
            "height and width that were blocked."
        )
    joined = blocked.swapaxes(2, 3).reshape(batch, down * block, across * block, channels)
    return joined[:, :height, :width]


def call_padded(
    reference: Callable[..., Any], function: Callable[..., Any], *arrays: PyTree, **options: Any
) -> Any:
    """Call `function` with arrays padded with zeros to full tiles, and cut its results back.

    Args:
        reference: Takes the unpadded arrays; its result has the shapes to cut back to. It is traced
            and not run.
        function: Takes the padded arrays.
        *arrays: Arrays, or trees of them.
        **options: Static arguments of both; `blocks` only of `function`.

    Raises:
        TPUKernelError: A result is smaller than the reference's.
    """
    plain = {name: value for name, value in options.items() if name != "blocks"}
    wanted = jax.eval_shape(lambda *given: reference(*given, **plain), *arrays)
    padded = jax.tree.map(lambda array: pad_to_tiles(array)[0], arrays)
    return jax.tree.map(_cut, function(*padded, **options), wanted)


def _cut(result: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if result.ndim != len(wanted.shape) or any(
        have < want for have, want in zip(result.shape, wanted.shape, strict=True)
    ):
        raise TPUKernelError(
            f"On padded arrays the kernel returns {result.shape}, which is smaller than the "
            f"{wanted.shape} of the function itself; use pad_to_tiles= only for kernels whose "
            "results grow with their arguments."
        )
    return result[tuple(slice(size) for size in wanted.shape)]


class Ref(Protocol):
    """A block of memory in a kernel, read by indexing and written by assignment."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the elements."""
        ...

    @property
    def at(self) -> Any:
        """Parts of the block, as references of their own."""
        ...

    def __getitem__(self, index: Any) -> jax.Array: ...

    def __setitem__(self, index: Any, value: jax.typing.ArrayLike) -> None: ...


# True is the plain interpreter; the parameters belong to the one that finds races.
Interpret: TypeAlias = bool | pltpu.InterpretParams


def tile_dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply two tiles: integers in int32, floats in float32; float32 is not rounded.

    Args:
        a: A tile.
        b: Another tile.
        contract: The contracted dimension of `a` and of `b`.
    """
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.int32 if integers else jnp.float32,
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    )


def zero_past_end(tile: jax.Array, first: Any, end: int, *, axis: int) -> jax.Array:
    """Set values past `end` to zero, because a last tile has undefined values there, maybe NaN.

    Args:
        tile: A tile of an array.
        first: Where the tile begins in the array.
        end: The array's size along `axis`.
        axis: The axis along which the tile may extend past the end.
    """
    if end % tile.shape[axis] == 0:
        return tile
    place = first + jax.lax.broadcasted_iota(jnp.int32, tile.shape, axis)
    return jnp.where(place < end, tile, jnp.zeros_like(tile))


def accumulate(total: Any, more: jax.Array, step: Any) -> None:
    """Store `more` in `total` at step 0, and add it at every later step."""

    @pl.when(step == 0)
    def _start() -> None:
        total[...] = more

    @pl.when(step > 0)
    def _add() -> None:
        total[...] += more
