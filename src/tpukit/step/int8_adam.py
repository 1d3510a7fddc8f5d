"""Adam with both moments in int8: a quarter of the optimizer's memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..annotations import PyTree
from ..hardware.formats import INT8, UINT8, NumberFormat, parse_format
from ..hardware.stored_formats import MOMENT_FORMATS
from ..hardware.target import on_one_gpu
from ..kernels.rounding import is_rounded_up
from ..parallel.mesh.axes import axes_with_role
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.sharding.activations import current_rules

# Numbers along the last axis that share a scale; scales add 1.6 % to the bytes.
BLOCK = MOMENT_FORMATS["int8"][0].block or 1
# Multiples of the golden ratio, modulo 1, fill the unit interval evenly from any start.
GOLDEN = (math.sqrt(5) - 1) / 2


class Int8AdamState(NamedTuple):
    """Moments as codes in the shape of the parameters, with a scale per block of codes."""

    steps: jax.Array
    mu: PyTree  # int8
    nu: PyTree  # uint8
    mu_scales: PyTree  # float32, (..., blocks)
    nu_scales: PyTree


def scale_by_int8_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam` with both moments in int8 between steps.

    A moment changes less in one step than neighbouring codes differ, so rounding to nearest would
    freeze it. Rounding up happens with a frequency that makes the mean exact. The decision follows
    a fixed sequence over steps and elements, so a restarted run rounds the same way.
    """

    def init(params: PyTree) -> Int8AdamState:
        def codes(format: NumberFormat) -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, format.name), params)

        def scales() -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(_scales_shape(leaf.shape)), params)

        return Int8AdamState(
            steps=jnp.zeros((), jnp.int32),
            mu=codes(INT8),
            nu=codes(UINT8),
            mu_scales=scales(),
            nu_scales=scales(),
        )

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> PyTree:
        del params
        steps: Any = optax.safe_increment(state.steps)

        def one(
            gradient: jax.Array,
            mu: jax.Array,
            nu: jax.Array,
            mu_scale: jax.Array,
            nu_scale: jax.Array,
        ) -> tuple[jax.Array, ...]:
            # All arithmetic is on blocks. Splitting rows into blocks copies an array on a TPU, so
            # only the stored arrays are split, in their narrow formats.
            wide = _blocks(gradient).astype(jnp.float32)
            mean = b1 * _values(_blocks(mu), mu_scale) + (1 - b1) * wide
            square = b2 * _values(_blocks(nu), nu_scale) + (1 - b2) * wide * wide
            unbiased = mean / (1 - b1**steps), square / (1 - b2**steps)
            update = (unbiased[0] / (jnp.sqrt(unbiased[1]) + eps)).astype(gradient.dtype)
            mean_codes, mean_scales = _codes(mean, INT8, step=steps)
            square_codes, square_scales = _codes(square, UINT8, step=steps)
            whole = (_joined(b, gradient.shape) for b in (update, mean_codes, square_codes))
            return *whole, mean_scales, square_scales

        def leaf(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            # A GPU splits rows without a copy and fuses everything.
            stacked = arrays[0].ndim > 2 and not on_one_gpu()
            return _layer_by_layer(one, arrays) if stacked else one(*arrays)

        whole = jax.tree.map(leaf, updates, state.mu, state.nu, state.mu_scales, state.nu_scales)
        structure = jax.tree.structure(updates)
        scaled, mu, nu, mu_scales, nu_scales = jax.tree.transpose(
            structure, jax.tree.structure((0,) * 5), whole
        )
        return scaled, Int8AdamState(steps, mu, nu, mu_scales, nu_scales)

    return optax.GradientTransformation(init, update)


def _layer_by_layer(
    update: Callable[..., tuple[jax.Array, ...]], stacks: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Update stacks of layers in place, one layer of every pipeline stage at a time.

    Splitting a whole stack into blocks would keep several copies of it in memory.
    """
    layers = len(stacks[0])
    stages = math.gcd(layers, _stages())
    cut = tuple(stack.reshape(stages, layers // stages, *stack.shape[1:]) for stack in stacks)

    def some(index: jax.Array, stacks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        now = update(*(jax.lax.dynamic_index_in_dim(s, index, 1, keepdims=False) for s in stacks))
        pairs = zip(stacks, now, strict=True)
        return tuple(jax.lax.dynamic_update_index_in_dim(s, new, index, 1) for s, new in pairs)

    done = jax.lax.fori_loop(0, layers // stages, some, cut)
    return tuple(new.reshape(old.shape) for new, old in zip(done, stacks, strict=True))


def _stages() -> int:
    """Return the number of pipeline stages of the step being traced."""
    rules = current_rules()
    sizes = {} if rules is None else axis_sizes(rules.mesh)
    return math.prod(sizes[axis] for axis in axes_with_role(sizes, "stage"))


def encode(
    values: jax.Array, format: NumberFormat, *, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return codes of `values` and one scale per block.

    Adam divides one moment by the square root of the other, so values that are small within their
    block must not become zero. Codes are spaced as a fourth power, which reaches down to 1e-9 of
    the block's largest value.

    Args:
        values: Any shape; not negative where `format` is unsigned.
        format: INT8 or UINT8.
        step: Decides, together with an element's position, the direction of rounding.
    """
    codes, scales = _codes(_blocks(values.astype(jnp.float32)), format, step=step)
    return _joined(codes, values.shape), scales


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the float32 values of codes."""
    return _joined(_values(_blocks(codes), scales), codes.shape)


def _codes(
    blocks: jax.Array, format: NumberFormat, *, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return codes of float32 blocks and their scales."""
    top = format.largest
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    shares = jnp.abs(blocks) / jnp.where(scales > 0, scales, 1)
    lower = jnp.minimum(jnp.floor(top * jnp.sqrt(jnp.sqrt(shares))), top - 1)
    # The smallest unsigned code is 1, because a zero second moment would leave eps as the divisor.
    lower = jnp.maximum(lower, 1) if format.kind == "unsigned" else lower
    low, high = _fourth_power(lower / top), _fourth_power((lower + 1) / top)
    codes = lower + is_rounded_up(shares, low, high, _thresholds(blocks.shape, step))
    signed = jnp.where(blocks < 0, -codes, codes)
    return signed.astype(format.name), scales.squeeze(-1)


def _values(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the float32 values of blocks of codes."""
    shares = codes.astype(jnp.float32) / parse_format(codes.dtype.name).largest
    return jnp.sign(shares) * _fourth_power(shares) * scales[..., None]


def _thresholds(shape: tuple[int, ...], step: jax.Array) -> jax.Array:
    """Return numbers in [0, 1), evenly spread over a block's elements and over steps."""
    columns = jnp.arange(shape[-1], dtype=jnp.float32)
    # Steps wrap before float32 would lose the fraction.
    phase = GOLDEN * (step % 4096).astype(jnp.float32) + math.sqrt(2) * columns
    return phase - jnp.floor(phase)


def _fourth_power(x: jax.Array) -> jax.Array:
    return (x * x) * (x * x)


def _blocks(values: jax.Array) -> jax.Array:
    """Return values as (..., blocks, size), padded with zeros to full blocks."""
    last = _last(values.shape)
    size = min(BLOCK, last)
    count = -(-last // size)
    rows = values.reshape(*values.shape[:-1], last)
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, count * size - last)])
    return padded.reshape(*rows.shape[:-1], count, size)


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `_blocks` for an array of `shape`."""
    rows = blocks.reshape(*blocks.shape[:-2], -1)[..., : _last(shape)]
    return rows.reshape(shape)


def _scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    last = _last(shape)
    return (*shape[:-1], -(-last // min(BLOCK, last)))


def _last(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1
