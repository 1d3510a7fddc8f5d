"""Sharding strategies by name, and their products: which mesh axis shards which dimension.

A strategy gets one parameter and its free dimensions, and proposes axes for them. "fsdp+megatron"
calls each in turn, the structural ones first, in whatever order they are written: a layer axis
belongs to the pipeline before fsdp may use it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...annotations import AnyMesh
from ...errors import ShardingError, did_you_mean
from ..mesh.axes import Role, axes_with_role, names_of_role, role_of, share_experts
from ..mesh.mesh import axis_sizes
from .dimensions import Parameter
from .rules import does_not_divide

# fsdp gathers what it shards; gathering a vector costs a collective and saves almost nothing.
VECTOR_SPLIT_FROM = 2**20
MATRIX_SPLIT_FROM = 1024
# Dimensions that a layer's matrix maps to: any of them can be sharded and gathered.
WEIGHT_SIDES = ("embed", "heads", "kv_heads", "mlp")
LANES = 128

Assignment = Mapping[int, tuple[str, ...]]


class Strategy(Protocol):
    """One way to place parameters and activations."""

    @property
    def name(self) -> str:
        """The name that the user writes."""
        ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """Axis roles it can work on; the first that the mesh has is used."""
        ...

    @property
    def activations(self) -> Mapping[str, Role]:
        """Logical activation dimension -> the role of the axes that shard it."""
        ...

    def propose(
        self, parameter: Parameter, free: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Return axes for some of the `free` dimensions; `axes` are this strategy's, with sizes."""
        ...


