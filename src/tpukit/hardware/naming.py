"""Reading slice names: every spelling people use, into generation, count and shape."""

import math
import re
from dataclasses import dataclass

from ..errors import SliceError, did_you_mean
from .catalog import GENERATIONS, names_of_chips, spelled
from .chip import Chip
from .refusals import ambiguous_count, odd_cores
from .topology import Shape, parse_shape

MAX_NAME_LENGTH = 80
_SLICES = re.compile(r"\s*([1-9]\d{0,3})\s*[x*]\s*(?=[a-z])", re.IGNORECASE | re.ASCII)
_SPEC = re.compile(
    r"(?:(?P<count>[1-9]\d{0,5})(?:-|$))?(?P<shape>[1-9]\d*(?:x[1-9]\d*)+)?", re.ASCII
)
_EXAMPLES = "'v6e-64', 'v5p-128', 'v5p:4x4x8', 'tpu7x-4x4x4' or '2xv6e-256'"


@dataclass(frozen=True)
class SliceName:
    """What a name says: the number in it still counts whatever its generation counts."""

    text: str
    chip: Chip
    count: int | None
    shape: Shape | None
    num_slices: int


def read_name(text: str) -> SliceName:
    """Split a slice name into its parts without judging whether such a slice exists.

    Grammar: `[<slices>x][tpu-]<generation>[-<count>][-<shape>]`. Case does not matter; spaces and
    any punctuation separate.

    Raises:
        SliceError: The text is no slice name; the message says what one looks like.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass numbers
        raise SliceError(f"A slice name is text such as {_EXAMPLES}, not {text!r}.")
    if not text.strip() or len(text) > MAX_NAME_LENGTH:
        seen = "an empty name" if not text.strip() else f"a name of {len(text)} characters"
        raise SliceError(f"{seen} is no slice; write {_EXAMPLES}.")
    text = text.replace("×", "x")
    several = _SLICES.match(text)
    num_slices = int(several.group(1)) if several else 1
    name = spelled(text[several.end() :] if several else text)
    for spelling in _spellings(name):
        chip, rest = _split_generation(spelling)
        if chip is not None:
            return _read_rest(text, chip, spelling, rest, num_slices)
    raise SliceError(
        f"{text!r} names no TPU generation; known are {', '.join(GENERATIONS)}, "
        f"and a slice is written {_EXAMPLES}." + did_you_mean(name, _examples_of_names())
    )


def chips_named(name: SliceName) -> int | None:
    """How many chips of one slice the number in a name means; None when there is no number."""
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
    names = names_of_chips()
    for known in sorted(names, key=len, reverse=True):
        if name == known or name.startswith(f"{known}-"):
            return names[known], name[len(known) + 1 :]
    return None, ""


def _read_rest(text: str, chip: Chip, spelling: str, rest: str, num_slices: int) -> SliceName:
    found = _SPEC.fullmatch(rest)
    if not rest or found is None:
        raise SliceError(
            f"{text!r} names the generation {chip.name} and no slice of it; "
            f"add a size or a shape, as in {_EXAMPLES}."
        )
    count = int(found["count"]) if found["count"] else None
    shape = parse_shape(found["shape"]) if found["shape"] else None
    if shape is None and spelling.removesuffix(f"-{rest}") in chip.shape_only_aliases:
        raise SliceError(
            f"{text!r} is ambiguous: 'v5' may be v5e or v5p. "
            f"Write 'v5e-{count}' ({count} chips) or 'v5p-{count}' (that many TensorCores)."
        )
    return SliceName(text, chip, count, shape, num_slices)


def _examples_of_names() -> list[str]:
    return [f"{chip.slice_prefix}-8" for chip in set(names_of_chips().values())]
