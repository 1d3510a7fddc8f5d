"""Place one parameter: rules first, then the labels it came with, then the strategies."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from ...errors import ShardingError
from .dimensions import Parameter
from .report import Placement
from .rules import (
    Entries,
    Rule,
    check_axes,
    check_fits,
    does_not_divide,
    entries_spec,
    first_match,
    spec_entries,
)
from .strategy import Strategy

# Zeros there change nothing that the next layer reads; padded heads or experts would.
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
    """The shape with every dimension that may grow grown to a multiple of its axes."""
    if parameter.guessed:  # zeros in a dimension that only looks like hidden units are no padding
        return parameter.shape
    grown: list[int] = []
    for size, dim, axes in zip(parameter.shape, parameter.dims, entries, strict=False):
        ways = math.prod(sizes[axis] for axis in axes)
        grown.append(math.ceil(size / ways) * ways if dim in PADDABLE else size)
    return (*grown, *parameter.shape[len(grown) :])


def check_found_work(
    working: Sequence[tuple[Strategy, dict[str, int]]], placed: Sequence[Placement]
) -> None:
    """Check that every strategy that splits by meaning found something of that meaning.

    Raises:
        ShardingError: One did not; the message says how to show it what it looks for.
    """
    missing = {
        "pipeline": "stack the layers (nnx.vmap, nn.scan) under a name such as 'layers', "
        "or say where they are with stacked=",
        "expert": "keep the experts in one array under a name such as 'experts'",
        "megatron": "label the dimensions (nnx.Param(..., dims=('embed', 'mlp'))), or give rules",
    }
    contributors = {name for one in placed for name in one.decided_by.split("+")}
    by_hand = any(one.decided_by.startswith(("rule ", "the model's")) for one in placed)
    for member, axes in working:
        active = math.prod(axes.values()) > 1 and not by_hand
        if active and member.name in missing and member.name not in contributors:
            stacks = {
                one.shape[one.dims.index("layers")]: one for one in placed if "layers" in one.dims
            }
            if member.name == "pipeline" and stacks:
                layers = max(stacks)  # a shorter stack may stand before the stages
                raise does_not_divide(stacks[layers].path, "layers", layers, axes)
            raise ShardingError(
                f"Strategy {member.name!r} found no parameter to split among {len(placed)} arrays; "
                f"{missing[member.name]}."
            )
