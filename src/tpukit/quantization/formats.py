"""Vector formats: how many weights share a code, how many codes there are, and what that costs.

| name | bits | code |
|---|---|---|
| vq1.75 | 1.75 | 4 weights, 128 entries |
| vq2 | 2 | 4 weights, 256 entries |
| vq3.5 | 3.5 | 4 weights, the sum of two of 128 entries |
| vq4 | 4 | 4 weights, the sum of two of 256 entries |
| trellis1 … trellis4 | 1 … 4 | one weight from the last 12 bits, see `trellis` |

The first four are what the fused TPU kernel multiplies. Any other length, number of entries or
stages is a `VQFormat` too. Those, and trellises, which lose least at their bits, are decoded before
they are multiplied.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ..errors import TPUValidationError, did_you_mean

CodeLayout: TypeAlias = Literal[
    "tpu_lane_i32", "plain", "trellis1", "trellis2", "trellis3", "trellis4"
]
TRELLIS_BITS: dict[str, int] = {"trellis1": 1, "trellis2": 2, "trellis3": 3, "trellis4": 4}
# Codes are bytes or 16 bits wide.
MOST_ENTRIES = 65_536
_KERNEL_LENGTH, _KERNEL_ENTRIES = 4, (128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class VQFormat:
    """A vector format.

    Attributes:
        length: Neighbouring weights of a column that one code stands for.
        entries: Of the codebook of each stage.
        stages: Codes of each vector, whose entries are added up.
        trellis: Of a trellis, the new bits of each weight; entries are its 2^window values then,
            and length and stages are 1. Otherwise 0.
    """

    length: int = 4
    entries: int = 256
    stages: int = 1
    trellis: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("length", 1, 65_536),
            ("entries", 2, MOST_ENTRIES),
            ("stages", 1, 16),
        ):
            seen = getattr(self, name)
            if isinstance(seen, bool) or not isinstance(seen, int) or not least <= seen <= most:
                raise TPUValidationError(
                    f"{name}={seen!r} of a vector format; expected a whole number from {least} "
                    f"to {most}."
                )
        if not self.trellis:
            return
        whole = self.entries & (self.entries - 1) == 0 and self.entries >= 4**self.trellis
        if self.trellis not in TRELLIS_BITS.values() or not whole or self.entries > 4096:
            raise TPUValidationError(
                f"A trellis of {self.trellis!r} bits a weight over {self.entries} entries; "
                "expected 1, 2, 3 or 4 bits, and a power of two from 4^bits to 4096 entries."
            )
        if self.length != 1 or self.stages != 1:
            raise TPUValidationError(
                "A trellis has length=1 and stages=1: a value for each window."
            )

    @property
    def bits(self) -> float:
        """Bits of the codes for each weight, without codebook and scales."""
        return self.trellis or self.stages * math.log2(self.entries) / self.length

    @property
    def layout(self) -> CodeLayout:
        """How codes lie: "tpu_lane_i32" is what the fused kernel reads."""
        for layout in get_args(CodeLayout):
            if self.trellis and TRELLIS_BITS.get(layout) == self.trellis:
                return layout
        fits = self.length == _KERNEL_LENGTH and self.entries in _KERNEL_ENTRIES
        return "tpu_lane_i32" if fits else "plain"

    @property
    def name(self) -> str:
        """A name that `parse_vq_format` reads."""
        known = next((name for name, one in VQ_FORMATS.items() if one == self), None)
        if self.trellis:
            return known or f"trellis{self.trellis}:{self.entries}"
        return known or f"vq:{self.stages}x{self.entries}x{self.length}"


VQ_FORMATS: dict[str, VQFormat] = {
    "vq1.75": VQFormat(entries=128),
    "vq2": VQFormat(entries=256),
    "vq3.5": VQFormat(entries=128, stages=2),
    "vq4": VQFormat(entries=256, stages=2),
    "trellis1": VQFormat(length=1, entries=4096, trellis=1),
    "trellis2": VQFormat(length=1, entries=4096, trellis=2),
    "trellis3": VQFormat(length=1, entries=4096, trellis=3),
    "trellis4": VQFormat(length=1, entries=4096, trellis=4),
}


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def parse_vq_format(spelling: str | float | VQFormat) -> VQFormat:
    """The format of a name or of a number of bits.

    Names are "vq2", "trellis3" and the like, "vq:2x256x8" (stages, entries, length) and
    "trellis2:256" (entries).

    Raises:
        TPUValidationError: There is none; the message names those that are.
    """
    if isinstance(spelling, VQFormat):
        return spelling
    if isinstance(spelling, str):
        if spelling in VQ_FORMATS:
            return VQ_FORMATS[spelling]
        kind, _, entries = spelling.partition(":")
        if kind in TRELLIS_BITS and _is_size(entries):
            return VQFormat(length=1, entries=int(entries), trellis=TRELLIS_BITS[kind])
        if spelling.startswith("vq:"):
            sizes = spelling.removeprefix("vq:").split("x")
            if len(sizes) == 3 and all(map(_is_size, sizes)):
                stages, entries, length = map(int, sizes)
                return VQFormat(length=length, entries=entries, stages=stages)
        raise TPUValidationError(
            f"{spelling!r} is no vector format; known are {', '.join(VQ_FORMATS)} and "
            f"vq:<stages>x<entries>x<length>.{did_you_mean(spelling, VQ_FORMATS)}"
        )
    found = [one for one in VQ_FORMATS.values() if one.bits == spelling]
    if not found:
        known = ", ".join(f"{one.bits:g}" for one in VQ_FORMATS.values())
        raise TPUValidationError(
            f"No vector format has {spelling!r} bits a weight; known are {known}, or give "
            "VQFormat(length=…, entries=…, stages=…)."
        )
    return found[0]
