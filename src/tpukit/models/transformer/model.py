"""The reference decoder-only transformer: dense or MoE, layers stacked and scanned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...annotations import PyTree
from ...errors import TPUModelError
from ...parallel.experts.routing import RouterStats
from ...parallel.sharding.activations import constrain
from ..execution import Execution
from ..matmul.rules import apply_layer_rules, apply_matmul_rules
from ..remat.policy import RematPolicy
from .config import TransformerConfig
from .decoder import DecoderLayer
from .layer_pattern import find_runs
from .layer_stack import StackedLayers, round_layer_weights, run_layers
from .layers import Embedding, Linear, Norm
from .mixing import LayerContext, SharedKeys
from .mtp import PredictionLayers
from .shapes import kinds_of_stacks


class PerLayerEmbedding(nnx.Module):
    """Per-layer embeddings of tokens (Gemma 4 E2B and E4B): a table row and a projection."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.layers, self.width = config.n_layers, config.per_layer_width
        columns = self.layers * self.width
        self.embed = Embedding(config.vocab_size, columns, config, rngs=rngs)
        self.proj = Linear(config.d_model, columns, config, rngs=rngs)
        self.norm = Norm(self.width, config, param_dtype=config.param_dtype)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return (layers, B, S, width) for tokens (B, S) with embeddings x (B, S, d_model)."""
        shape = (*tokens.shape, self.layers, self.width)
        looked_up = self.embed(tokens).reshape(shape) * jnp.asarray(self.width**0.5, x.dtype)
        projected = self.proj(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        both = (self.norm(projected.reshape(shape)) + looked_up) * jnp.asarray(2**-0.5, x.dtype)
        return jnp.moveaxis(both, 2, 0)


# (layer, carry, per-layer inputs, keys of other layers, kind) -> (carry, statistics, keys)
LayerCall = Callable[
    [DecoderLayer, Any, Any, Mapping[str, SharedKeys], str], tuple[Any, Any, SharedKeys | None]
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TransformerOutput:
    """Logits (B, S, V), and router statistics (None for a dense model)."""

    logits: jax.Array
    router: RouterStats | None


class LayerStacks(nnx.Module):
    """Stacks of layers with different parameters, each named after its first kind."""

    def __init__(self, stacks: dict[str, DecoderLayer]) -> None:
        for name, stack in stacks.items():
            setattr(self, name, stack)


class Transformer(nnx.Module):
    """A decoder-only language model.

    `layers` is one `DecoderLayer` whose parameters have a leading axis of `n_layers`, or one such
    stack for each set of kinds with equal parameter shapes. `execution` can be replaced any time.

    Example:
        >>> model = Transformer(get_preset("tiny"), rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).shape
        (1, 8, 256)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        execution: Execution | None = None,
    ) -> None:
        self.config = config
        self.execution = execution or Execution()
        self.embed = Embedding(config.vocab_size, config.d_model, config, rngs=rngs)
        self.position_embed = (
            Embedding(config.max_seq_len, config.d_model, config, rngs=rngs)
            if config.learned_positions
            else None
        )
        stacks = {
            name: _stacked(config, kinds, rngs) for name, kinds in kinds_of_stacks(config).items()
        }
        self.layers = stacks[""] if "" in stacks else LayerStacks(stacks)
        self.per_layer = PerLayerEmbedding(config, rngs=rngs) if config.per_layer_width else None
        self.final_norm = Norm(config.d_model, config, param_dtype=config.param_dtype)
        self.lm_head = (
            None
            if config.tied_embeddings
            else Linear(config.d_model, config.vocab_size, config, rngs=rngs)
        )
        self.mtp = PredictionLayers(config, rngs=rngs) if config.mtp_layers else None
        apply_matmul_rules(self, config)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits (B, S, V) for tokens (B, S)."""
        return self.forward(tokens, positions=positions, segment_ids=segment_ids).logits

    def forward(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> TransformerOutput:
        """Return logits and router statistics.

        Args:
            tokens: (B, S) token ids.
            positions: (B, S) index of each token in its document; 0, 1, 2 … by default.
            segment_ids: (B, S) number of the packed document that a token belongs to.
        """
        x, router = self.hidden(tokens, positions=positions, segment_ids=segment_ids)
        return TransformerOutput(self.unembed(x), router)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterStats | None]:
        """Return the last layer's output (B, S, d_model), and router statistics."""
        x = self.embed_tokens(tokens, positions)
        context = self.context(tokens.shape, positions=positions, segment_ids=segment_ids)
        own = None if self.per_layer is None else self.per_layer(tokens, x)
        return self.run_stack(nnx.state(self.layers), x, context, own=own)

    def embed_tokens(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Return the input of the first layer, (B, S, d_model)."""
        length = tokens.shape[1]
        if length > self.config.max_seq_len:
            raise TPUModelError(
                f"the sequence has {length} tokens, but '{self.config.name}' has "
                f"max_seq_len={self.config.max_seq_len}; shorten it or raise max_seq_len."
            )
        x = self.embed(tokens)
        if self.config.scale_embeddings:
            x = x * jnp.asarray(self.config.d_model**0.5, x.dtype)
        if self.position_embed is not None:
            where = jnp.arange(length)[None] if positions is None else positions
            x = x + self.position_embed(where)
        return constrain(x, "batch", "sequence", "embed")

    def context(
        self,
        shape: tuple[int, ...],
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> LayerContext:
        """Return the context that the layers of a forward pass over tokens of `shape` share."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(shape[1])[None], (shape[0], shape[1]))
        return LayerContext.of_training(positions, segment_ids, self.execution)

    def run_stack(
        self,
        stacked: PyTree,
        x: jax.Array,
        context: LayerContext,
        *,
        own: jax.Array | None = None,
        order: tuple[str, ...] | None = None,
    ) -> tuple[jax.Array, RouterStats | None]:
        """Send `x` through the layers of `stacked`: all layers, or those of a pipeline stage.

        Args:
            stacked: The state of `layers`.
            x: (B, S, d_model).
            context: The context that the layers share.
            own: (layers, B, S, width) per-layer embeddings, or None.
            order: The kinds of these layers; by default all layers of the model.
        """
        execution = context.execution

        def one_layer(
            layer: DecoderLayer,
            x: jax.Array,
            own: PyTree,
            shared: Mapping[str, SharedKeys],
            kind: str,
        ) -> tuple[jax.Array, RouterStats | None, SharedKeys | None]:
            return layer(x, context.replace(per_layer=own, shared=shared))

        return self.visit_layers(
            one_layer,
            x,
            stacked=stacked,
            inputs=own,
            remat=execution.remat,
            scan=execution.scan_layers,
            round_per_layer=execution.scan_layers and not self.config.wide_gradients,
            order=order,
        )

    def visit_layers(
        self,
        call: LayerCall,
        carry: PyTree,
        *,
        stacked: PyTree,
        inputs: PyTree,
        remat: RematPolicy,
        scan: bool,
        round_per_layer: bool,
        order: tuple[str, ...] | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Call a function for every layer in order and pass its carry to the next call.

        Args:
            call: (layer, carry, per-layer inputs, keys of other layers, kind) -> (carry,
                statistics or None, keys or None).
            carry: The carry of the first call.
            stacked: The state of `layers`.
            inputs: Per-layer inputs with a leading axis of layers.
            remat: The remat policy.
            scan: Whether repeated layers are a scan.
            round_per_layer: Whether weights are rounded layer by layer; see
                `round_layer_weights`.
            order: The kinds of these layers; by default all layers of the model.

        Returns:
            The carry of the last call, and the sum of statistics.
        """
        c = self.config
        order = order or c.layer_order
        names = {
            name: kinds
            for name, kinds in kinds_of_stacks(c).items()
            if not {*kinds}.isdisjoint(order)
        }
        stack_of = {kind: name for name, kinds in names.items() for kind in kinds}
        definitions = {kind: _definition(c, kind, stack) for kind, stack in stack_of.items()}
        weights = {name: stacked[name] if name else stacked for name in names}
        opened: dict[str, Callable[[Any], Any]] = dict.fromkeys(weights, _unchanged)
        if round_per_layer:
            for name, stack in weights.items():
                opened[name], weights[name] = round_layer_weights(stack, jnp.dtype(c.dtype))

        def one_layer(
            parameters: PyTree,
            carry: PyTree,
            kind: str,
            own: PyTree,
            shared: Mapping[str, SharedKeys],
        ) -> tuple[Any, Any, SharedKeys | None]:
            layer = nnx.merge(definitions[kind], opened[stack_of[kind]](parameters))
            return call(layer, carry, own, shared, kind)

        donors = frozenset(donor for donor in c.key_donors.values() if donor is not None)
        layers = StackedLayers(weights, stack_of, order, donors, inputs)
        runs = find_runs(order, alone=tuple(sorted(donors)))
        return run_layers(one_layer, layers, runs, carry, remat=remat, scan=scan)

    def unembed(self, x: jax.Array) -> jax.Array:
        """Return the logits of the last layer's output."""
        return self.logits(self.final_norm(x))

    def logits(self, normed: jax.Array) -> jax.Array:
        """Return the logits of normed activations."""
        logits = normed @ self.head()
        if self.config.logit_soft_cap is not None:
            cap = jnp.asarray(self.config.logit_soft_cap, logits.dtype)
            logits = cap * jnp.tanh(logits / cap)
        return constrain(logits, "batch", "sequence", "vocab")

    def head(self) -> jax.Array:
        """Return the matrix (d_model, V) that normed activations are multiplied with."""
        return self.embed.head() if self.lm_head is None else self.lm_head.matrix()


def _stacked(config: TransformerConfig, kinds: tuple[str, ...], rngs: nnx.Rngs) -> DecoderLayer:
    """Return all layers of these kinds as one layer with stacked parameters."""

    @nnx.split_rngs(splits=sum(kind in kinds for kind in config.layer_order))
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> DecoderLayer:
        return DecoderLayer(config, config.kinds[kinds[0]], rngs=rngs)

    return stack(rngs)


def _definition(config: TransformerConfig, kind: str, stack: str) -> Any:
    """Return the graph definition of a layer of one kind; kinds may share a parameter stack."""
    layer = config.kinds[kind]
    empty = nnx.eval_shape(lambda: DecoderLayer(config, layer, rngs=nnx.Rngs(0)))
    apply_layer_rules(empty, config, path="/".join(filter(None, ("layers", stack))))
    return nnx.graphdef(empty)


def _unchanged(parameters: PyTree) -> PyTree:
    return parameters
