"""Enums that accept several spellings: `CostOptimized`, `cost_optimized`, "cost-optimised"."""

import re
from enum import StrEnum
from typing import Self

from ..errors import ConfigError, did_you_mean


class SpelledEnum(StrEnum):
    """An enum that also accepts its members in the spelling of other languages.

    A second name of a member (`CostOptimized = COST_OPTIMIZED`) is an alias, as in any enum.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        wanted = _letters(str(value))
        for name, member in cls.__members__.items():
            if wanted in (_letters(name), _letters(member.value)):
                return member
        known = [member.value for member in cls]
        what = re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower()
        raise ConfigError(
            f"There is no {what} {value!r}; known are {', '.join(known)}."
            + did_you_mean(str(value).lower(), known)
        )


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).replace("optimis", "optimiz")
