"""The dimensions of a transformer that decide its memory and time, as plain numbers."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...hardware import formats
from ...hardware.stored_formats import WEIGHT_FORMATS
from ...models.lora.spec import LoraSpec, lora_multiply_adds, lora_shapes, target_shapes
from ...models.remat.policy import TENSOR_NAMES
from ...models.transformer.config import TransformerConfig
from ...models.transformer.layer_config import LayerConfig
from ...models.transformer.layer_pattern import find_runs
from ...models.transformer.shapes import layer_shapes

QUERIES, KEYS, VALUES = TENSOR_NAMES["qkv_proj"]
GATE, UP = TENSOR_NAMES["mlpwi"]
OUT, DOWN = "out_proj", "mlpwo"
# Matrices of token mixing, by the tensor name of their result in remat policies. In latent
# attention, keys are the latent vector and values the heads made from it.
_MIXING = {
    "q_proj": QUERIES,
    "q_b_proj": QUERIES,
    "k_proj": KEYS,
    "kv_a_proj": KEYS,
    "v_proj": VALUES,
    "kv_b_proj": VALUES,
    "o_proj": OUT,
}
# Chunk length of linear attention, from kernels/ops/gated_delta/operands.py, which imports jax.
DELTA_CHUNK = 128
LANES = 128


_WIDE = ("router", "shared_gate")  # small, and what they decide is worth every bit


@dataclass(frozen=True)
class Matrices:
    """`count` matrices of one kind, which multiply rows of width `rows`.

    Attributes:
        used: Share of these matrices that one row is multiplied with; less than 1 for experts.
        narrow: Whether they may be stored in fewer bits than bfloat16.
    """

    rows: int
    columns: int
    count: int
    used: float = 1.0
    narrow: bool = True

    @property
    def of_experts(self) -> bool:
        """Whether each row uses only some of them."""
        return self.used < 1

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.rows * self.columns * self.count

    def nbytes(self, weights: str) -> int:
        """Return the bytes of all of them in a weight format."""
        format = WEIGHT_FORMATS[weights if self.narrow else "bf16"]
        return self.count * format.nbytes(self.rows, self.columns)

    def bytes_read(self, weights: str, rows: int) -> float:
        """Return the bytes that a pass over `rows` tokens reads; only chosen experts count."""
        return self.nbytes(weights) * (1 - (1 - self.used) ** rows)

    @property
    def products(self) -> float:
        """Multiply-adds per row."""
        return self.parameters * self.used


def layer_matrices(layer: LayerConfig, d_model: int, layers: int) -> tuple[Matrices, ...]:
    """Return the matrices of this many layers of a kind."""
    found: list[Matrices] = []
    for path, shape in layer_shapes(layer, d_model).items():
        if "/experts/" in path and len(shape) == 3:
            used = layer.experts_per_token / layer.n_experts
            found.append(Matrices(shape[1], shape[2], shape[0] * layers, used))
        elif path.endswith("/kernel") and not path.endswith("_conv/kernel"):
            narrow = not any(name in path for name in _WIDE)
            found.append(Matrices(shape[0], shape[1], layers, narrow=narrow))
    return tuple(found)


def in_tiles(channels: Any, tile: int) -> Any:
    """Return channels, a number or an array, rounded up to whole tiles."""
    return -(-channels // tile) * tile


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Dimensions of one kind of layer.

    Attributes:
        count: Layers of this kind, including those of multi-token prediction.
        heads: Query heads; value heads in linear attention.
        qk_dim: Channels per query and key head.
        v_dim: Channels per value head.
        mixing: Weights per token of the matmuls that mix tokens, by the name of their result.
        widths: Channels of those results.
        unnamed: Weights of matmuls whose result has no name: low-rank queries, gates, routers,
            per-layer embeddings.
        dense_width: Hidden channels that every token passes: a dense block, shared experts, or a
            block parallel to the experts.
        expert_width: Hidden channels of an expert.
        hidden_matrices: Matrices of a feed-forward block: 3 when gated, 2 when not.
        window: Keys that a query attends to; None for all previous keys.
        chunk: Tokens per chunk of chunked attention, or None.
        sorted_rows: Whether rows are sorted by expert, with any number per expert.
        expert_rows: Rows that an expert computes divided by rows routed to it; above 1 with
            fixed-size buffers.
        weighs_inputs: Whether router weights multiply the inputs of experts instead of their
            outputs.
        linear: Whether attention is linear, with a state instead of keys.
    """

    count: int
    d_model: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    mixing: Mapping[str, int]
    widths: Mapping[str, int]
    unnamed: int
    dense_width: int
    experts: int
    experts_per_token: int
    expert_width: int
    hidden_matrices: int
    qk_norm: bool
    post_norms: bool
    parallel_block: bool
    window: int | None
    chunk: int | None
    sorted_rows: bool
    expert_rows: float
    weighs_inputs: bool
    linear: bool

    @property
    def head_dim(self) -> float:
        """Mean channels of query and value heads."""
        return (self.qk_dim + self.v_dim) / 2

    @property
    def out_width(self) -> int:
        """Channels per token of attention's output."""
        return self.heads * self.v_dim

    @property
    def key_width(self) -> int:
        """Channels per token of keys and values together."""
        return self.kv_heads * (self.qk_dim + self.v_dim)

    @property
    def mixing_width(self) -> int:
        """Channels per token of queries, keys and values together."""
        if self.linear:
            return sum(self.widths[name] for name in (QUERIES, KEYS, VALUES))
        return self.heads * self.qk_dim + self.key_width

    @property
    def mixing_weights(self) -> int:
        """Weights per token of all matmuls outside the feed-forward block."""
        return sum(self.mixing.values()) + self.unnamed

    @property
    def chosen_width(self) -> int:
        """Hidden channels of the experts that one token uses."""
        return self.experts_per_token * self.expert_width

    @property
    def hidden_width(self) -> int:
        """Hidden channels of the feed-forward block that one token uses."""
        return self.dense_width + self.chosen_width

    @property
    def expert_padding(self) -> int:
        """Padding elements of one expert matrix in memory.

        Arrays are stored in tiles of 8 x 128; the compiler chooses which dimension is last.
        """
        d, f = self.d_model, self.expert_width
        return min(in_tiles(d, 8) * in_tiles(f, LANES), in_tiles(f, 8) * in_tiles(d, LANES)) - d * f

    @property
    def is_local(self) -> bool:
        """Whether queries attend to a window, a chunk or a state, so that no ring is needed."""
        return self.linear or self.window is not None or self.chunk is not None


