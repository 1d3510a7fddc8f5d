"""Run stacks of layers, scanned or unrolled, in remat segments and in the order of their kinds."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ...annotations import PyTree
from ..remat.policy import RematPolicy
from .layer_pattern import LayerRun
from .mixing import SharedKeys

# (parameters of one layer, carry, its kind, its own inputs, keys of other layers)
# -> (carry, statistics or None, its keys or None)
LayerFunction = Callable[
    [PyTree, PyTree, str, PyTree, Mapping[str, SharedKeys]],
    tuple[PyTree, PyTree, SharedKeys | None],
]


@dataclass(frozen=True)
class StackedLayers:
    """Parameters of layers, stacked by kind, and the order of layers.

    Attributes:
        stacks: Parameters by stack name; leaves have a leading layer axis.
        stack_of: The stack of each kind.
        order: The kind of every layer.
        donors: Numbers of the layers whose keys other layers read; each is a run of its own.
        inputs: Per-layer inputs with a leading axis of all layers, or None.
    """

    stacks: Mapping[str, PyTree]
    stack_of: Mapping[str, str]
    order: tuple[str, ...]
    donors: frozenset[int]
    inputs: PyTree = None

    def part(self, first: int, count: int) -> "_Part":
        """Return the parameters of `count` layers from `first` on, sliced from their stacks."""
        kinds = self.order[first : first + count]
        before = Counter(self.stack_of[kind] for kind in self.order[:first])
        cut = {
            stack: jax.tree.map(
                lambda leaf, start=before[stack], size=size: leaf[start : start + size],
                self.stacks[stack],
            )
            for stack, size in Counter(self.stack_of[kind] for kind in kinds).items()
        }
        own = jax.tree.map(lambda leaf: leaf[first : first + count], self.inputs)
        return _Part(cut, own)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Part:
    """Parameters of consecutive layers by stack, and their per-layer inputs."""

    stacks: dict[str, PyTree]
    inputs: PyTree


def run_layers(
    layer: LayerFunction,
    layers: StackedLayers,
    runs: tuple[LayerRun, ...],
    x: PyTree,
    *,
    remat: RematPolicy,
    scan: bool = True,
) -> tuple[PyTree, PyTree]:
    """Send `x`, the activations or any tree with them, through every layer.

    One scan iteration runs a common multiple of the run's cycle and the remat segment. Layers left
    over at the end of a run are unrolled.

    Returns:
        The output of the last layer, and the sum of the layers' statistics.
    """
    totals: list[PyTree] = []
    shared: dict[str, SharedKeys] = {}
    for run in runs:
        x, total, keys = _run(layer, layers, run, x, shared, remat=remat, scan=scan)
        totals.append(total)
        if keys is not None:
            shared[layers.order[run.first]] = keys
    return x, _add(totals)


def _run(
    layer: LayerFunction,
    layers: StackedLayers,
    run: LayerRun,
    x: PyTree,
    shared: Mapping[str, SharedKeys],
    *,
    remat: RematPolicy,
    scan: bool,
) -> tuple[PyTree, PyTree, SharedKeys | None]:
    count = len(run.kinds)
    group = math.lcm(len(run.cycle), remat.every_n_layers)
    groups = count // group if scan and run.repeats > 1 else 0
    totals: list[PyTree] = []
    keys = None
    if groups:
        part = layers.part(run.first, groups * group)
        scanned = jax.tree.map(
            lambda leaf: leaf.reshape(groups, leaf.shape[0] // groups, *leaf.shape[1:]), part
        )
        kinds = run.kinds[:group]

        def body(carry: PyTree, part: _Part) -> tuple[PyTree, PyTree]:
            x, total, _ = _unrolled(
                layer, layers.stack_of, kinds, part, carry, shared, remat=remat, in_loop=True
            )
            return x, total

        x, per_group = jax.lax.scan(body, x, scanned)
        totals.append(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), per_group))
    if count > groups * group:
        first = groups * group
        rest = layers.part(run.first + first, count - first)
        x, total, keys = _unrolled(
            layer, layers.stack_of, run.kinds[first:], rest, x, shared, remat=remat, in_loop=False
        )
        totals.append(total)
    return x, _add(totals), keys if run.first in layers.donors else None


def _unrolled(
    layer: LayerFunction,
    stack_of: Mapping[str, str],
    kinds: tuple[str, ...],
    part: _Part,
    x: PyTree,
    shared: Mapping[str, SharedKeys],
    *,
    remat: RematPolicy,
    in_loop: bool,
) -> tuple[PyTree, PyTree, SharedKeys | None]:
    """Run layers one after another; return the output, statistics and keys of the last one."""
    slots = _slots(kinds, stack_of)
    totals: list[PyTree] = []
    keys: SharedKeys | None = None
    if not remat.active and len(kinds) > 1:
        cuts = {stack: _cut(of) for stack, of in part.stacks.items()}
        for number, kind in enumerate(kinds):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], part.inputs)
            weights = cuts[stack_of[kind]][slots[number]]
            x, seen, keys = layer(weights, x, kind, own, shared)
            totals.append(seen)
        return x, _add(totals), keys
    several = len(kinds) > remat.every_n_layers
    for start in range(0, len(kinds), remat.every_n_layers):
        numbers = range(start, min(start + remat.every_n_layers, len(kinds)))

        # Layers are sliced from the stack inside the segment. A slice from outside would be an
        # input of the segment, and the backward pass would keep a second copy of the weights.
        def segment(part: _Part, x: PyTree, numbers: range = numbers) -> PyTree:
            statistics: list[PyTree] = []
            keys: SharedKeys | None = None
            for number in numbers:
                kind, slot = kinds[number], slots[number]
                stacked = part.stacks[stack_of[kind]]
                weights = jax.tree.map(lambda leaf, slot=slot: leaf[slot], stacked)
                if several:
                    weights, x = join_gradients(weights, x)
                own = jax.tree.map(lambda leaf, number=number: leaf[number], part.inputs)
                x, seen, keys = layer(weights, x, kind, own, shared)
                statistics.append(seen)
            return x, _add(statistics), keys

        x, seen, keys = remat.wrap(segment, in_loop=in_loop)(part, x)
        totals.append(seen)
    return x, _add(totals), keys


def _slots(kinds: tuple[str, ...], stack_of: Mapping[str, str]) -> list[int]:
    """Return the index of each layer within the slice of its stack."""
    met: dict[str, int] = {}
    slots: list[int] = []
    for kind in kinds:
        stack = stack_of[kind]
        slots.append(met.get(stack, 0))
        met[stack] = slots[-1] + 1
    return slots


def _cut(stacked: PyTree) -> list[PyTree]:
    leaves, structure = jax.tree.flatten(stacked)
    return [
        jax.tree.unflatten(structure, cuts) for cuts in zip(*map(_unstack, leaves), strict=True)
    ]


@jax.custom_vjp
def _unstack(leaf: jax.Array) -> tuple[jax.Array, ...]:
    """Return the layers of a stack; their gradients are stacked.

    The gradient of slicing would instead add up one full stack per layer.
    """
    return tuple(leaf[number] for number in range(leaf.shape[0]))


def _unstack_forward(leaf: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return _unstack(leaf), None


def _unstack_backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    return (jnp.stack(gradients),)


_unstack.defvjp(_unstack_forward, _unstack_backward)


def _add(statistics: list[PyTree]) -> PyTree:
    """Return the sum of statistics, or None where no layer has any."""
    present = [seen for seen in statistics if seen is not None]
    return reduce(lambda a, b: jax.tree.map(jnp.add, a, b), present) if present else None


@jax.custom_jvp
def join_gradients(layer: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Return a layer's parameters and input unchanged; the backward pass computes both together.

    Gradients of weights are read only at the end of a scan iteration. In an iteration of several
    layers the compiler would delay them and keep the activations of all its layers. With this
    barrier a layer's gradients are complete before the backward pass reaches the next layer:
    gemma4-26b-a4b, six layers per iteration, took 40.8 GiB on v6e-16 and takes 28.8 GiB so.
    """
    return layer, x


