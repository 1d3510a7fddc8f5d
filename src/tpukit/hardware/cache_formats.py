"""How generation keeps keys, values and latents: their formats, and the bytes these take.

Narrow formats round what was rotated first (Hadamard), so that no channel stands out, and every
token by itself, so that a token is written once and never again. A few tokens stay in bfloat16
beside them: the first, which many heads look at whatever the text says, and the newest.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import TPUValidationError, did_you_mean
from .formats import BFLOAT16, FLOAT8_E4M3FN, INT4, INT8, UINT8, NumberFormat, spelled_as

SCALE = BFLOAT16


class Unit(NamedTuple):
    """Channels of a token that are rounded together: those of a head, or of a latent.

    Attributes:
        number: How many such units a token has.
        width: Channels of each.
    """

    number: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How a token's channels are kept.

    Attributes:
        name: As `--kv` takes it.
        codes: Of one code.
        group: Channels that a code stands for, an entry of a codebook.
        entries: Of the codebook that a layer has for its keys, and of the one for its values.
        block: Channels that share a scale, at most; None where there are no scales, and values are
            kept as they are.
        first: Tokens at the beginning that stay in bfloat16 as well.
        recent: Newest tokens that do.
    """

    name: str
    codes: NumberFormat
    group: int = 1
    entries: int = 0
    block: int | None = None
    first: int = 0
    recent: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether tokens are rotated and rounded under scales of their own."""
        return self.block is not None

    @property
    def wide(self) -> int:
        """Tokens that are kept in bfloat16 beside the codes."""
        return self.first + self.recent

    def sharing(self, width: int) -> int:
        """Channels of a unit that share a scale: a power of two that divides its width."""
        assert self.block is not None
        return min(width & -width, self.block)

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of one unit of a token.

        Raises:
            TPUValidationError: A code would stand for channels of two units.
        """
        if width % self.group or width // self.group * self.codes.bits % 8:
            raise TPUValidationError(
                f"a KV cache in {self.name} has {8 // self.codes.bits * self.group} channels to a "
                f"byte, and {width} are no multiple of that; keep it in int8."
            )
        return self.codes.nbytes(width // self.group)

    def narrows(self, tokens: int) -> bool:
        """Whether so many tokens are kept as codes; few stay in bfloat16, which is smaller."""
        return self.is_narrow and tokens > 2 * self.wide

    def nbytes(self, units: Iterable[Unit], tokens: int) -> int:
        """Bytes that a layer keeps of `tokens` tokens of a sequence, without its codebooks."""
        each = list(units)
        channels = sum(one.number * one.width for one in each)
        if not self.is_narrow:
            return self.codes.nbytes(channels * tokens)
        if not self.narrows(tokens):
            return BFLOAT16.nbytes(channels * tokens)
        codes = sum(one.number * self.code_bytes(one.width) for one in each)
        scales = sum(one.number * one.width // self.sharing(one.width) for one in each)
        return tokens * (codes + SCALE.nbytes(scales)) + BFLOAT16.nbytes(channels * self.wide)


# fp8 as servers keep it, without scales of its own.
CACHE_FORMATS: dict[str, CacheFormat] = {
    one.name: one
    for one in (
        CacheFormat(name="bf16", codes=BFLOAT16),
        CacheFormat(name="fp8", codes=FLOAT8_E4M3FN),
        CacheFormat(name="int8", codes=INT8, block=128),
        CacheFormat(name="int4", codes=INT4, block=32, first=4, recent=32),
        CacheFormat(
            name="pq4", codes=UINT8, group=2, entries=256, block=128, first=4, recent=32
        ),
        CacheFormat(
            name="pq2", codes=UINT8, group=4, entries=256, block=128, first=4, recent=32
        ),
    )
}  # fmt: skip


def parse_cache_format(name: str | CacheFormat) -> CacheFormat:
    """The format of that name: "int4", "pq4", "bf16" or "bfloat16", ….

    Raises:
        TPUValidationError: There is none; the message names the nearest.
    """
    if isinstance(name, CacheFormat):
        return name
    found = spelled_as(name, CACHE_FORMATS)
    if found is None:
        raise TPUValidationError(
            f"'{name}' is no cache format; use {', '.join(CACHE_FORMATS)}."
            + did_you_mean(name, CACHE_FORMATS)
        )
    return CACHE_FORMATS[found]