def layer_shape(layer: Any, *, d_model: int, count: int) -> LayerShape:
    """Return the shape of one kind of layer of a `TransformerConfig`."""
    matrices = {
        path.removesuffix("/kernel"): shape
        for path, shape in layer_shapes(layer, d_model).items()
        if path.endswith("/kernel") and not path.endswith("_conv/kernel")
    }
    mixing: dict[str, int] = {}
    widths: dict[str, int] = {}
    dense = unnamed = 0
    for path, shape in matrices.items():
        within, _, last = path.rpartition("/")
        name = _MIXING.get(last)
        if within.startswith("mlp") and last in ("gate_proj", "up_proj", "down_proj"):
            dense += math.prod(shape)
        elif name is None:
            unnamed += math.prod(shape)
        else:
            mixing[name], widths[name] = math.prod(shape), shape[-1]
    if layer.keys_as_values:
        widths[VALUES] = widths[KEYS]
    blocks = 3 if layer.gated_mlp else 2
    delta = layer.delta
    return LayerShape(
        count=count,
        d_model=d_model,
        heads=delta.value_heads if delta else layer.n_heads,
        kv_heads=delta.key_heads if delta else layer.n_kv_heads,
        qk_dim=delta.key_dim if delta else layer.qk_dim,
        v_dim=delta.value_dim if delta else layer.v_dim,
        mixing=mixing,
        widths=widths,
        unnamed=unnamed,
        dense_width=dense // (blocks * d_model),
        experts=layer.n_experts,
        experts_per_token=layer.experts_per_token,
        expert_width=layer.expert_d_ff if layer.n_experts else 0,
        hidden_matrices=blocks,
        qk_norm=layer.qk_norm is not None,
        post_norms=layer.post_norms,
        parallel_block=layer.parallel_block,
        window=layer.sliding_window,
        chunk=layer.attention_chunk,
        sorted_rows=bool(layer.n_experts) and layer.routing == "dropless",
        expert_rows=(
            layer.capacity_factor if layer.n_experts and layer.routing == "capacity" else 1.0
        ),
        weighs_inputs=layer.weigh_inputs,
        linear=delta is not None,
    )


BFLOAT16 = formats.BFLOAT16.itemsize  # bytes of a value


@dataclass(frozen=True, kw_only=True)
class ThinShape:
    """Dimensions of LoRA matrices, and of the frozen weights.

    Attributes:
        parameters: Parameters of all LoRA matrices.
        parameter_shapes: Shape of each, with layers stacked.
        products: Multiply-adds per token, padded to whole lanes.
        channels: Channels per token that LoRA matmuls read and add to, over all layers.
        base: Format of the frozen matrices, as text.
        base_bytes: Bytes of all frozen weights except experts, with tables.
        expert_bytes: Bytes of the frozen experts.
        largest: Weights of the largest matrix; one is decoded at a time.
        stored: Whether frozen matrices are quantized, and so decoded for every matmul.
        hidden_kept: Hidden widths per token that are alive in the backward pass of a layer, more
            than in full training, because gradients of LoRA matrices read their inputs. Read off
            compiled steps (`benchmarks/memory.py estimate --lora`).
        sums_experts: Whether experts have LoRA matrices, which are added to theirs, so that the sum
            has a gradient as large as the experts.
    """

    parameters: int
    parameter_shapes: tuple[tuple[int, ...], ...] = field(repr=False)
    products: float
    channels: float
    base: str
    base_bytes: float
    expert_bytes: float
    largest: int
    stored: bool
    hidden_kept: int
    sums_experts: bool

    @property
    def kept_bytes(self) -> float:
        """Bytes of all frozen weights."""
        return self.base_bytes + self.expert_bytes

    @property
    def decoded_bytes(self) -> float:
        """Bytes of the matrix that is being decoded."""
        return float(self.largest * BFLOAT16) if self.stored else 0.0


