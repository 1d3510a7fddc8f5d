"""Sharding strategies by name, and their products: which mesh axis splits which dimension.

A strategy sees one parameter and the dimensions nobody has taken yet, and names the axes that
split them. "fsdp+megatron" asks each in turn, the structural ones first, whatever order the user
wrote: a layer axis belongs to the pipeline before fsdp may look at it.
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

# fsdp gathers what it splits; gathering a vector costs a collective and saves almost nothing.
VECTOR_SPLIT_FROM = 2**20
MATRIX_SPLIT_FROM = 1024
# What a matrix of a layer turns into something else: any of them can be split and gathered.
WEIGHT_SIDES = ("embed", "heads", "kv_heads", "mlp")
LANES = 128

Assignment = Mapping[int, tuple[str, ...]]


class Strategy(Protocol):
    """One way to place parameters and activations."""

    @property
    def name(self) -> str:
        """What the user writes."""
        ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """Axis roles it can work on; the first that the mesh has is used."""
        ...

    @property
    def activations(self) -> Mapping[str, Role]:
        """Logical activation dimension -> the role of the axes that split it."""
        ...

    def propose(
        self, parameter: Parameter, free: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Axes for some of the `free` dimensions; `axes` are this strategy's own, with sizes."""
        ...


@dataclass(frozen=True)
class ByDimension:
    """Splits the first free dimension of a given meaning: megatron, expert, pipeline."""

    name: str
    roles: tuple[Role, ...]
    splits: tuple[str, ...]
    activations: Mapping[str, Role] = field(default_factory=dict[str, Role])

    def propose(
        self, parameter: Parameter, free: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """Give all axes to the first dimension this strategy is about.

        Raises:
            ShardingError: That would cut heads in two.
        """
        ways = math.prod(axes.values())
        for index in free:
            dim, units = parameter.dims[index], parameter.units[index]
            if dim not in self.splits:
                continue
            # Fewer key/value heads than devices is how grouped-query models are made: each
            # device keeps the heads it needs. A guess from shapes is no promise either.
            # A stack that stages cannot share (leading dense layers) lies on all of them; that none
            # can be shared is for `check_found_work` to say.
            if units % ways and (dim in ("kv_heads", "layers") or parameter.guessed):
                continue
            if units % ways and units != parameter.shape[index]:
                raise does_not_divide(parameter.path, str(dim), units, axes)
            return {index: tuple(axes)}
        return {}


@dataclass(frozen=True)
class FullyShard:
    """Splits every large parameter once: along `embed` where known, else its longest side.

    Along another named side where `embed` comes last and a share of it would be mostly padding.
    Experts stay whole where they divide: their shares lie as they are gathered, and gradients are
    scattered as they are summed, which the compiler does not do for a few rows of each expert. Of
    several axes they take as many as their number divides over; another side takes the rest.
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
        """Experts over the axes that they divide over, and another side over the rest."""
        experts = next((index for index in usable if parameter.dims[index] == "expert"), None)
        if experts is None:
            return {}
        own, rest = share_experts(parameter.shape[experts], axes)
        if not own:
            return {}
        # Shares of the side next to them lie as they are gathered, like those of whole experts.
        beside = [experts + 1] if experts + 1 in usable else []
        others = [index for index in usable if index != experts]
        found = [self._on_fewest(parameter, some, rest) for some in (beside, others)]
        return {experts: tuple(own), **max(found, key=_axes_used)}

    def _on_fewest(
        self, parameter: Parameter, usable: Sequence[int], axes: Mapping[str, int]
    ) -> Assignment:
        """As many axes as one dimension divides over, and the others on further ones."""
        names, last = tuple(axes), len(parameter.shape) - 1
        for count in range(len(names), 0, -1):
            ways = math.prod(axes[name] for name in names[:count])

            def merit(index: int, ways: int = ways) -> tuple[bool, bool, int, int]:
                dim, size = parameter.dims[index], parameter.shape[index]
                # A share of the last dimension is padded to whole lanes of memory.
                padded = index == last and size // ways % LANES > 0
                # Splitting a vocabulary would turn each embedding look-up into a masked all-reduce.
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
    """Leaves parameters whole: data parallelism, and the two ways to split a sequence."""

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
    """The names that may be joined with "+"."""
    return tuple(strategy.name for strategy in STRATEGIES)


def parse_strategy(text: str | None) -> tuple[Strategy, ...]:
    """Return the strategies of a product such as "fsdp+megatron", in order of precedence.

    None is the empty product: parameters stay whole unless a rule splits them.

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
    """The axes of a mesh that a strategy works on, with their sizes.

    Raises:
        ShardingError: The mesh has no axis for it.
    """
    for role in strategy.roles:
        found = axes_with_role(sizes, role)
        if found:
            return {axis: sizes[axis] for axis in found}
    wanted = [name for role in strategy.roles for name in names_of_role(role)]
    hints = "".join(did_you_mean(axis, wanted, most=1) for axis in sizes if axis not in wanted)
    seen = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    raise ShardingError(
        f"Strategy {strategy.name!r} needs a mesh axis called {' or '.join(map(repr, wanted))}, "
        f"and the mesh has {seen}; rename an axis or choose another strategy.{hints}"
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
    """The strategy that a mesh's axis names ask for: "fsdp+megatron" for fsdp and tensor."""
    return "+".join(dict.fromkeys(_STRATEGY_OF_ROLE[role_of(axis)] for axis in axis_names))


def find_axis(mesh: AnyMesh, strategy: str, name: str) -> str | None:
    """The one mesh axis the strategy called `name` works on, or None when it is not in use."""
    for member in parse_strategy(strategy):
        if member.name == name:
            axes = strategy_axes(member, axis_sizes(mesh))
            if len(axes) > 1:
                raise ShardingError(
                    f"Strategy '{name}' works along one axis and the mesh has {', '.join(axes)}; "
                    "keep one of them."
                )
            return next(iter(axes))
    return None
