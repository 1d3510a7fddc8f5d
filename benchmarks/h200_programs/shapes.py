"""The models of the comparison and the tokens they are given, the same for every program."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 32768
SEQUENCE = 2048
HEAD = 128


@dataclass(frozen=True)
class Shape:
    """A Llama-style transformer and its batch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    batch: int
    experts: int = 0

    @property
    def flops(self) -> float:
        """Of one step, forward and backward, causal attention counted once."""
        attention = self.width * HEAD * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.width * self.hidden * (2 if self.experts else 1)
        router = self.width * self.experts
        weights = self.layers * (attention + mlp + router) + self.width * VOCABULARY
        scores = 2 * self.layers * self.heads * HEAD * SEQUENCE / 2
        return 6 * (weights + scores) * self.batch * SEQUENCE


SHAPES = {
    # To see that a program runs, on any machine.
    "tiny": Shape(layers=2, width=128, heads=2, kv_heads=1, hidden=256, batch=2),
    "350m": Shape(layers=24, width=1024, heads=8, kv_heads=8, hidden=4096, batch=32),
    "1b": Shape(layers=16, width=2048, heads=16, kv_heads=8, hidden=8192, batch=16),
    "3b": Shape(layers=28, width=3072, heads=24, kv_heads=8, hidden=8192, batch=8),
    "moe-8x1b": Shape(layers=16, width=2048, heads=16, kv_heads=8, hidden=8192, batch=4, experts=8),
}


def write_tokens(path: Path, shape: Shape, steps: int) -> None:
    """A batch for every step: words by Zipf's law, so that there is something to learn."""
    rng = np.random.default_rng(0)
    ranks = 1.0 / np.arange(1, VOCABULARY + 1)
    cumulative = np.cumsum(ranks / ranks.sum())
    drawn = rng.random((steps, shape.batch, SEQUENCE + 1))
    np.save(path, np.searchsorted(cumulative, drawn).astype(np.uint16))
