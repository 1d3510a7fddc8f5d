"""A layout: the sharding of every parameter, decided before any array moves."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import RenderableType

from ...annotations import AnyMesh, PyTree
from ...errors import ShardingError
from ...plain_data import JsonObject
from ...shown import Shown
from ..mesh.mesh import axis_sizes
from .activations import ActivationRules, activation_rules
from .dimensions import Parameter
from .report import LayoutReport, Placement
from .rules import (
    Entries,
    Rule,
    Rules,
    check_axes,
    check_fits,
    does_not_divide,
    entries_spec,
    first_match,
    parse_rules,
    spec_entries,
)
from .strategy import ActivationsOnly, Strategy, parse_strategy, strategy_axes
from .trees import describe_parameters, named_leaves, open_model

# Zeros there do not change what the next layer reads; padded heads or experts would.
PADDABLE = ("mlp", "vocab")


def place(
    parameter: Parameter,
    working: Sequence[tuple[Strategy, dict[str, int]]],
    rules: Sequence[Rule],
    sizes: Mapping[str, int],
    pad: bool,
) -> Placement:
    """Place one parameter: by the first rule, else by its own labels, else by the strategies.

    Raises:
        ShardingError: A dimension does not divide over its axes.
    """
    rank = len(parameter.shape)
    rule = first_match(rules, parameter.path)
    if rule is not None:
        entries, decided_by = spec_entries(rule.spec, rank), f"rule {rule.pattern}"
    elif any(label in sizes for label in parameter.axis_labels):
        spec = PartitionSpec(*parameter.axis_labels)
        check_axes(spec, sizes, what=f"The label of {parameter.path!r}")
        entries, decided_by = spec_entries(spec, rank), "the model's labels"
    else:
        entries, decided_by = _ask_strategies(parameter, working)
    padded = _padded(parameter, entries, sizes)
    shape = padded if pad else parameter.shape
    names = (None,) * rank if parameter.guessed else parameter.dims
    hint = ", or pass pad=True" if padded != shape else ""
    check_fits(parameter.path, shape, names, entries, sizes, hint=hint)
    ways = math.prod(sizes[axis] for entry in entries for axis in entry)
    return Placement(
        path=parameter.path,
        shape=parameter.shape,
        placed_shape=shape,
        dims=parameter.dims,
        spec=entries_spec(entries),
        itemsize=parameter.itemsize,
        bytes_per_device=math.prod(shape) * parameter.itemsize // ways,
        decided_by=decided_by,
    )


def _ask_strategies(
    parameter: Parameter, working: Sequence[tuple[Strategy, dict[str, int]]]
) -> tuple[Entries, str]:
    entries: list[tuple[str, ...]] = [()] * len(parameter.shape)
    contributors: list[str] = []
    taken: set[str] = set()
    for member, axes in working if parameter.is_weight else ():
        free = [index for index, entry in enumerate(entries) if not entry]
        own = {axis: size for axis, size in axes.items() if axis not in taken}
        proposal = member.propose(parameter, free, own) if own else {}
        for index, given in proposal.items():
            entries[index] = given
            taken.update(given)
        if proposal:
            contributors.append(member.name)
    return tuple(entries), "+".join(contributors) or "replicated"


def _padded(parameter: Parameter, entries: Entries, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape with every paddable dimension rounded up to a multiple of its axes."""
    if parameter.guessed:  # zeros in a dimension that only looks like hidden units are not padding
        return parameter.shape
    grown: list[int] = []
    for size, dim, axes in zip(parameter.shape, parameter.dims, entries, strict=False):
        ways = math.prod(sizes[axis] for axis in axes)
        grown.append(math.ceil(size / ways) * ways if dim in PADDABLE else size)
    return (*grown, *parameter.shape[len(grown) :])


