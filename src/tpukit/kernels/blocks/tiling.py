"""Tiles: how TPU memory lays arrays out, padding to it, and packings with exact inverses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import TPUKernelError
from ...hardware import get_chip, parse_format
from ...hardware.target import current_target
from ...shown import Shown

Array = TypeVar("Array", jax.Array, np.ndarray)

LANES = 128
USUAL_SUBLANES = 8  # where no generation is stated
BLOCK_SIZE = 128  # edge of a block in the blocked layout
MIN_PARALLEL_SIZE = LANES  # a shorter last dimension leaves lanes of every tile empty


@dataclass(frozen=True)
class Padding(Shown):
    """What padding to tiles did to a shape.

    Attributes:
        shape: Before.
        padded_shape: After.
        dtype: Of the elements.
    """

    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: str

    @property
    def added(self) -> tuple[int, ...]:
        """Elements added at the end of each axis."""
        return tuple(
            after - before for before, after in zip(self.shape, self.padded_shape, strict=True)
        )

    @property
    def added_fraction(self) -> float:
        """The share of the padded array that is padding."""
        padded = math.prod(self.padded_shape)
        return 1 - math.prod(self.shape) / padded if padded else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Shapes, what was added, and its share."""
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
    """Rows of a tile of 32-bit values: 8, and 16 on 8t.

    Args:
        chip: A generation; the one that is traced for by default.
    """
    target = chip or current_target()
    if target is None:
        return USUAL_SUBLANES
    return int(get_chip(target).sublanes.require("The tile of an array"))


def tile_shape(dtype: Any, chip: str | None = None) -> tuple[int, int]:
    """Rows and lanes of one tile: (8, 128) of 32 bits, (16, 128) of 16, (32, 128) of 8.

    Narrower values are packed, so a tile holds more rows of them; twice as many on 8t.

    Args:
        dtype: Of the values.
        chip: A generation; the one that is traced for by default.

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
    """The smallest multiple of `multiple` that is no less than `size`."""
    return -(-size // multiple) * multiple


def dividing_columns(width: int, *, most: int) -> int:
    """The largest power of two that divides the width, `most` (a power of two) at most.

    Triton takes blocks of such sizes only.
    """
    return min(most, width & -width)


def tile_padding(
    shape: tuple[int, ...], dtype: Any, *, tile: tuple[int, ...] | None = None
) -> Padding:
    """What padding the last axes of `shape` to whole tiles adds.

    Args:
        shape: Of the array; one with a single axis is padded to lanes alone.
        dtype: Decides the tile unless one is given.
        tile: Multiples for the last axes, the last one last.
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
    """Pad the last axes of `x` at their ends to whole tiles; `unpad` takes it off again."""
    padding = tile_padding(x.shape, x.dtype, tile=tile)
    if not any(padding.added):
        return x, padding
    namespace: Any = x.__array_namespace__()  # a host's weights are laid out by numpy
    filled = namespace.pad(x, [(0, extra) for extra in padding.added], constant_values=value)
    return filled, padding


def unpad(x: Array, padding: Padding) -> Array:
    """What `pad_to_tiles` was given.

    Raises:
        TPUKernelError: `x` has not the padded shape.
    """
    if x.shape != padding.padded_shape:
        raise TPUKernelError(
            f"The array has the shape {x.shape} and the padding was made for "
            f"{padding.padded_shape}; slice it before changing its shape."
        )
    return x[tuple(slice(size) for size in padding.shape)]


def pack_tiles(x: Array, *, tile: tuple[int, int] | None = None) -> Array:
    """(…, H, W) -> (…, H/rows, W/lanes, rows, lanes): the order of a TPU's memory, padded.

    Raises:
        TPUKernelError: The array has fewer than two axes.
    """
    if x.ndim < 2:
        raise TPUKernelError(
            f"Tiles span the last two axes and the array has the shape {x.shape}; reshape it to "
            "two axes or more."
        )
    rows, lanes = tile or tile_shape(x.dtype)
    padded, _ = pad_to_tiles(x, tile=(rows, lanes))
    *leading, height, width = padded.shape
    split = padded.reshape(*leading, height // rows, rows, width // lanes, lanes)
    return split.swapaxes(-3, -2)


def unpack_tiles(packed: Array, shape: tuple[int, ...]) -> Array:
    """The array of `shape` that `pack_tiles` was given.

    Raises:
        TPUKernelError: Its tiles do not hold that shape.
    """
    *leading, down, across, rows, lanes = packed.shape
    expected = tile_padding(shape, packed.dtype, tile=(rows, lanes)).padded_shape
    if expected != (*leading, down * rows, across * lanes):
        raise TPUKernelError(
            f"Tiles of the shape {packed.shape} hold {(*leading, down * rows, across * lanes)} "
            f"and not {expected}, which {shape} is padded to; give the shape that was packed."
        )
    joined = packed.swapaxes(-3, -2).reshape(expected)
    return joined[tuple(slice(size) for size in shape)]


def to_blocked(x: Array, *, block: int = BLOCK_SIZE) -> Array:
    """(batch, height, width, channels) -> (batch, height/128, width/128, 128, 128, channels).

    Height and width are padded with zeros to whole blocks.

    Raises:
        TPUKernelError: The array has not four axes.
    """
    if x.ndim != 4:
        raise TPUKernelError(
            f"The blocked layout is one of (batch, height, width, channels) and the array has the "
            f"shape {x.shape}; add or merge axes until it has four."
        )
    padded, _ = pad_to_tiles(x, tile=(block, block, 1))
    batch, height, width, channels = padded.shape
    split = padded.reshape(batch, height // block, block, width // block, block, channels)
    return split.swapaxes(2, 3)


def from_blocked(blocked: Array, *, height: int, width: int) -> Array:
    """What `to_blocked` was given, of that height and width.

    Raises:
        TPUKernelError: The blocks do not hold that height and width.
    """
    batch, down, across, block, _, channels = blocked.shape
    if (round_up(height, block), round_up(width, block)) != (down * block, across * block):
        raise TPUKernelError(
            f"{down} x {across} blocks of {block} do not hold {height} x {width}; give the height "
            "and width that were blocked."
        )
    joined = blocked.swapaxes(2, 3).reshape(batch, down * block, across * block, channels)
    return joined[:, :height, :width]


def call_padded(
    reference: Callable[..., Any], function: Callable[..., Any], *arrays: Any, **options: Any
) -> Any:
    """`function` of the arrays padded with zeros to whole tiles, its results cut back.

    Args:
        reference: Takes the arrays as they are: its result has the shapes to cut back to. It is
            traced and not run.
        function: Takes the padded arrays.
        *arrays: Arrays, or trees of them.
        **options: Static arguments of both; `blocks` of the function alone.

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
            f"On padded arrays the kernel gives {result.shape}, which does not hold the "
            f"{wanted.shape} of the function itself; pad_to_tiles= suits kernels whose results "
            "grow with their arguments."
        )
    return result[tuple(slice(size) for size in wanted.shape)]
