"""A model as a server holds and runs it: matrices, and what each kind of layer keeps of a sequence.

Counted from the configuration alone, because a plan must not wait for jax; tests hold the bytes to
the arrays that `models.generation` makes.
"""

import math
from collections import Counter
from dataclasses import dataclass

from ...hardware.cache_formats import CACHE_FORMATS, Unit
from ...hardware.formats import BFLOAT16, FLOAT32
from ...models.transformer.config import TransformerConfig
from ...models.transformer.layer_config import LayerConfig
from ...models.transformer.shapes import parameter_shapes
from .attention_time import visited_keys
from .matrices import Matrices, layer_matrices


@dataclass(frozen=True)
class ServedKind:
    """All layers of one kind.

    Attributes:
        layers: How many there are.
        matrices: Of all these layers.
    """

    layer: LayerConfig
    layers: int
    matrices: tuple[Matrices, ...]

    def tokens_held(self, context: int) -> int:
        """Tokens of a sequence that a layer can look back to, and holds for that."""
        return self.layer.reach(context) or context

    @property
    def units(self) -> tuple[Unit, ...]:
        """What attention of one layer reads of every token it looks back to."""
        c = self.layer
        if c.delta is not None:
            return ()
        if c.latent is not None:
            return Unit(1, c.latent.kv_rank), Unit(1, c.latent.rope_dim)
        return (Unit(2 * c.n_kv_heads, c.head_dim),)

    @property
    def state_bytes(self) -> int:
        """Of one sequence in one layer, however long it is: the state and the last inputs."""
        d = self.layer.delta
        if d is None:
            return 0
        state = FLOAT32.nbytes(d.value_heads * d.key_dim * d.value_dim)
        channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim
        return state + BFLOAT16.nbytes((d.convolution - 1) * channels)

    def cache_bytes(self, context: int, cache: str) -> int:
        """Of one sequence in all these layers; those that take another's keys hold none.

        Codebooks are not counted: all sequences share them.
        """
        if self.layer.shares_keys_of is not None:
            return 0
        return self.layers * (self.state_bytes + self._read(self.tokens_held(context), cache))

    def bytes_attended(self, context: int, cache: str) -> int:
        """What one more token of a sequence reads; a state is written as well."""
        read = self._read(self.tokens_held(context), cache)
        return self.layers * (2 * self.state_bytes + read)

    def _read(self, tokens: int, cache: str) -> int:
        return CACHE_FORMATS[cache].nbytes(self.units, tokens)

    @property
    def key_heads(self) -> int:
        """Parts that what is kept can be cut into by heads."""
        c = self.layer
        return 1 if c.latent is not None else c.delta.value_heads if c.delta else c.n_kv_heads

    @property
    def joined_width(self) -> int:
        """Channels of attention's result, to be summed where devices hold other tokens."""
        c = self.layer
        return c.n_heads * (c.latent.kv_rank if c.latent is not None else c.v_dim)

    def token_products(self, context: int) -> float:
        """Multiply-adds of attention for one more token, in all these layers.

        Latents are met as they are kept: every head multiplies with all their channels.
        """
        c = self.layer
        if c.delta is not None:
            return self._state_products
        width = c.qk_dim + c.v_dim
        if c.latent is not None:
            width = 2 * c.latent.kv_rank + c.latent.rope_dim
        return float(self.layers * c.n_heads * width * self.tokens_held(context))

    def prompt_products(self, length: int) -> float:
        """The same for a prompt, by the blocks of keys that its kernel visits."""
        c = self.layer
        if c.delta is not None:
            return self._state_products * length
        if c.attention_chunk is not None and c.attention_chunk < length:
            keys = visited_keys(c.attention_chunk, None)
        else:
            keys = visited_keys(length, c.sliding_window)
        return self.layers * c.n_heads * (c.qk_dim + c.v_dim) * keys * length

    @property
    def _state_products(self) -> float:
        d = self.layer.delta
        assert d is not None
        # The state is read for the key, changed, and read for the query.
        return 3.0 * self.layers * d.value_heads * d.key_dim * d.value_dim


@dataclass(frozen=True)
class ServedModel:
    """What arithmetic needs to know of a served transformer.

    Attributes:
        kinds: Every kind of layer that it has.
        outside: Matrices beside the layers that every token is multiplied with, the head among
            them.
        looked_up: Parameters of tables of which a token takes one row.
        others: All further parameters: norms, biases, sinks.
    """

    name: str
    max_seq_len: int
    d_model: int
    kinds: tuple[ServedKind, ...]
    outside: tuple[Matrices, ...]
    looked_up: int
    others: int

    @classmethod
    def of(cls, config: TransformerConfig) -> "ServedModel":
        """The model of a configuration; layers that predict further tokens are left out."""
        c = config
        order = Counter(c.layer_order)
        kinds = tuple(
            ServedKind(c.kinds[name], layers, layer_matrices(c.kinds[name], c.d_model, layers))
            for name, layers in order.items()
        )
        outside = [Matrices(c.d_model, c.vocab_size, 1, narrow=False)]
        looked_up = 0 if c.tied_embeddings else c.vocab_size * c.d_model
        if c.learned_positions:
            looked_up += c.max_seq_len * c.d_model
        if c.per_layer_width:
            width = c.n_layers * c.per_layer_width
            outside.append(Matrices(c.d_model, width, 1, narrow=False))
            looked_up += c.vocab_size * width
        held = sum(
            math.prod(shape)
            for path, shape in parameter_shapes(c).items()
            if not path.startswith("mtp/")
        )
        matrices = [one for kind in kinds for one in kind.matrices]
        counted = sum(one.parameters for one in (*matrices, *outside))
        others = held - counted - looked_up
        return cls(c.name, c.max_seq_len, c.d_model, kinds, tuple(outside), looked_up, others)

    @property
    def layers(self) -> int:
        """Of all kinds."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def matrices(self) -> tuple[Matrices, ...]:
        """All of them."""
        return (*(one for kind in self.kinds for one in kind.matrices), *self.outside)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(one.parameters for one in self.matrices) + self.looked_up + self.others

    @property
    def products(self) -> float:
        """Multiply-adds of one token with weights."""
        return sum(one.products for one in self.matrices)

    def weight_bytes(self, weights: str) -> int:
        """Bytes of all weights; tables, norms, biases and routers stay in bfloat16."""
        wide = BFLOAT16.nbytes(self.looked_up + self.others)
        return sum(one.nbytes(weights) for one in self.matrices) + wide

    def bytes_read(self, weights: str, rows: int) -> float:
        """Bytes of weights that a pass over `rows` tokens reads, each once.

        Of tables a few rows are read, of experts those that some row chooses.
        """
        wide = BFLOAT16.nbytes(self.others)
        return sum(one.bytes_read(weights, rows) for one in self.matrices) + wide

    def cache_bytes(self, context: int, cache: str = "bf16") -> int:
        """What all layers keep of one sequence."""
        return sum(kind.cache_bytes(context, cache) for kind in self.kinds)

    def bytes_attended(self, context: int, cache: str = "bf16") -> int:
        """What one more token of one sequence reads of that, and writes of states."""
        return sum(kind.bytes_attended(context, cache) for kind in self.kinds)
