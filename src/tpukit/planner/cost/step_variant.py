"""How a step is written where its dimensions leave it open."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .attention_time import kernel_s, plain_s, splash_in_two_s, splash_s
from .model_shape import ModelShape
from .rounding import OUR_FLOAT8, OUR_INT8, OUR_INT8_THROUGHOUT, Rounding


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """How a step is written where its dimensions leave it open; by default as we write it.

    Attributes:
        attention: As our kernels, jax's splash kernels with one backward kernel or two, or with
            scores that go through HBM.
        split_sequence: Along `tensor` the stream between blocks is split too.
        int8: What a step in int8 rounds.
        fp8: What a step in fp8 rounds.
    """

    attention: Literal["ours", "splash", "splash in two", "plain"] = "ours"
    split_sequence: bool = False
    int8: Rounding = OUR_INT8
    fp8: Rounding = OUR_FLOAT8

    @property
    def attention_timer(self) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        """Seconds of attention's two passes."""
        return _ATTENTION[self.attention]

    def other_flops_per_token(self, shape: ModelShape) -> float:
        """FLOPs of products beside those with weights of layers and head; a program may make more.

        A lookup by a one-hot matrix is a product, and so is its gradient.
        """
        return 2 * (2.0 * shape.vocab * shape.d_model) if shape.one_hot_lookup else 0.0


OUR_STEP = StepVariant()
_ATTENTION = {
    "ours": kernel_s,
    "splash": splash_s,
    "splash in two": splash_in_two_s,
    "plain": plain_s,
}


def variant_for(matmul: str) -> StepVariant:
    """Our step of a model whose products are in the format `matmul`."""
    return StepVariant(int8=OUR_INT8_THROUGHOUT) if matmul == "int8_throughout" else OUR_STEP