def check_found_work(
    working: Sequence[tuple[Strategy, dict[str, int]]], placed: Sequence[Placement]
) -> None:
    """Check that every strategy that shards by meaning found such a dimension.

    Raises:
        ShardingError: One did not; the message tells how to label the dimension it needs.
    """
    missing = {
        "pipeline": "stack the layers (nnx.vmap, nn.scan) under a name such as 'layers', "
        "or say where they are with stacked=",
        "expert": "keep the experts in one array under a name such as 'experts'",
        "megatron": "label the dimensions (nnx.Param(..., dims=('embed', 'mlp'))), or give rules",
    }
    contributors = {name for placement in placed for name in placement.decided_by.split("+")}
    by_hand = any(placement.decided_by.startswith(("rule ", "the model's")) for placement in placed)
    for member, axes in working:
        active = math.prod(axes.values()) > 1 and not by_hand
        if active and member.name in missing and member.name not in contributors:
            stacks = {
                placement.shape[placement.dims.index("layers")]: placement
                for placement in placed
                if "layers" in placement.dims
            }
            if member.name == "pipeline" and stacks:
                layers = max(stacks)  # a shorter stack may precede the stages
                raise does_not_divide(stacks[layers].path, "layers", layers, axes)
            raise ShardingError(
                f"Strategy {member.name!r} found no parameter to shard among {len(placed)} arrays; "
                f"{missing[member.name]}."
            )


logger = logging.getLogger(__name__)

