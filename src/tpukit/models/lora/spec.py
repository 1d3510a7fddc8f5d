"""LoRA settings: rank, scale and target matrices. Loads no jax."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from ...errors import TPUModelError, did_you_mean
from ...plain_data import JsonMapping, JsonObject
from ..transformer.config import TransformerConfig

DEFAULT_TARGETS = (*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),)


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """LoRA settings.

    Attributes:
        rank: Columns of `a` and rows of `b`.
        alpha: The update `a @ b` is scaled by alpha / rank.
        targets: Patterns that are searched in paths such as
            "layers/self_attention/q_proj/kernel".
        base: The format of the frozen matrices: "int8", "int4" or "fp8". None keeps the format
            they have, for example in a quantized folder.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = DEFAULT_TARGETS
    base: str | None = None

    @property
    def scale(self) -> float:
        """The scale of the update `a @ b`."""
        return self.alpha / self.rank

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "LoraSpec":
        """Return the settings that `to_dict` wrote."""
        return cls(
            rank=data["rank"],
            alpha=data["alpha"],
            targets=tuple(data["targets"]),
            base=data.get("base"),
        )

    def to_dict(self) -> JsonObject:
        """Plain data."""
        return {**asdict(self), "targets": list(self.targets)}


Matrix = TypeVar("Matrix")


def can_have_lora(path: str, ndim: int) -> bool:
    """Whether a parameter is a matrix, or a stack of matrices, that LoRA can be applied to."""
    return ndim >= 2 and not path.endswith(("scale", "bias"))


def matching_targets(spec: LoraSpec, matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Return the target matrices by path.

    Raises:
        TPUModelError: A pattern matches none, or is not a regular expression.
    """
    matching: dict[str, Matrix] = {}
    for target in spec.targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise TPUModelError(
                f"lora target {target!r} is not a regular expression: {error}."
            ) from None
        new = {path: leaf for path, leaf in matrices.items() if pattern.search(path)}
        if not new and spec.targets != DEFAULT_TARGETS:
            names = sorted({word for path in matrices for word in path.split("/")})
            raise TPUModelError(
                f"lora target '{target}' matches no matrix; the model has "
                f"{', '.join(list(matrices)[:8])} ….{did_you_mean(target, names)}"
            )
        matching |= new
    if not matching:
        raise TPUModelError(
            f"the model has no matrices called {', '.join(spec.targets)}; set lora targets to some "
            f"of {', '.join(list(matrices)[:8])} …."
        )
    return matching


def target_shapes(spec: LoraSpec, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a reference transformer's target matrices by path, layers stacked.

    Raises:
        TPUModelError: See `matching_targets`.
    """
    shapes = config.parameter_shapes()
    return matching_targets(
        spec, {path: one for path, one in shapes.items() if can_have_lora(path, len(one))}
    )


def lora_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of `a` and `b` for a matrix of shape (…, inputs, outputs)."""
    *stack, inputs, outputs = shape
    return (*stack, inputs, rank), (*stack, rank, outputs)


def lora_multiply_adds(spec: LoraSpec, config: TransformerConfig) -> float:
    """Return the multiply-adds of one token with all LoRA matrices of the experts it uses."""
    total = 0.0
    for path, shape in target_shapes(spec, config).items():
        each = sum(math.prod(thin) for thin in lora_shapes(shape, spec.rank))
        total += each * _share_used(path, config)
    return total


def _share_used(path: str, config: TransformerConfig) -> float:
    """Return the fraction of a stack's matrices that one token is multiplied with."""
    if "/experts/" not in path:
        return 1.0
    layer = next(one for one in config.kinds.values() if one.n_experts)
    return layer.experts_per_token / layer.n_experts
