"""Run stacks of layers: scanned or unrolled, in remat segments, kinds in their order."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from ..remat.policy import RematPolicy
from .layer_pattern import LayerRun
from .mixing import SharedKeys
from .turns import before_the_next

# (parameters of one layer, what is carried, its kind, its own inputs, keys of other layers)
# -> (what is carried, statistics or None, its keys or None)
LayerFunction = Callable[
    [Any, Any, str, Any, Mapping[str, SharedKeys]], tuple[Any, Any, SharedKeys | None]
]


@dataclass(frozen=True)
class StackedLayers:
    """Parameters of layers, stacked by kind, and how they are gone through.

    Attributes:
        stacks: Parameters by the name of their stack; leaves have a leading layer axis.
        stack_of: The stack of each kind.
        order: The kind of every layer.
        donors: Numbers of the layers whose keys others read; each is a run of its own.
        inputs: What each layer is given of its own, with a leading axis of all layers; or None.
    """

    stacks: Mapping[str, Any]
    stack_of: Mapping[str, str]
    order: tuple[str, ...]
    donors: frozenset[int]
    inputs: Any = None

    def part(self, first: int, count: int) -> "_Part":
        """The parameters of `count` layers from `first` on, cut out of their stacks."""
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
    """Consecutive layers' parameters by stack, and their own inputs."""

    stacks: dict[str, Any]
    inputs: Any


def run_layers(
    layer: LayerFunction,
    layers: StackedLayers,
    runs: tuple[LayerRun, ...],
    x: Any,
    *,
    remat: RematPolicy,
    scan: bool = True,
) -> tuple[Any, Any]:
    """Send `x`, the activations or any tree with them, through every layer.

    One scan step runs as many layers as it takes for both the cycle of a run and the remat
    segments to come out even; what is left over at the end of a run is unrolled.

    Returns:
        What the last layer gives, and the layers' statistics added up.
    """
    totals: list[Any] = []
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
    x: Any,
    shared: Mapping[str, SharedKeys],
    *,
    remat: RematPolicy,
    scan: bool,
) -> tuple[Any, Any, SharedKeys | None]:
    count = len(run.kinds)
    group = math.lcm(len(run.cycle), remat.every_n_layers)
    groups = count // group if scan and run.repeats > 1 else 0
    totals: list[Any] = []
    keys = None
    if groups:
        whole = layers.part(run.first, groups * group)
        scanned = jax.tree.map(
            lambda leaf: leaf.reshape(groups, leaf.shape[0] // groups, *leaf.shape[1:]), whole
        )
        kinds = run.kinds[:group]

        def body(carry: Any, part: _Part) -> tuple[Any, Any]:
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
    x: Any,
    shared: Mapping[str, SharedKeys],
    *,
    remat: RematPolicy,
    in_loop: bool,
) -> tuple[Any, Any, SharedKeys | None]:
    """Layers one after another; gives the keys of the last one."""
    slots = _slots(kinds, stack_of)
    totals: list[Any] = []
    keys: SharedKeys | None = None
    if not remat.active and len(kinds) > 1:
        cuts = {stack: _cut(of) for stack, of in part.stacks.items()}
        for number, kind in enumerate(kinds):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], part.inputs)
            one = cuts[stack_of[kind]][slots[number]]
            x, seen, keys = layer(one, x, kind, own, shared)
            totals.append(seen)
        return x, _add(totals), keys
    several = len(kinds) > remat.every_n_layers
    for start in range(0, len(kinds), remat.every_n_layers):
        numbers = range(start, min(start + remat.every_n_layers, len(kinds)))

        # Layers are cut out of the stack inside the segment: cut outside, each cut would be an
        # input of the segment, and the backward pass would keep a second copy of the weights.
        def segment(part: _Part, x: Any, numbers: range = numbers) -> Any:
            statistics: list[Any] = []
            keys: SharedKeys | None = None
            for number in numbers:
                kind, slot = kinds[number], slots[number]
                stacked = part.stacks[stack_of[kind]]
                one = jax.tree.map(lambda leaf, slot=slot: leaf[slot], stacked)
                if several:
                    one, x = before_the_next(one, x)
                own = jax.tree.map(lambda leaf, number=number: leaf[number], part.inputs)
                x, seen, keys = layer(one, x, kind, own, shared)
                statistics.append(seen)
            return x, _add(statistics), keys

        x, seen, keys = remat.wrap(segment, in_loop=in_loop)(part, x)
        totals.append(seen)
    return x, _add(totals), keys


def _slots(kinds: tuple[str, ...], stack_of: Mapping[str, str]) -> list[int]:
    """Where each of these layers lies in the part of its stack that holds them."""
    met: dict[str, int] = {}
    slots: list[int] = []
    for kind in kinds:
        stack = stack_of[kind]
        slots.append(met.get(stack, 0))
        met[stack] = slots[-1] + 1
    return slots


def _cut(stacked: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(stacked)
    return [
        jax.tree.unflatten(structure, cuts) for cuts in zip(*map(_unstack, leaves), strict=True)
    ]


@jax.custom_vjp
def _unstack(leaf: jax.Array) -> tuple[jax.Array, ...]:
    """The layers of a stack, whose gradients are put side by side.

    The gradient of slicing would add up as many whole stacks as there are layers.
    """
    return tuple(leaf[number] for number in range(leaf.shape[0]))


def _unstack_forward(leaf: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return _unstack(leaf), None


def _unstack_backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    return (jnp.stack(gradients),)


_unstack.defvjp(_unstack_forward, _unstack_backward)


def _add(statistics: list[Any]) -> Any:
    """Their sum; None where no layer has any."""
    present = [seen for seen in statistics if seen is not None]
    return reduce(lambda a, b: jax.tree.map(jnp.add, a, b), present) if present else None
