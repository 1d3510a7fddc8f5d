"""Vector formats: weights per code, codebook size, and bits per weight.

| name | bits | code |
|---|---|---|
| vq1.75 | 1.75 | 4 weights, 128 entries |
| vq2 | 2 | 4 weights, 256 entries |
| vq3.5 | 3.5 | 4 weights, the sum of two of 128 entries |
| vq4 | 4 | 4 weights, the sum of two of 256 entries |
| trellis1 … trellis4 | 1 … 4 | one weight from the last 12 bits, see `trellis` |

The fused TPU kernel multiplies the first four. `VQFormat` takes any other length, number of entries
and stages. Those formats and trellises, which have the smallest error at their bits, are decoded
before the matmul.
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
        length: Neighbouring weights of a column per code.
        entries: Codebook entries per stage.
        stages: Codes per vector; their entries are added up.
        trellis: New bits per weight of a trellis, otherwise 0. A trellis has 2^window entries, and
            length and stages of 1.
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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise TPUValidationError(
                    f"{name}={value!r} of a vector format; expected a whole number from {least} "
                    f"to {most}."
                )
        if not self.trellis:
            return
        is_power = self.entries & (self.entries - 1) == 0 and self.entries >= 4**self.trellis
        if self.trellis not in TRELLIS_BITS.values() or not is_power or self.entries > 4096:
            raise TPUValidationError(
                f"A trellis of {self.trellis!r} bits per weight over {self.entries} entries; "
                "expected 1, 2, 3 or 4 bits, and a power of two from 4^bits to 4096 entries."
            )
        if self.length != 1 or self.stages != 1:
            raise TPUValidationError(
                "A trellis needs length=1 and stages=1, because each window decodes to one value."
            )

    @property
    def bits(self) -> float:
        """Bits of codes per weight, without codebook and scales."""
        return self.trellis or self.stages * math.log2(self.entries) / self.length

    @property
    def layout(self) -> CodeLayout:
        """Memory layout of codes; the fused kernel reads "tpu_lane_i32"."""
        for layout in get_args(CodeLayout):
            if self.trellis and TRELLIS_BITS.get(layout) == self.trellis:
                return layout
        fits = self.length == _KERNEL_LENGTH and self.entries in _KERNEL_ENTRIES
        return "tpu_lane_i32" if fits else "plain"

    @property
    def name(self) -> str:
        """The name that `parse_vq_format` reads."""
        known = next((name for name, format in VQ_FORMATS.items() if format == self), None)
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
    """Return the format of a name or a number of bits per weight.

    Names are "vq2", "trellis3" and the like, "vq:2x256x8" (stages, entries, length) and
    "trellis2:256" (entries).

    Raises:
        TPUValidationError: No format has this name or number of bits.
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
            f"{spelling!r} is no vector format; expected one of {', '.join(VQ_FORMATS)} and "
            f"vq:<stages>x<entries>x<length>.{did_you_mean(spelling, VQ_FORMATS)}"
        )
    matches = [format for format in VQ_FORMATS.values() if format.bits == spelling]
    if not matches:
        known = ", ".join(f"{format.bits:g}" for format in VQ_FORMATS.values())
        raise TPUValidationError(
            f"No vector format has {spelling!r} bits per weight; expected one of {known}, or give "
            "VQFormat(length=…, entries=…, stages=…)."
        )
    return matches[0]
