"""Adam with both moments in eight bits: a quarter of the optimizer's memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...hardware.formats import INT8, UINT8, NumberFormat, parse_format
from ...hardware.stored_formats import MOMENT_FORMATS
from ...hardware.target import on_one_gpu
from ...kernels.rounding import is_rounded_up
from ...parallel.mesh.axes import axes_with_role
from ...parallel.mesh.mesh import axis_sizes
from ...parallel.sharding.activations import current_rules

# Numbers that share a scale, along the last axis; the scales then add 1.6 % to the bytes.
BLOCK = MOMENT_FORMATS["int8"][0].block or 1
# Steps of the golden ratio fill the unit interval evenly, from any start.
GOLDEN = (math.sqrt(5) - 1) / 2


class Int8AdamState(NamedTuple):
    """Moments as codes in the shape of the parameters, with a scale for each block of them."""

    steps: jax.Array
    mu: Any  # int8
    nu: Any  # uint8
    mu_scales: Any  # float32, (..., blocks)
    nu_scales: Any


def scale_by_int8_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` whose two moments are kept in eight bits between steps.

    A moment changes by less in one step than its neighbouring codes differ, so rounding to the
    nearest would freeze it. Rounding goes up as often as the value is near the upper code, by a
    fixed sequence over steps and elements: exact on average, the same after a restart.
    """

    def init(params: Any) -> Int8AdamState:
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

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        steps: Any = optax.safe_increment(state.steps)

        def one(gradient: Any, mu: Any, nu: Any, mu_scale: Any, nu_scale: Any) -> tuple[Any, ...]:
            # In blocks from end to end: a TPU copies an array to cut its rows, so only what is
            # read and written is cut, in as few bits as it has.
            wide = _blocks(gradient).astype(jnp.float32)
            mean = b1 * _values(_blocks(mu), mu_scale) + (1 - b1) * wide
            square = b2 * _values(_blocks(nu), nu_scale) + (1 - b2) * wide * wide
            unbiased = mean / (1 - b1**steps), square / (1 - b2**steps)
            update = (unbiased[0] / (jnp.sqrt(unbiased[1]) + eps)).astype(gradient.dtype)
            mean_codes, mean_scales = _codes(mean, INT8, step=steps)
            square_codes, square_scales = _codes(square, UINT8, step=steps)
            whole = (_joined(b, gradient.shape) for b in (update, mean_codes, square_codes))
            return *whole, mean_scales, square_scales

        def leaf(*arrays: Any) -> tuple[Any, ...]:
            # A GPU cuts rows without copying them, and fuses all of it.
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

    Cut into blocks, a whole stack would exist several times over.
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
    """Pipeline stages that stacks of layers are split over in the step being traced."""
    rules = current_rules()
    sizes = {} if rules is None else axis_sizes(rules.mesh)
    return math.prod(sizes[axis] for axis in axes_with_role(sizes, "stage"))


def encode(
    values: jax.Array, format: NumberFormat, *, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Codes of `values` and the scale of each block of them.

    Adam divides one moment by the root of the other, so what is small against its block must not
    become zero. Codes are spaced as a fourth power: they reach 1e-9 of the largest for either.

    Args:
        values: Any shape; none below zero where `format` is unsigned.
        format: Of the codes, INT8 or UINT8.
        step: Decides, with an element's position, which way it is rounded.
    """
    codes, scales = _codes(_blocks(values.astype(jnp.float32)), format, step=step)
    return _joined(codes, values.shape), scales


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The values of codes, in float32."""
    return _joined(_values(_blocks(codes), scales), codes.shape)


def _codes(
    blocks: jax.Array, format: NumberFormat, *, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Codes of blocks of float32, and their scales."""
    top = format.largest
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    shares = jnp.abs(blocks) / jnp.where(scales > 0, scales, 1)
    lower = jnp.minimum(jnp.floor(top * jnp.sqrt(jnp.sqrt(shares))), top - 1)
    # The smallest code is not zero: a zero second moment would divide its first one by eps.
    lower = jnp.maximum(lower, 1) if format.kind == "unsigned" else lower
    low, high = _fourth_power(lower / top), _fourth_power((lower + 1) / top)
    codes = lower + is_rounded_up(shares, low, high, _thresholds(blocks.shape, step))
    signed = jnp.where(blocks < 0, -codes, codes)
    return signed.astype(format.name), scales.squeeze(-1)


def _values(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The values of blocks of codes, in float32."""
    shares = codes.astype(jnp.float32) / parse_format(codes.dtype.name).largest
    return jnp.sign(shares) * _fourth_power(shares) * scales[..., None]


def _thresholds(shape: tuple[int, ...], step: jax.Array) -> jax.Array:
    """Numbers in [0, 1): evenly spread over the elements of a block, and over the steps of each."""
    columns = jnp.arange(shape[-1], dtype=jnp.float32)
    # Steps wrap where float32 would lose the fraction.
    phase = GOLDEN * (step % 4096).astype(jnp.float32) + math.sqrt(2) * columns
    return phase - jnp.floor(phase)


def _fourth_power(x: jax.Array) -> jax.Array:
    return (x * x) * (x * x)


def _blocks(values: jax.Array) -> jax.Array:
    """(..., blocks, size): the last axis cut, with zeros where it does not come out even."""
    last = _last(values.shape)
    size = min(BLOCK, last)
    count = -(-last // size)
    rows = values.reshape(*values.shape[:-1], last)
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, count * size - last)])
    return padded.reshape(*rows.shape[:-1], count, size)


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array that `_blocks` cut."""
    rows = blocks.reshape(*blocks.shape[:-2], -1)[..., : _last(shape)]
    return rows.reshape(shape)


def _scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    last = _last(shape)
    return (*shape[:-1], -(-last // min(BLOCK, last)))


def _last(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1
