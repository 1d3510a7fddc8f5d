"""Canonical slice names, and the errors that answer an impossible one with the valid choices."""

import math

from ..errors import SliceError
from .chip import Chip
from .topology import Shape, TopologyRules, format_shape


def canonical_name(chip: Chip, shape: Shape, *, num_slices: int = 1) -> str:
    """The one name of a slice: by count where the count decides the shape, else by shape."""
    several = f"{num_slices}x" if num_slices > 1 else ""
    if chip.name_counts == "shape":
        return f"{several}{chip.slice_prefix}-{format_shape(shape)}"
    chips = math.prod(shape)
    if chip.rules and shape != chip.rules.by_chips[chips][0]:
        return f"{several}{chip.slice_prefix}:{format_shape(shape)}"
    return f"{several}{chip.slice_prefix}-{chips * chip.counted_per_chip}"


def no_topology(chip: Chip) -> SliceError:
    """The error for a chip nobody has published a slice of."""
    return SliceError(
        f"No slice of {chip.title} can be named: no topology of it is public and the offline "
        "compiler does not know it. `get_chip` gives the figures there are."
    )


def no_such_count(chip: Chip, chips: int) -> SliceError:
    """The error for a number of chips in which no slice comes."""
    return SliceError(f"No {chip.name} slice has {_count(chips)}." + _nearest(chip, chips))


def odd_cores(chip: Chip, count: int) -> SliceError:
    """The error for a core count that is no whole number of chips."""
    return SliceError(
        f"'{chip.slice_prefix}-{count}': the number in a {chip.name} name counts TensorCores, "
        f"{chip.cores_per_chip} a chip." + _nearest(chip, count // chip.cores_per_chip)
    )


def no_such_shape(chip: Chip, shape: Shape, *, chips: int | None = None) -> SliceError:
    """The error for a shape that is not to be had, or not with that many chips."""
    rules = _rules(chip)
    held = math.prod(shape)
    wanted = held if chips is None else chips
    seen = f"{chip.name} has no slice of topology {format_shape(shape)}"
    if wanted != held:
        seen += f" with {_count(wanted)} (that shape has {held})"
    valid = rules.by_chips.get(wanted)
    if valid:
        shapes = ", ".join(format_shape(legal) for legal in valid)
        return SliceError(f"{seen}; its {rules.dims}D shapes of {_count(wanted)} are {shapes}.")
    hint = ""
    if len(shape) == 2 and shape[0] in rules.by_chips:
        hint = f" For {shape[1]} slices write '{shape[1]}x{chip.slice_prefix}-{shape[0]}'."
    return SliceError(f"{seen}.{hint}" + _nearest(chip, wanted))


def ambiguous_count(chip: Chip, count: int) -> SliceError:
    """The error for a number that people read in two ways, with both spelled out."""
    rules = _rules(chip)
    readings = dict.fromkeys((count // chip.devices_per_chip, count))
    legal = [chips for chips in readings if chips in rules.by_chips]
    choices = [
        f"{canonical_name(chip, rules.by_chips[chips][0])} "
        f"({_count(chips)}, {chips * chip.devices_per_chip} devices)"
        for chips in legal or rules.nearest_counts(count)
    ]
    return SliceError(
        f"'{chip.slice_prefix}-{count}' is ambiguous: some tools count chips and others JAX "
        f"devices, {chip.devices_per_chip} a chip. Name the shape: {' or '.join(choices)}."
    )


def _nearest(chip: Chip, chips: int) -> str:
    rules = _rules(chip)
    names = (
        f"{canonical_name(chip, rules.by_chips[count][0])} ({_count(count)})"
        for count in rules.nearest_counts(chips)
    )
    return f" The nearest are {', '.join(names)}."


def _rules(chip: Chip) -> TopologyRules:
    if chip.rules is None:
        raise no_topology(chip)
    return chip.rules


def _count(chips: int) -> str:
    return "1 chip" if chips == 1 else f"{chips} chips"
