"""What adapters are asked for: how thin, how strong, beside which matrices. Loads no jax."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DEFAULT_TARGETS = (*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),)


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which matrices get low-rank ones beside them, and how thin those are.

    Attributes:
        rank: Columns of the first and rows of the second.
        alpha: Their product is multiplied with alpha / rank.
        targets: Patterns, searched in paths such as "layers/self_attention/q_proj/kernel".
        base: The format that the matrices beside them are rounded to: "int8", "int4" or "fp8"; None
            leaves them as they are, or as a quantized folder holds them.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = DEFAULT_TARGETS
    base: str | None = None

    @property
    def scale(self) -> float:
        """What the product of the two is multiplied with."""
        return self.alpha / self.rank

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LoraSpec":
        """The same as `to_dict` wrote."""
        return cls(
            rank=data["rank"],
            alpha=data["alpha"],
            targets=tuple(data["targets"]),
            base=data.get("base"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "targets": list(self.targets)}
