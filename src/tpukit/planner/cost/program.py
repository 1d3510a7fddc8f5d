"""How a step is written where its dimensions leave it open."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .attention_time import kernel_s, plain_s, splash_in_two_s, splash_s
from .rounding import OUR_FLOAT8, OUR_INT8, Rounding


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a step is written where its dimensions leave it open; by default as we write it.

    Attributes:
        attention: As our kernels, jax's splash kernels with one backward kernel or two, or with
            scores that go through HBM.
        split_sequence: Along `tensor` the stream between blocks is split too.
        other_flops_per_token: Of products beside those of the transformer, such as looking
            embeddings up by multiplying with a one-hot matrix.
        int8: What a step in int8 rounds.
        fp8: What a step in fp8 rounds.
    """

    attention: Literal["ours", "splash", "splash in two", "plain"] = "ours"
    split_sequence: bool = False
    other_flops_per_token: float = 0.0
    int8: Rounding = OUR_INT8
    fp8: Rounding = OUR_FLOAT8

    @property
    def attention_timer(self) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        """Of attention's two passes, in seconds."""
        return _ATTENTION[self.attention]


OUR_PROGRAM = Program()
_ATTENTION = {
    "ours": kernel_s,
    "splash": splash_s,
    "splash in two": splash_in_two_s,
    "plain": plain_s,
}