def thin_shape(
    config: TransformerConfig, spec: LoraSpec, *, stored_bytes: int | None = None
) -> ThinShape:
    """Return the LoRA dimensions of a reference transformer.

    Args:
        config: The model.
        spec: The LoRA settings.
        stored_bytes: Bytes of all weights in a quantized folder.

    Raises:
        TPUModelError: A target matches no matrix.
    """
    targets = target_shapes(spec, config)
    thin = [one for shape in targets.values() for one in lora_shapes(shape, spec.rank)]
    inside = [
        one
        for kind, count in Counter(config.layer_order).items()
        for one in layer_matrices(config.kinds[kind], config.d_model, count)
    ]
    kept = spec.base or "bf16"
    experts = sum(one.nbytes(kept) for one in inside if one.of_experts)
    layers = sum(one.nbytes(kept) for one in inside)
    counted = sum(one.parameters for one in inside)
    others = config.parameter_count().total - counted
    outside = others * BFLOAT16
    base, stored = kept, spec.base is not None
    if stored_bytes is not None:
        outside = formats.parse_format(config.param_dtype).nbytes(others)
        share = (stored_bytes - outside) / layers
        experts, layers = experts * share, layers * share
        base, stored = f"{8 * layers / counted:.3g} bits a weight, as they are kept", True
    # A matmul with fewer columns takes as long as with whole lanes.
    padded = in_tiles(spec.rank, LANES) / spec.rank
    return ThinShape(
        parameters=sum(math.prod(shape) for shape in thin),
        parameter_shapes=tuple(thin),
        products=lora_multiply_adds(spec, config) * padded,
        channels=lora_multiply_adds(spec, config) / spec.rank,
        base=base,
        base_bytes=outside + layers - experts,
        expert_bytes=experts,
        largest=max(one.rows * one.columns for one in inside),
        stored=stored,
        hidden_kept=_hidden_kept(targets, stored),
        sums_experts=any("/experts/" in path for path in targets),
    )


def _hidden_kept(targets: Iterable[str], stored: bool) -> int:
    if not any("/mlp/" in path for path in targets):
        return -2
    return 0 if stored else 1


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a reference transformer.

    Layers are listed by `kinds`; `heads` to `experts_per_token` are those of the base description.

    Attributes:
        kinds: Kinds of layers, including those of multi-token prediction.
        unembeddings: How often logits are computed per token: once, and once per further predicted
            token.
        hidden_matrices: Matrices of a feed-forward block: 3 when gated, 2 when not.
        one_hot_lookup: Whether embeddings are looked up by a matmul with a one-hot matrix.
        window: Keys that a query of a local layer attends to; None if no layer is local.
        global_layers: Layers whose queries attend to all previous keys.
        beside_layers: Weights per token outside layers and unembedding.
        layer_tables: Parameters of per-layer embeddings.
        turn: Layers per iteration of the loop over layers, where kinds alternate.
        expert_parameters: Parameters of all experts; 0 for a dense model.
        expert_padding: Padding elements of their matrices.
        other_parameters: All other parameters.
        matmul_parameters: Weights that one token is multiplied with, with one unembedding.
        parameter_shapes: Shape of every parameter, with layers stacked.
        thin: LoRA dimensions; None if all parameters are trained.
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
        """Shape of every trained parameter."""
        return self.parameter_shapes if self.thin is None else self.thin.parameter_shapes

    def state_bytes(self, optimizer_bytes: float) -> float:
        """Return the bytes of all parameters and optimizer state.

        Args:
            optimizer_bytes: Optimizer state per parameter.
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
        """Mean parameters per layer, with all experts."""
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
    """Return the shape of a `TransformerConfig`.

    Args:
        config: The model.
        lora: LoRA settings; None if all parameters are trained.
        stored_bytes: With `lora`: bytes of all weights in a quantized folder.
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
    """Return the layers of the longest cycle that a loop repeats."""
    donors = {donor for donor in config.key_donors.values() if donor is not None}
    runs = find_runs(config.layer_order, alone=tuple(sorted(donors)))
    return max((len(run.cycle) for run in runs if run.repeats > 1), default=1)
