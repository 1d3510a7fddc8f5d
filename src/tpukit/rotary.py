"""Scaling of rotary frequencies: one description for kernels and models, without jax."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from .errors import TPUModelError, did_you_mean

Kind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
_AMOUNTS = (
    *("factor", "original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow"),
)


def _check_amount(what: str, value: Any) -> None:
    is_number = type(value) is not bool and issubclass(type(value), Real)
    if not is_number or not 0 < value < math.inf:
        raise TPUModelError(f"{what} is {value!r}; give a number; it must be above 0.")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are scaled to a longer context than the model was trained on.

    Attributes:
        kind: "linear" divides every frequency by `factor`. "dynamic" (NTK) raises the base with
            the length. "llama3" leaves short wavelengths alone, divides long ones and blends
            between. "yarn" does so by the number of rotations, and scales the scores as well.
            "longrope" divides each pair of channels by a number of its own.
        factor: How many times longer.
        original_max_seq_len: What the model was trained on.
        low_freq_factor: llama3: wavelengths above the original length over this are divided.
        high_freq_factor: llama3: those below the original length over this are kept.
        beta_fast: yarn: channels that rotate more often than this are kept.
        beta_slow: yarn: those that rotate less often than this are divided.
        truncate: yarn: whether the channels between which it blends are whole numbers.
        attention_factor: yarn, longrope: what tables are multiplied by; None takes the paper's.
        short_factors: longrope: what frequencies are divided by up to the original length.
        long_factors: longrope: and past it.
    """

    kind: Kind = "linear"
    factor: float = 1.0
    original_max_seq_len: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kinds = get_args(Kind)
        if self.kind not in kinds:
            raise TPUModelError(
                f"rope scaling '{self.kind}' is not known; use one of {', '.join(kinds)}."
                + did_you_mean(self.kind, kinds)
            )
        for name in _AMOUNTS:
            _check_amount(f"rope scaling {name}", getattr(self, name))
        if self.attention_factor is not None:
            _check_amount("rope scaling attention_factor", self.attention_factor)
        for name in ("short_factors", "long_factors"):
            factors: Any = getattr(self, name)
            if not isinstance(factors, tuple | list):
                raise TPUModelError(f"rope scaling {name} is {factors!r}; give a list of numbers.")
            for one in factors:
                _check_amount(f"one of the rope scaling {name}", one)
            object.__setattr__(self, name, tuple(factors))
        if (self.kind == "longrope") != bool(self.short_factors and self.long_factors):
            raise TPUModelError(
                f"rope scaling '{self.kind}' has {len(self.short_factors)} short and "
                f"{len(self.long_factors)} long factors; longrope needs one of both for each "
                "pair of channels, and no other kind has any."
            )

    @property
    def table_scale(self) -> float:
        """The factor of sines and cosines."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            longer = math.log(max(self.factor, 1.0)) / math.log(self.original_max_seq_len)
            return math.sqrt(1 + longer)
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