@partial(join_gradients.defjvp, symbolic_zeros=True)
def _tangents_together(
    primals: tuple[PyTree, PyTree], tangents: tuple[PyTree, PyTree]
) -> tuple[tuple[PyTree, PyTree], PyTree]:
    """Join the tangents; frozen parameters, such as a LoRA base, have none to wait for."""
    leaves, structure = jax.tree.flatten(tangents, is_leaf=_is_zero)
    moving = iter(lax.optimization_barrier([leaf for leaf in leaves if not _is_zero(leaf)]))
    together = [leaf if _is_zero(leaf) else next(moving) for leaf in leaves]
    return primals, jax.tree.unflatten(structure, together)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def round_layer_weights(
    stacked: PyTree, dtype: jnp.dtype
) -> tuple[Callable[[PyTree], PyTree], PyTree]:
    """Return a stack for `run_layers` whose matrices are rounded to `dtype` layer by layer.

    A weight that is stored in float32 and used in bfloat16 has a gradient with bfloat16 values. By
    default a scan over layers stacks these gradients in float32, and XLA rounds the weights of all
    layers before the scan. That wastes four bytes per weight on the chip.

    Args:
        stacked: Parameters with a leading layer axis. Layers must use their matrices in `dtype`
            only, except routers.
        dtype: The dtype of activations.

    Returns:
        A function from a slice of the stack to a layer's parameters, and the stack.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(stacked)
    masters = [leaf for _, leaf in named]
    rounds = [
        _is_matrix(path) and leaf.dtype.itemsize > jnp.dtype(dtype).itemsize for path, leaf in named
    ]
    # Only the gradients of these are used. Their values are never read, so XLA removes them.
    narrow = [leaf.astype(dtype) if r else None for leaf, r in zip(masters, rounds, strict=True)]
    wide = [
        jax.lax.stop_gradient(leaf) if r else leaf for leaf, r in zip(masters, rounds, strict=True)
    ]

    def rounded(parameters: PyTree) -> PyTree:
        used: list[PyTree] = [
            leaf if other is None else _rounded(leaf, other)
            for leaf, other in zip(*parameters, strict=True)
        ]
        return jax.tree.unflatten(structure, used)

    return rounded, (wide, narrow)


def _is_matrix(path: tuple[Any, ...]) -> bool:
    names = {str(getattr(entry, "key", entry)) for entry in path}
    return "experts" in names or ("kernel" in names and "router" not in names)


@jax.custom_jvp
def _rounded(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """Return the value of `wide` in the dtype of `narrow`; gradients go to `narrow`."""
    # XLA would move a plain rounding out of the scan and round the full stack. The comparison
    # prevents that. It is false for NaN only, which the other branch keeps.
    return jnp.where(wide == wide, wide, wide + wide).astype(narrow.dtype)


@_rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    rounded: Any = _rounded(*primals)
    return rounded, tangents[1]
