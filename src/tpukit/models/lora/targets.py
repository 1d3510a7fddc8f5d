"""Which matrices of a model are meant by an adapter's patterns. Loads no jax."""

import math
import re
from collections.abc import Mapping
from typing import TypeVar

from ...errors import TPUModelError, did_you_mean
from ..transformer.config import TransformerConfig
from .spec import DEFAULT_TARGETS, LoraSpec

Matrix = TypeVar("Matrix")


def can_have_thin(path: str, ndim: int) -> bool:
    """Whether a parameter is a matrix, or a stack of them, that thin ones can be beside."""
    return ndim >= 2 and not path.endswith(("scale", "bias"))


def targeted(spec: LoraSpec, matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """The matrices that are meant, by path.

    Raises:
        TPUModelError: A pattern finds none, or is no regular expression.
    """
    found: dict[str, Matrix] = {}
    for target in spec.targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise TPUModelError(f"lora target {target!r} is no pattern: {error}.") from None
        meant = {path: leaf for path, leaf in matrices.items() if pattern.search(path)}
        if not meant and spec.targets != DEFAULT_TARGETS:
            names = sorted({word for path in matrices for word in path.split("/")})
            raise TPUModelError(
                f"lora target '{target}' is in the path of no matrix; there are "
                f"{', '.join(list(matrices)[:8])} ….{did_you_mean(target, names)}"
            )
        found |= meant
    if not found:
        raise TPUModelError(
            f"the model has no matrices called {', '.join(spec.targets)}; name some of "
            f"{', '.join(list(matrices)[:8])} … in lora targets."
        )
    return found


def targets_of(spec: LoraSpec, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices of a reference transformer that are meant, layers stacked, by path.

    Raises:
        TPUModelError: See `targeted`.
    """
    shapes = config.parameter_shapes()
    return targeted(
        spec, {path: one for path, one in shapes.items() if can_have_thin(path, len(one))}
    )


def thin_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two thin matrices beside one of a shape (…, inputs, outputs)."""
    *stack, inputs, outputs = shape
    return (*stack, inputs, rank), (*stack, rank, outputs)


def thin_products(spec: LoraSpec, config: TransformerConfig) -> float:
    """Multiply-adds of one token with all thin matrices; of experts with those it is sent to."""
    total = 0.0
    for path, shape in targets_of(spec, config).items():
        each = sum(math.prod(thin) for thin in thin_shapes(shape, spec.rank))
        total += each * _share_used(path, config)
    return total


def _share_used(path: str, config: TransformerConfig) -> float:
    """The share of a stack's matrices that one token meets."""
    if "/experts/" not in path:
        return 1.0
    layer = next(one for one in config.kinds.values() if one.n_experts)
    return layer.experts_per_token / layer.n_experts