@dataclass(frozen=True)
class ByDimension:
    """Shards the first free dimension of a given meaning: megatron, expert, pipeline."""

    name: str
    roles: tuple[Role, ...]
    splits: tuple[str, ...]
    activations: Mapping[str, Role] = field(default_factory=dict[str, Role])

    def propose(
        self, parameter: Parameter, free: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Give all axes to the first dimension of this strategy's meaning.

        Raises:
            ShardingError: That would divide heads.
        """
        ways = math.prod(axes.values())
        for index in free:
            dim, units = parameter.dims[index], parameter.units[index]
            if dim not in self.splits:
                continue
            # Grouped-query models have fewer key/value heads than devices, and each device keeps
            # the heads it needs. A guess from shapes is not reliable either. A stack that stages
            # cannot share (leading dense layers) is on all of them; `check_found_work` reports if
            # none can be shared.
            if units % ways and (dim in ("kv_heads", "layers") or parameter.guessed):
                continue
            if units % ways and units != parameter.shape[index]:
                raise does_not_divide(parameter.path, str(dim), units, axes)
            return {index: tuple(axes)}
        return {}


@dataclass(frozen=True)
class FullyShard:
    """Shards every large parameter once: along `embed` where known, else its longest dimension.

    Another named dimension is used where `embed` comes last and a shard of it would be mostly
    padding. Experts are sharded by number where they divide: such shards are gathered as they are,
    and gradients are reduce-scattered, which the compiler does not do for a few rows of each
    expert. They take as many axes as their number divides over; another dimension takes the rest.
    """

    name: str = "fsdp"
    roles: tuple[Role, ...] = ("fsdp", "data")
    activations: Mapping[str, Role] = field(default_factory=dict[str, Role])

    def propose(
        self, parameter: Parameter, free: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Give axes to dimensions that they divide, never to the layer axis of a scan."""
        own = [
            size
            for size, dim in zip(parameter.shape, parameter.dims, strict=True)
            if dim != "layers"
        ]
        threshold = VECTOR_SPLIT_FROM if len(own) < 2 else MATRIX_SPLIT_FROM
        if math.prod(own) < threshold:
            return {}
        usable = [index for index in free if parameter.dims[index] != "layers"]
        around = self._around_experts(parameter, usable, axes)
        return max(around, self._on_fewest(parameter, usable, axes), key=_axes_used)

    def _around_experts(
        self, parameter: Parameter, usable: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Shard experts over the axes that they divide over, another dimension over the rest."""
        experts = next((index for index in usable if parameter.dims[index] == "expert"), None)
        if experts is None:
            return {}
        own, rest = share_experts(parameter.shape[experts], axes)
        if not own:
            return {}
        # Shards of the dimension next to them are gathered as they are, like those of full experts.
        beside = [experts + 1] if experts + 1 in usable else []
        others = [index for index in usable if index != experts]
        choices = [self._on_fewest(parameter, some, rest) for some in (beside, others)]
        return {experts: tuple(own), **max(choices, key=_axes_used)}

    def _on_fewest(
        self, parameter: Parameter, usable: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Give one dimension as many axes as it divides over, the others to further dimensions."""
        names, last = tuple(axes), len(parameter.shape) - 1
        for count in range(len(names), 0, -1):
            ways = math.prod(axes[name] for name in names[:count])

            def merit(index: int, ways: int = ways) -> tuple[bool, bool, int, int]:
                dim, size = parameter.dims[index], parameter.shape[index]
                # A shard of the last dimension is padded to full lanes of memory.
                padded = index == last and size // ways % LANES > 0
                # Sharding a vocabulary would turn each embedding look-up into a masked all-reduce.
                named = dim in WEIGHT_SIDES and not padded
                return named, dim == "embed", size, -index

            fitting = [index for index in usable if parameter.shape[index] % ways == 0]
            if fitting:
                best = max(fitting, key=merit)
                others = [index for index in usable if index != best]
                rest = {name: axes[name] for name in names[count:]}
                return {best: names[:count], **self._on_fewest(parameter, others, rest)}
        return {}


def _axes_used(assignment: Assignment) -> int:
    return sum(map(len, assignment.values()))


@dataclass(frozen=True)
class ActivationsOnly:
    """Does not shard parameters: data parallelism, and the two ways to shard a sequence."""

    name: str
    roles: tuple[Role, ...]
    activations: Mapping[str, Role] = field(default_factory=dict[str, Role])

    def propose(
        self, parameter: Parameter, free: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Propose nothing."""
        return {}


# In order of precedence.
STRATEGIES: tuple[Strategy, ...] = (
    ByDimension("pipeline", ("stage",), ("layers",)),
    ByDimension("expert", ("expert",), ("expert",), {"expert": "expert"}),
    ByDimension(
        "megatron",
        ("tensor",),
        ("heads", "kv_heads", "mlp", "vocab"),
        {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    ),
    FullyShard(),
    ActivationsOnly("data", ("data", "fsdp", "replica")),
    ActivationsOnly("sequence", ("tensor",), {"sequence": "tensor"}),
    ActivationsOnly("context", ("context",), {"sequence": "context"}),
)


def strategy_names() -> tuple[str, ...]:
    """Return the names that may be joined with "+"."""
    return tuple(strategy.name for strategy in STRATEGIES)


def parse_strategy(text: str | None) -> tuple[Strategy, ...]:
    """Return the strategies of a product such as "fsdp+megatron", in order of precedence.

    None is the empty product: parameters are replicated unless a rule shards them.

    Raises:
        ShardingError: A name is unknown or appears twice.
    """
    if text is None:
        return ()
    known = strategy_names()
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in known:
            raise ShardingError(
                f"Unknown sharding strategy {name!r}; strategies are {', '.join(known)}, "
                f"joined by '+' as in 'fsdp+megatron'.{did_you_mean(name, known)}"
            )
        if names.count(name) > 1:
            raise ShardingError(f"Strategy {text!r} names {name!r} twice; write it once.")
    return tuple(strategy for strategy in STRATEGIES if strategy.name in names)


def strategy_axes(strategy: Strategy, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of a mesh that a strategy works on, with their sizes.

    Raises:
        ShardingError: The mesh has no axis for it.
    """
    for role in strategy.roles:
        present = axes_with_role(sizes, role)
        if present:
            return {axis: sizes[axis] for axis in present}
    wanted = [name for role in strategy.roles for name in names_of_role(role)]
    hints = "".join(did_you_mean(axis, wanted, most=1) for axis in sizes if axis not in wanted)
    seen = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    raise ShardingError(
        f"Strategy {strategy.name!r} needs a mesh axis called {' or '.join(map(repr, wanted))}, "
        f"but the mesh has {seen}; rename an axis or choose another strategy.{hints}"
    )


_STRATEGY_OF_ROLE: dict[Role, str] = {
    "fsdp": "fsdp",
    "tensor": "megatron",
    "expert": "expert",
    "stage": "pipeline",
    "context": "context",
    "data": "data",
    "replica": "data",
}


def strategy_for(axis_names: Iterable[str]) -> str:
    """Return the strategy for a mesh's axis names: "fsdp+megatron" for fsdp and tensor."""
    return "+".join(dict.fromkeys(_STRATEGY_OF_ROLE[role_of(axis)] for axis in axis_names))


def find_axis(mesh: AnyMesh, strategy: str, name: str) -> str | None:
    """Return the one mesh axis of the strategy `name`, or None when it is not in use."""
    for member in parse_strategy(strategy):
        if member.name == name:
            axes = strategy_axes(member, axis_sizes(mesh))
            if len(axes) > 1:
                raise ShardingError(
                    f"Strategy '{name}' works along one axis, but the mesh has {', '.join(axes)}; "
                    "keep one of them."
                )
            return next(iter(axes))
    return None
