"""The dimensions of a transformer that decide its memory and time, as plain numbers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ...hardware import formats
from ...models.lora.spec import LoraSpec
from ...models.transformer.layer_pattern import find_runs
from .layer_shape import LayerShape, layer_shape
from .thin_shape import ThinShape, thin_shape


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What arithmetic needs to know of a reference transformer.

    Layers are counted by `kinds`; `heads` to `experts_per_token` are those of the description that
    kinds differ from.

    Attributes:
        kinds: What its layers are, those of multi-token prediction among them.
        unembeddings: Times that a token's logits are made: once, and once for each token more that
            is predicted ahead.
        hidden_matrices: Matrices of a feed-forward block: 3 when gated, 2 when not.
        one_hot_lookup: Whether embeddings are looked up by a product with a one-hot matrix.
        window: Keys that a query of a local layer attends to; None where no layer is local.
        global_layers: Layers whose queries attend to every key before them.
        beside_layers: Weights a token is multiplied with outside of layers and unembedding.
        layer_tables: Parameters of embeddings that single layers read.
        turn: Layers that one turn of the loop over layers runs, where kinds take turns.
        expert_parameters: Of all experts together; 0 for a dense model.
        expert_padding: Parameters more that their matrices have room for, in whole lanes.
        other_parameters: All the rest.
        matmul_parameters: Weights one token is multiplied with, one unembedding included.
        parameter_shapes: Of every parameter, layers stacked.
        thin: What alone is trained, beside all of that; None where all of it is.
    """

    name: str
    kinds: tuple[LayerShape, ...]
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
    unembeddings: int
    window: int | None
    global_layers: int
    beside_layers: int
    layer_tables: int
    turn: int
    expert_parameters: int
    expert_padding: int
    other_parameters: int
    matmul_parameters: int
    parameter_shapes: tuple[tuple[int, ...], ...] = field(repr=False)
    thin: ThinShape | None = None

    @property
    def trained_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of every parameter that the optimizer has states of."""
        return self.parameter_shapes if self.thin is None else self.thin.parameter_shapes

    def state_bytes(self, optimizer_bytes: float) -> float:
        """Bytes of all parameters and of the optimizer's states.

        Args:
            optimizer_bytes: State for one parameter.
        """
        thin, each = self.thin, formats.FLOAT32.itemsize + optimizer_bytes
        if thin is None:
            return each * self.parameters
        return thin.kept_bytes + each * thin.parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.expert_parameters + self.other_parameters

    @property
    def layer_parameters(self) -> float:
        """Parameters of one layer in the mean, all experts included."""
        return (self.parameters - self.outside_parameters) / self.layers_run

    @property
    def layers_run(self) -> int:
        """Layers of all kinds."""
        return sum(kind.count for kind in self.kinds)

    @property
    def head_parameters(self) -> int:
        """Parameters of the unembedding."""
        return self.vocab * self.d_model

    @property
    def outside_parameters(self) -> int:
        """Parameters of the tables before and after the layers."""
        return self.head_parameters * (1 if self.tied else 2) + self.layer_tables


def shape_of(
    config: Any, lora: LoraSpec | None = None, *, stored_bytes: int | None = None
) -> ModelShape:
    """The shape of a `TransformerConfig`.

    Args:
        config: The model.
        lora: What alone is trained beside it.
        stored_bytes: With `lora`: of all its weights, where a quantized folder holds them.
    """
    c = config
    count = c.parameter_count()
    order = Counter(c.layer_order)
    order[c.layer_order[-1]] += c.mtp_layers
    kinds = tuple(
        layer_shape(c.kinds[name], d_model=c.d_model, count=many) for name, many in order.items()
    )
    layers = [layer for _, layer in c.layers()]
    windows = [layer.sliding_window for layer in layers if layer.sliding_window]
    experts = sum(
        kind.count * kind.experts * kind.expert_width * kind.hidden_matrices * c.d_model
        for kind in kinds
    )
    in_layers = sum(
        kind.count * (kind.mixing_weights + kind.hidden_matrices * kind.hidden_width * c.d_model)
        for kind in kinds
    )
    unembeddings = 1 + c.mtp_layers
    return ModelShape(
        name=c.name,
        kinds=kinds,
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
        hidden_matrices=3 if c.gated_mlp else 2,
        tied=c.tied_embeddings,
        one_hot_lookup=c.embedding_lookup == "one_hot",
        unembeddings=unembeddings,
        window=min(windows, default=None),
        global_layers=len(layers) - len(windows),
        beside_layers=count.matmul_active - in_layers - unembeddings * c.vocab_size * c.d_model,
        layer_tables=c.vocab_size * c.n_layers * c.per_layer_width,
        turn=_longest_turn(c),
        expert_parameters=experts,
        expert_padding=sum(
            kind.count * kind.experts * kind.hidden_matrices * kind.expert_padding for kind in kinds
        ),
        other_parameters=count.total - experts,
        matmul_parameters=count.matmul_active,
        parameter_shapes=tuple(c.parameter_shapes().values()),
        thin=None if lora is None else thin_shape(c, lora, stored_bytes=stored_bytes),
    )


def _longest_turn(config: Any) -> int:
    """Layers of the longest cycle that a loop goes through more than once."""
    donors = {donor for donor in config.key_donors.values() if donor is not None}
    runs = find_runs(config.layer_order, alone=tuple(sorted(donors)))
    return max((len(run.cycle) for run in runs if run.repeats > 1), default=1)
