"""Bytes of a served model: its weights as they are stored, its cache, and what a step reads."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...hardware.formats import BFLOAT16
from ...hardware.stored_formats import WEIGHT_FORMATS
from .model_shape import ModelShape


@dataclass(frozen=True)
class Matrices:
    """Weights of one kind: `count` matrices that rows of width `rows` are multiplied with."""

    rows: int
    columns: int
    count: int
    of_experts: bool = False

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.rows * self.columns * self.count

    def nbytes(self, weights: str) -> int:
        """Bytes of all of them in a weight format."""
        return self.count * WEIGHT_FORMATS[weights].nbytes(self.rows, self.columns)


def layer_matrices(shape: ModelShape) -> Iterator[Matrices]:
    """The matrices of all layers, which is what may be kept narrow."""
    s, width = shape, shape.heads * shape.head_dim
    yield Matrices(s.d_model, width, s.layers)
    yield Matrices(s.d_model, s.kv_heads * s.head_dim, 2 * s.layers)
    yield Matrices(width, s.d_model, s.layers)
    blocks = s.layers * max(1, s.experts)
    yield Matrices(s.d_model, s.d_ff, (s.hidden_matrices - 1) * blocks, bool(s.experts))
    yield Matrices(s.d_ff, s.d_model, blocks, bool(s.experts))


def weight_bytes(shape: ModelShape, weights: str) -> int:
    """Bytes of all weights; tables, norms, biases and routers stay in bfloat16."""
    matrices = list(layer_matrices(shape))
    others = shape.parameters - sum(one.parameters for one in matrices)
    return sum(one.nbytes(weights) for one in matrices) + BFLOAT16.nbytes(others)


def keys_held(shape: ModelShape, context: int) -> int:
    """Keys of one sequence in all layers; a local one holds no more than its window."""
    local = shape.layers - shape.global_layers
    return shape.global_layers * context + local * min(context, shape.window or context)


def cache_bytes(shape: ModelShape, batch: int, context: int) -> float:
    """Bytes of keys and values of all layers."""
    held = keys_held(shape, context) * batch
    return float(BFLOAT16.nbytes(2 * shape.kv_heads * shape.head_dim * held))


def weight_bytes_read(shape: ModelShape, weights: str, rows: int) -> float:
    """Bytes of weights that a pass over `rows` tokens reads, each once.

    Embeddings are looked up, so of a table that is not also the head only a few rows are read; of
    an MoE only the experts that some row chooses.
    """
    whole = float(weight_bytes(shape, weights))
    if not shape.tied:
        whole -= BFLOAT16.nbytes(shape.head_parameters)
    if not shape.experts:
        return whole
    untouched = (1 - shape.experts_per_token / shape.experts) ** rows
    experts = sum(one.nbytes(weights) for one in layer_matrices(shape) if one.of_experts)
    return whole - experts * untouched
