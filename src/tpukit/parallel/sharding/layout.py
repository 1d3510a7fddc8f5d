"""A layout: which device holds which part of every parameter, decided before anything moves."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import RenderableType

from ...annotations import AnyMesh, PyTree
from ...shown import Shown
from ..mesh.mesh import axis_sizes
from .activations import ActivationRules, activation_rules
from .placing import check_found_work, place
from .report import LayoutReport, Placement
from .rules import Rule, Rules, entries_spec, first_match, parse_rules, spec_entries
from .strategy import ActivationsOnly, Strategy, parse_strategy, strategy_axes
from .trees import describe_parameters, named_leaves, open_model

logger = logging.getLogger(__name__)

BIG_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Layout(Shown):
    """Where every parameter of a model lives on a mesh.

    Attributes:
        mesh: The mesh, with or without devices.
        strategy: The product of strategies, or None when rules alone decided.
        specs: A PartitionSpec for each array, in a tree like the model's (None for other leaves;
            an nnx module's tree is its state).
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
        """How a batch of shape (batch, sequence, ...) is split."""
        axes = dict(ActivationRules.of(self.mesh, self.strategy).axes)
        # Megatron's sequence split happens between blocks: tokens still arrive whole.
        context = ActivationRules.of(self.mesh, "context" if self._has("context") else None)
        return entries_spec([axes["batch"], dict(context.axes).get("sequence", ())])

    @property
    def batch_sharding(self) -> NamedSharding:
        """`batch_spec` on this mesh."""
        return self._named(self.batch_spec)

    def activation_rules(self) -> AbstractContextManager[ActivationRules]:
        """While this is open, `constrain` places activations for this layout."""
        return activation_rules(self.mesh, self.strategy)

    def find(self, path: str) -> Placement | None:
        """The placement of the parameter whose path ends `path`; the longest match wins.

        An optimizer keeps its moments under paths like `0/mu/layers/q/kernel`: the parameter's
        own path with something before it.
        """
        words = path.split("/")
        for start in range(len(words)):
            placement = self._by_path.get("/".join(words[start:]))
            if placement is not None:
                return placement
        return None

    def for_optimizer_state(self, state: PyTree) -> PyTree:
        """Shardings for any tree that holds things shaped like the parameters.

        A leaf whose path ends in a parameter's path is placed like the parameter; one that lacks
        some of its dimensions (Adafactor's row and column statistics) keeps the axes of those
        it has, and one whose last dimension counts blocks (scales of moments in eight bits) is
        split along it where whole blocks allow. Everything else is replicated.

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

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON data."""
        return {
            "mesh": axis_sizes(self.mesh),
            "strategy": self.strategy,
            "batch_spec": [list(entry) for entry in spec_entries(self.batch_spec, 2)],
            **self.report.to_dict(),
        }

    def __rich__(self) -> RenderableType:
        """The report's table."""
        return self.report.__rich__()

    def _spec_like(self, placement: Placement, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of something kept for a parameter: all its dimensions, or all but some."""
        whole = placement.placed_shape
        entries = spec_entries(placement.spec, len(whole))
        if shape == whole:
            return placement.spec
        if len(shape) == len(whole) and shape[:-1] == whole[:-1]:
            sizes = axis_sizes(self.mesh)
            ways = math.prod(sizes[axis] for axis in entries[-1])
            return entries_spec([*entries[:-1], entries[-1] if shape[-1] % ways == 0 else ()])
        kept: list[tuple[str, ...]] = []
        dimensions = list(zip(whole, entries, strict=True))
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
    """Decide where every parameter of a model lives; nothing is moved.

    Args:
        tree: A flax nnx module or state, linen variables, an equinox module or any pytree, of
            arrays or ShapeDtypeStructs.
        mesh: A mesh, or an abstract one for compile-only work.
        strategy: Names joined by "+" ("fsdp+megatron"), or None for rules alone.
        rules: (pattern, spec) pairs tried before the strategy on the "/"-joined path; the first
            pattern found in a path gives the whole spec.
        pad: Allow hidden units and vocabularies to grow with zeros to a size the mesh divides.
        stacked: Patterns of paths whose first dimension counts layers, where the names do not
            tell (a stack called `layers`, `blocks`, ... is recognised).
        head_counts: {"heads": 32, "kv_heads": 8} for models that merge heads and head size into
            one dimension, so that no head is cut in two.

    Raises:
        ShardingError: A strategy, axis or rule is unknown, a dimension does not divide, or a
            strategy finds nothing it could split.
    """
    sizes = axis_sizes(mesh)
    members = parse_strategy(strategy)
    working = [(member, strategy_axes(member, sizes)) for member in members]
    parsed = parse_rules(rules, sizes)
    opened = open_model(tree).tree
    parameters = describe_parameters(opened, stacked=stacked, head_counts=head_counts)
    placements = [
        None if one is None else place(one, working, parsed, sizes, pad) for one in parameters
    ]
    placed = tuple(placement for placement in placements if placement is not None)
    check_found_work(working, placed)
    specs = jax.tree.unflatten(
        jax.tree.structure(opened), [None if one is None else one.spec for one in placements]
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
    first_matches = [first_match(rules, one.path) for one in placed]
    splits_parameters = any(not isinstance(member, ActivationsOnly) for member in members)
    used = {axis for one in placed for axis in one.axes}
    used |= {axis for _, axes in ActivationRules.of(mesh, strategy).axes for axis in axes}
    return LayoutReport(
        placements=placed,
        unused_rules=tuple(rule.pattern for rule in rules if rule not in first_matches),
        without_rule=tuple(
            one.path for one, rule in zip(placed, first_matches, strict=True) if rules and not rule
        ),
        big_replicated=tuple(
            one.path
            for one in placed
            if mesh.size > 1
            and (splits_parameters or rules)
            and not one.axes
            and one.bytes_total >= BIG_BYTES
        ),
        idle_axes={
            axis: size for axis, size in axis_sizes(mesh).items() if size > 1 and axis not in used
        },
    )
