"""Slice names: every spelling people use, the canonical one, and errors for impossible ones."""

import math
import re
from dataclasses import dataclass

from ..errors import SliceError, did_you_mean
from .catalog import (
    Chip,
    chips_by_spelling,
    edge_sentence,
    generation_names,
    normalise_name,
)
from .topology import Shape, TopologyRules, format_shape, parse_shape

MAX_NAME_LENGTH = 80
_SLICES = re.compile(r"\s*([1-9]\d{0,3})\s*[x*]\s*(?=[a-z])", re.IGNORECASE | re.ASCII)
_SPEC = re.compile(
    r"(?:(?P<count>[1-9]\d{0,5})(?:-|$))?(?P<shape>[1-9]\d*(?:x[1-9]\d*)+)?", re.ASCII
)
_EXAMPLES = "'v6e-64', 'v5p-128', 'v5p:4x4x8', 'tpu7x-4x4x4' or '2xv6e-256'"


@dataclass(frozen=True)
class SliceName:
    """The parts of a slice name; `count` is chips or cores, as the generation counts."""

    text: str
    chip: Chip
    count: int | None
    shape: Shape | None
    num_slices: int


def read_name(text: str) -> SliceName:
    """Split a slice name into its parts, without checking that such a slice exists.

    Grammar: `[<slices>x][tpu-]<generation>[-<count>][-<shape>]`. Case does not matter; spaces and
    any punctuation separate.

    Raises:
        SliceError: The text is not a slice name; the message has examples.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass numbers
        raise SliceError(f"A slice name is text such as {_EXAMPLES}, not {text!r}.")
    if not text.strip() or len(text) > MAX_NAME_LENGTH:
        seen = "an empty name" if not text.strip() else f"a name of {len(text)} characters"
        raise SliceError(f"{seen} is not a slice; write {_EXAMPLES}.")
    text = text.replace("×", "x")
    several = _SLICES.match(text)
    num_slices = int(several.group(1)) if several else 1
    name = normalise_name(text[several.end() :] if several else text)
    for spelling in _spellings(name):
        chip, rest = _split_generation(spelling)
        if chip is not None:
            return _read_rest(text, chip, spelling, rest, num_slices)
    raise SliceError(
        f"{text!r} names no TPU generation; known are {', '.join(generation_names())}, "
        f"and a slice is written {_EXAMPLES}."
        + (edge_sentence(name) or did_you_mean(name, _examples_of_names()))
    )


def chips_named(name: SliceName) -> int | None:
    """Return the chips per slice that a name states; None if it has no number."""
    chip, count = name.chip, name.count
    if count is None or chip.name_counts == "chips":
        return count
    if chip.name_counts == "cores":
        if count % chip.cores_per_chip:
            raise odd_cores(chip, count)
        return count // chip.cores_per_chip
    # Named by shape: a number beside the shape must be one of the two things people count.
    chips = math.prod(name.shape) if name.shape else 0
    if count not in (chips, chips * chip.devices_per_chip):
        raise ambiguous_count(chip, count)
    return chips


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((name, name.removeprefix("tpu-"), name.removeprefix("tpu"))))


def _split_generation(name: str) -> tuple[Chip | None, str]:
    names = chips_by_spelling()
    for known in sorted(names, key=len, reverse=True):
        if name == known or name.startswith(f"{known}-"):
            return names[known], name[len(known) + 1 :]
    return None, ""


def _read_rest(text: str, chip: Chip, spelling: str, rest: str, num_slices: int) -> SliceName:
    match = _SPEC.fullmatch(rest)
    if not rest or match is None:
        raise SliceError(
            f"{text!r} names the generation {chip.name} but no slice of it; "
            f"add a size or a shape, as in {_EXAMPLES}."
        )
    count = int(match["count"]) if match["count"] else None
    shape = parse_shape(match["shape"]) if match["shape"] else None
    if shape is None and spelling.removesuffix(f"-{rest}") in chip.shape_only_aliases:
        raise SliceError(
            f"{text!r} is ambiguous: 'v5' may be v5e or v5p. "
            f"Write 'v5e-{count}' ({count} chips) or 'v5p-{count}' (that many TensorCores)."
        )
    return SliceName(text, chip, count, shape, num_slices)


def _examples_of_names() -> list[str]:
    return [f"{chip.slice_prefix}-8" for chip in set(chips_by_spelling().values())]


def canonical_name(chip: Chip, shape: Shape, *, num_slices: int = 1) -> str:
    """Return the canonical name: by count where the count decides the shape, else by shape."""
    several = f"{num_slices}x" if num_slices > 1 else ""
    if chip.name_counts == "shape":
        return f"{several}{chip.slice_prefix}-{format_shape(shape)}"
    chips = math.prod(shape)
    if chip.rules and shape != chip.rules.by_chips[chips][0]:
        return f"{several}{chip.slice_prefix}:{format_shape(shape)}"
    return f"{several}{chip.slice_prefix}-{chips * chip.counted_per_chip}"


def no_topology(chip: Chip) -> SliceError:
    """Return the error for a chip without publicly named slices."""
    return SliceError(
        f"No slice of {chip.title} can be named: {chip.no_slices}. "
        f"`tpukit slices {chip.name}` lists the known figures."
    )


def no_such_count(chip: Chip, chips: int) -> SliceError:
    """Return the error for a number of chips that no slice has."""
    return SliceError(f"No {chip.name} slice has {_count(chips)}." + _nearest(chip, chips))


def odd_cores(chip: Chip, count: int) -> SliceError:
    """Return the error for a number of cores that is no multiple of a chip's."""
    return SliceError(
        f"'{chip.slice_prefix}-{count}': the number in a {chip.name} name counts TensorCores, "
        f"{chip.cores_per_chip} a chip." + _nearest(chip, count // chip.cores_per_chip)
    )


def no_such_shape(chip: Chip, shape: Shape, *, chips: int | None = None) -> SliceError:
    """Return the error for a shape that does not exist, or not with that many chips."""
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
    """Return the error for an ambiguous number, with both readings."""
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
