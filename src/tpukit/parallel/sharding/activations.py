"""Shardings of activations: models name the dimensions, the active strategy chooses the axes.

A model calls `constrain(x, "batch", "sequence", "embed")` and needs no mesh. Outside
`activation_rules(...)` the call returns `x` unchanged, so the same model runs on one device.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...annotations import AnyMesh
from ...errors import ShardingError, did_you_mean
from ..mesh.axes import BATCH_ROLES, axes_with_role
from ..mesh.mesh import axis_sizes
from .dimensions import DIMENSIONS
from .strategy import parse_strategy, strategy_axes

# An axis can shard only one dimension of an array. Inside an expert layer the expert dimension
# takes its axis back from the batch, and inside a tensor-parallel block the heads or the hidden
# units take theirs back from the sequence: that change is the all-to-all of expert parallelism and
# the reduce-scatter of sequence parallelism.
_PRECEDENCE = (
    "expert", "heads", "kv_heads", "mlp", "vocab", "batch", "capacity", "sequence",
)  # fmt: skip


@dataclass(frozen=True)
class ActivationRules:
    """Mesh axes for each logical activation dimension.

    Attributes:
        mesh: The mesh, with or without devices.
        axes: Logical dimension and the mesh axes that may shard it.
    """

    mesh: AnyMesh
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    _by_name: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", dict(self.axes))

    @classmethod
    def of(cls, mesh: AnyMesh, strategy: str | None) -> "ActivationRules":
        """Return the rules of a strategy on a mesh.

        Raises:
            ShardingError: The strategy is unknown or the mesh lacks an axis it needs.
        """
        sizes = axis_sizes(mesh)
        batch = axes_with_role(sizes, *BATCH_ROLES)
        axes: dict[str, tuple[str, ...]] = {"batch": batch, "capacity": batch}
        # Context before tensor, so that neighbours in a ring are full sequence blocks apart.
        for member in sorted(
            parse_strategy(strategy), key=lambda member: member.name == "sequence"
        ):
            own = tuple(strategy_axes(member, sizes))
            for dimension in member.activations:
                axes[dimension] = (*axes.get(dimension, ()), *own)
        return cls(mesh, tuple(sorted(axes.items())))

    def spec(
        self,
        logical_axes: tuple[str | None, ...],
        shape: tuple[int, ...],
        *,
        without: tuple[str, ...] = (),
    ) -> PartitionSpec:
        """Return the spec of an array whose dimensions are called `logical_axes`.

        Args:
            logical_axes: A name of `DIMENSIONS` or None for every dimension.
            shape: The array's shape; an axis that does not divide its dimension is left out.
            without: Axes that must not be used.
        """
        sizes = axis_sizes(self.mesh)
        taken = set(without)
        entries: list[tuple[str, ...]] = [()] * len(shape)
        order = sorted(range(len(shape)), key=lambda i: _rank(logical_axes[i]))
        for index in order:
            left = shape[index]
            for axis in self._by_name.get(logical_axes[index] or "", ()):
                if axis not in taken and left % sizes[axis] == 0:
                    entries[index] = (*entries[index], axis)
                    taken.add(axis)
                    left //= sizes[axis]
        return PartitionSpec(*(axes[0] if len(axes) == 1 else (axes or None) for axes in entries))


# A user context of jax is part of every jit cache key, so a function traced under one strategy is
# traced again under another. The name of the context is resolved once, here.
_current: Any = jax.make_user_context(None)


@contextmanager
def activation_rules(mesh: AnyMesh, strategy: str | None) -> Generator[ActivationRules]:
    """Let `constrain` place activations by `strategy` inside this context.

    Open it around the call that traces (`jit`, `lower`, `eval_shape`).

    Raises:
        ShardingError: The strategy is unknown or the mesh lacks an axis it needs.
    """
    rules = ActivationRules.of(mesh, strategy)
    with _current(rules):
        yield rules


def current_rules() -> ActivationRules | None:
    """Return the active rules, or None outside `activation_rules`."""
    return _current.value


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Constrain the sharding of `x` by the names of its dimensions; without rules return `x`.

    Args:
        x: An activation.
        logical_axes: For each dimension one of batch, sequence, embed, heads, kv_heads, head_dim,
            mlp, vocab, expert, capacity, or None.

    Raises:
        ShardingError: A name is unknown, or there are more or fewer names than dimensions.
    """
    sharding = activation_sharding(x.shape, *logical_axes)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def activation_sharding(shape: tuple[int, ...], *logical_axes: str | None) -> NamedSharding | None:
    """Return the sharding that `constrain` would give an activation of `shape`; None without one.

    Raises:
        ShardingError: A name is unknown, or there are more or fewer names than dimensions.
    """
    for name in logical_axes:
        if name is not None and name not in DIMENSIONS:
            raise ShardingError(
                f"constrain() got the dimension {name!r}; names are {', '.join(DIMENSIONS)}."
                f"{did_you_mean(name, DIMENSIONS)}"
            )
    if len(logical_axes) != len(shape):
        raise ShardingError(
            f"constrain() got {len(logical_axes)} names {logical_axes} for an array of shape "
            f"{shape}; give one name, or None, for each dimension."
        )
    rules = current_rules()
    if rules is None:
        return None
    mesh = rules.mesh
    # Inside shard_map some axes are already manual and x is a shard: only axes that are still
    # automatic may be named, on the mesh of that context.
    inside = jax.sharding.get_abstract_mesh()
    by_hand = tuple(str(axis) for axis in inside.manual_axes)
    if by_hand:
        mesh = inside
    fixed = tuple(
        str(name)
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Auto
    )
    if set(fixed) == set(mesh.axis_names):
        return None
    return NamedSharding(mesh, rules.spec(logical_axes, shape, without=fixed))


def _rank(name: str | None) -> int:
    return _PRECEDENCE.index(name) if name in _PRECEDENCE else len(_PRECEDENCE)
