"""The dimensions of a transformer that decide its memory and time, as plain numbers."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What arithmetic needs to know of a reference transformer.

    Attributes:
        hidden_matrices: Matrices of a feed-forward block: 3 when gated, 2 when not.
        one_hot_lookup: Whether embeddings are looked up by a product with a one-hot matrix.
        window: Keys that a query of a local layer attends to; None where no layer is local.
        global_layers: Layers whose queries attend to every key before them.
        sorted_rows: Whether rows are grouped by expert, however many each gets.
        expert_rows: Rows an expert computes over those routed to it: more than 1 where it has a
            buffer of fixed size.
        expert_parameters: Of all experts together; 0 for a dense model.
        other_parameters: All the rest.
        matmul_parameters: Weights one token is multiplied with, one unembedding included.
        parameter_shapes: Of every parameter, layers stacked.
    """

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    max_seq_len: int
    experts: int
    experts_per_token: int
    hidden_matrices: int
    tied: bool
    one_hot_lookup: bool
    qk_norm: bool
    post_norms: bool
    parallel_block: bool
    window: int | None
    global_layers: int
    sorted_rows: bool
    expert_rows: float
    expert_parameters: int
    other_parameters: int
    matmul_parameters: int
    parameter_shapes: tuple[tuple[int, ...], ...] = field(repr=False)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.expert_parameters + self.other_parameters

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer, all experts included."""
        return (self.parameters - self.outside_parameters) / self.layers

    @property
    def head_parameters(self) -> int:
        """Parameters of the unembedding."""
        return self.vocab * self.d_model

    @property
    def outside_parameters(self) -> int:
        """Parameters of the tables before and after the layers."""
        return self.head_parameters * (1 if self.tied else 2)

    @property
    def attention_width(self) -> int:
        """Channels of queries, keys and values of one token together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def hidden_width(self) -> int:
        """Channels of the feed-forward block that one token passes through."""
        return self.d_ff * max(1, self.experts_per_token)


def shape_of(config: Any) -> ModelShape:
    """The shape of a `TransformerConfig`."""
    c = config
    count = c.parameter_count()
    matrices = 3 if c.gated_mlp else 2
    layers = [layer for _, layer in c.layers()]
    windows = [layer.sliding_window for layer in layers if layer.sliding_window]
    experts = sum(layer.n_experts * layer.expert_d_ff for layer in layers) * c.d_model * matrices
    return ModelShape(
        name=c.name,
        layers=c.n_layers,
        d_model=c.d_model,
        heads=c.n_heads,
        kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        d_ff=c.expert_d_ff or c.d_ff,
        vocab=c.vocab_size,
        max_seq_len=c.max_seq_len,
        experts=c.n_experts,
        experts_per_token=c.experts_per_token,
        hidden_matrices=matrices,
        tied=c.tied_embeddings,
        one_hot_lookup=c.embedding_lookup == "one_hot",
        qk_norm=c.qk_norm is not None,
        post_norms=c.post_norms,
        parallel_block=c.parallel_block,
        window=min(windows, default=None),
        global_layers=len(layers) - len(windows),
        sorted_rows=bool(c.n_experts) and c.routing == "dropless",
        expert_rows=c.capacity_factor if c.n_experts and c.routing == "capacity" else 1.0,
        expert_parameters=experts,
        other_parameters=count.total - experts,
        matmul_parameters=count.matmul_active,
        parameter_shapes=tuple(c.parameter_shapes().values()),
    )