BIG_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Layout(Shown):
    """The shardings of all parameters of a model on a mesh.

    Attributes:
        mesh: The mesh, with or without devices.
        strategy: The product of strategies, or None when rules alone decided.
        specs: A PartitionSpec for each array, in a tree like the model's (None for other leaves; an
            nnx module's tree is its state).
        report: The same, parameter by parameter.
    """

    mesh: AnyMesh
    strategy: str | None
    specs: PyTree
    report: LayoutReport

    @property
    def shardings(self) -> PyTree:
        """A NamedSharding for each array, in the tree of `specs`."""
        return jax.tree.map(self._named, self.specs)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Return the sharding of a batch of shape (batch, sequence, ...)."""
        axes = dict(ActivationRules.of(self.mesh, self.strategy).axes)
        # Megatron shards the sequence between blocks; tokens still arrive complete.
        context = ActivationRules.of(self.mesh, "context" if self._has("context") else None)
        return entries_spec([axes["batch"], dict(context.axes).get("sequence", ())])

    @property
    def batch_sharding(self) -> NamedSharding:
        """Return `batch_spec` on this mesh."""
        return self._named(self.batch_spec)

    def activation_rules(self) -> AbstractContextManager[ActivationRules]:
        """Let `constrain` place activations for this layout inside this context."""
        return activation_rules(self.mesh, self.strategy)

    def find(self, path: str) -> Placement | None:
        """Return the placement of the parameter whose path ends `path`; the longest match wins.

        An optimizer keeps its moments under paths like `0/mu/layers/q/kernel`: the parameter's own
        path with a prefix.
        """
        words = path.split("/")
        for start in range(len(words)):
            placement = self._by_path.get("/".join(words[start:]))
            if placement is not None:
                return placement
        return None

    def for_optimizer_state(self, state: PyTree) -> PyTree:
        """Return shardings for any tree with leaves shaped like the parameters.

        A leaf whose path ends in a parameter's path is placed like the parameter. A leaf that lacks
        some of its dimensions (Adafactor's row and column statistics) keeps the axes of those it
        has. A leaf whose last dimension counts blocks (scales of 8-bit moments) is sharded along it
        if full blocks allow. All other leaves are replicated.

        Args:
            state: Arrays or ShapeDtypeStructs, such as `jax.eval_shape(optimizer.init, params)`.
        """
        tree = open_model(state).tree
        shardings: list[NamedSharding | None] = []
        for leaf in named_leaves(tree):
            placement = self.find(leaf.path) if leaf.is_array else None
            shape = tuple(leaf.value.shape) if leaf.is_array else ()
            spec = self._spec_like(placement, shape) if placement else PartitionSpec()
            shardings.append(self._named(spec) if leaf.is_array else None)
        return jax.tree.unflatten(jax.tree.structure(tree), shardings)

    def to_dict(self) -> JsonObject:
        """Return the layout as JSON data."""
        return {
            "mesh": axis_sizes(self.mesh),
            "strategy": self.strategy,
            "batch_spec": [list(entry) for entry in spec_entries(self.batch_spec, 2)],
            **self.report.to_dict(),
        }

    def __rich__(self) -> RenderableType:
        """Return the report's table."""
        return self.report.__rich__()

    def _spec_like(self, placement: Placement, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the spec of an array kept for a parameter, with all or some of its dimensions."""
        full_shape = placement.placed_shape
        entries = spec_entries(placement.spec, len(full_shape))
        if shape == full_shape:
            return placement.spec
        if len(shape) == len(full_shape) and shape[:-1] == full_shape[:-1]:
            sizes = axis_sizes(self.mesh)
            ways = math.prod(sizes[axis] for axis in entries[-1])
            return entries_spec([*entries[:-1], entries[-1] if shape[-1] % ways == 0 else ()])
        kept: list[tuple[str, ...]] = []
        dimensions = list(zip(full_shape, entries, strict=True))
        for size in shape:
            while dimensions and dimensions[0][0] != size:
                dimensions.pop(0)
            if not dimensions:
                return PartitionSpec()
            kept.append(dimensions.pop(0)[1])
        return entries_spec(kept)

    def _named(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _has(self, name: str) -> bool:
        return name in (self.strategy or "").split("+")

    @cached_property
    def _by_path(self) -> dict[str, Placement]:
        return {placement.path: placement for placement in self.report.placements}


def make_layout(
    tree: PyTree,
    mesh: AnyMesh,
    strategy: str | None = "fsdp",
    *,
    rules: Rules | None = None,
    pad: bool = False,
    stacked: Sequence[str] = (),
    head_counts: Mapping[str, int] | None = None,
) -> Layout:
    """Decide the sharding of every parameter of a model; nothing is moved.

    Args:
        tree: A flax nnx module or state, linen variables, an equinox module or any pytree, of
            arrays or ShapeDtypeStructs.
        mesh: A mesh, or an abstract one for compile-only work.
        strategy: Names joined by "+" ("fsdp+megatron"), or None for rules alone.
        rules: (pattern, spec) pairs tried before the strategy on the "/"-joined path; the first
            pattern found in a path gives the full spec.
        pad: Allow hidden units and vocabularies to be padded with zeros to a size the mesh divides.
        stacked: Patterns of paths whose first dimension counts layers, where the names do not tell
            (a stack called `layers`, `blocks`, ... is recognised).
        head_counts: {"heads": 32, "kv_heads": 8} for models that merge heads and head size into one
            dimension, so that no head is divided.

    Raises:
        ShardingError: A strategy, axis or rule is unknown, a dimension does not divide, or a
            strategy finds nothing it could shard.
    """
    sizes = axis_sizes(mesh)
    members = parse_strategy(strategy)
    working = [(member, strategy_axes(member, sizes)) for member in members]
    parsed = parse_rules(rules, sizes)
    opened = open_model(tree).tree
    parameters = describe_parameters(opened, stacked=stacked, head_counts=head_counts)
    placements = [
        None if parameter is None else place(parameter, working, parsed, sizes, pad)
        for parameter in parameters
    ]
    placed = tuple(placement for placement in placements if placement is not None)
    check_found_work(working, placed)
    specs = jax.tree.unflatten(
        jax.tree.structure(opened),
        [None if placement is None else placement.spec for placement in placements],
    )
    layout = Layout(mesh, strategy, specs, _report(placed, parsed, members, mesh, strategy))
    for warning in layout.report.warnings():
        logger.warning("%s", warning)
    return layout


def _report(
    placed: tuple[Placement, ...],
    rules: Sequence[Rule],
    members: Sequence[Strategy],
    mesh: AnyMesh,
    strategy: str | None,
) -> LayoutReport:
    first_matches = [first_match(rules, placement.path) for placement in placed]
    splits_parameters = any(not isinstance(member, ActivationsOnly) for member in members)
    used = {axis for placement in placed for axis in placement.axes}
    used |= {axis for _, axes in ActivationRules.of(mesh, strategy).axes for axis in axes}
    return LayoutReport(
        placements=placed,
        unused_rules=tuple(rule.pattern for rule in rules if rule not in first_matches),
        without_rule=tuple(
            placement.path
            for placement, rule in zip(placed, first_matches, strict=True)
            if rules and not rule
        ),
        big_replicated=tuple(
            placement.path
            for placement in placed
            if mesh.size > 1
            and (splits_parameters or rules)
            and not placement.axes
            and placement.bytes_total >= BIG_BYTES
        ),
        idle_axes={
            axis: size for axis, size in axis_sizes(mesh).items() if size > 1 and axis not in used
        },
    )
