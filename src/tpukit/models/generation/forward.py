"""The two forward passes of generation: a whole prompt, and one token on top of the cache.

On a GPU, layers are unrolled. A step that reads one token per row does little but read weights, so
cutting a layer out of a stack or concatenating matrices at every step would double the traffic.
`unstack_layers` therefore lays weights out once, before anything runs. The program restacks them,
and the compiler sees that slicing the stack gives the arrays that came in.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from ...annotations import PyTree
from ..adapters import TransformerAdapter
from ..execution import Execution
from ..remat.policy import NO_REMAT
from ..transformer.config import TransformerConfig
from ..transformer.decoder import DecoderLayer
from ..transformer.mixing import LayerContext, SharedKeys
from ..transformer.model import Transformer
from .cache import Cache, CacheSpec, empty_cache, index_in_kind, rotation_of
from .mixing import PromptMixing, TokenMixing

# Matrices that read the same activations, by the name of their parent module.
_TOGETHER = {
    "self_attention": ("q_proj", "k_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj"),
    "shared": ("gate_proj", "up_proj"),
    "dense": ("gate_proj", "up_proj"),
}
_JOINED = "joined"
_LAYERS = "layers"


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with a tuple of layers per stack and joined matrices per layer."""
    return {**params, _LAYERS: jax.tree.map(_unstacked, _joined(params[_LAYERS], ""))}


def restack_layers(prepared: Mapping[str, Any]) -> PyTree:
    """Return the parameters that `unstack_layers` was given; inside a program, at no cost."""
    # Split before stacking, because the compiler joins slices of one matrix, not of a stack.
    parted = _parted(prepared[_LAYERS])
    stacks = jax.tree.map(_stacked, parted, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {**prepared, _LAYERS: stacks}


def _stacked(layers: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack(layers)


def _unstacked(leaf: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(leaf[number] for number in range(leaf.shape[0]))


def _joined(tree: PyTree, name: str) -> PyTree:
    if not isinstance(tree, Mapping):
        return tree
    branch = cast("Mapping[str, Any]", tree)
    made = {key: _joined(value, key) for key, value in branch.items()}
    names = _TOGETHER.get(name, ())
    if not names or not all(_is_matrix(made.get(one)) for one in names):
        return made
    kernels: list[jax.Array] = [made[one].pop("kernel") for one in names]
    widths = "_".join(str(kernel.shape[-1]) for kernel in kernels)
    return {**made, f"{_JOINED}_{widths}": jnp.concatenate(kernels, axis=-1)}


def _is_matrix(part: Any) -> bool:
    return isinstance(part, Mapping) and "kernel" in part


def _parted(tree: PyTree) -> PyTree:
    if not isinstance(tree, Mapping):
        return tree
    branch = cast("Mapping[str, Any]", tree)
    made: dict[str, Any] = {}
    for key, value in branch.items():
        inner = _parted(value)
        if not key.startswith(_JOINED):
            made[key] = {**made.get(key, {}), **inner} if isinstance(inner, dict) else inner
            continue
        widths = [int(width) for width in key.split("_")[1:]]
        names = ("q_proj", "k_proj", "v_proj") if len(widths) == 3 else ("gate_proj", "up_proj")
        start = 0
        for name, width in zip(names, widths, strict=True):
            parts = tuple(one[:, start : start + width] for one in inner)
            made[name] = {**made.get(name, {}), "kernel": parts}
            start += width
    return made


# (cache of the layer's kind or None, the layer's index in it) -> the layer's token mixing
MakeMixing = Callable[[Any, Any], PromptMixing | TokenMixing]


def read_prompts(
    config: TransformerConfig,
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    slots: int,
    execution: Execution,
    kv: CacheSpec | None = None,
) -> tuple[jax.Array, Cache]:
    """Return logits (rows, V) after each prompt's last token, and the cache of the prompts.

    Args:
        config: The model.
        params: The parameters of a workload's state, or of `unstack_layers` without a scan.
        tokens: (rows, longest) prompts, padded at the end.
        lengths: (rows,) tokens of each prompt; 0 for rows that pad the batch.
        slots: The most tokens of a row.
        execution: The execution settings.
        kv: The cache format; the model's own dtype by default.
    """
    model = _module(config, params, execution)
    rows, longest = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(longest), (rows, longest))
    cache = empty_cache(config, rows=rows, slots=slots, apart=not execution.scan_layers, kv=kv)

    def mixing(cache: PyTree, index: Any) -> PromptMixing:
        return PromptMixing(cache, index, lengths, execution, rotation_of(kv))

    x, cache = _run(model, tokens, positions, cache, mixing, length=slots)
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
    return model.unembed(last)[:, 0], cache


def read_token(
    config: TransformerConfig,
    params: PyTree,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    *,
    slots: int,
    execution: Execution,
    kv: CacheSpec | None = None,
) -> tuple[jax.Array, Cache]:
    """Return logits (rows, V) after one more token per row, and the cache with these tokens.

    Args:
        config: The model.
        params: The parameters.
        tokens: (rows,) the new tokens.
        positions: (rows,) their positions in the sequence.
        cache: The cache of the tokens before.
        slots: The most tokens of a row.
        execution: The execution settings.
        kv: The cache format.
    """
    model = _module(config, params, execution)

    def mixing(cache: PyTree, index: Any) -> TokenMixing:
        return TokenMixing(cache, index, positions, rotation_of(kv), execution.slots)

    x, cache = _run(model, tokens[:, None], positions[:, None], cache, mixing, length=slots)
    return model.unembed(x)[:, 0], cache


def _module(config: TransformerConfig, params: PyTree, execution: Execution) -> Transformer:
    # Restacked inside the loop over tokens, because the compiler does not cancel unstacking and
    # restacking across the loop's boundary.
    stacked = params if execution.scan_layers else restack_layers(params)
    return TransformerAdapter(config).module(stacked, execution)


def _run(
    model: Transformer,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    mixing: MakeMixing,
    *,
    length: int,
) -> tuple[jax.Array, Cache]:
    """Send tokens through all layers; the cache is a carry, so that it is written in place."""
    x = model.embed_tokens(tokens, positions)
    own = None if model.per_layer is None else model.per_layer(tokens, x)
    context = LayerContext(positions, length, model.execution, mixing(None, 0))
    index = jnp.asarray(index_in_kind(model.config.layer_order), jnp.int32)

    scan = model.execution.scan_layers
    traced: Counter[str] = Counter()  # unrolled layers of each kind so far

    def one_layer(
        layer: DecoderLayer,
        carry: PyTree,
        inputs: PyTree,
        shared: Mapping[str, SharedKeys],
        kind: str,
    ) -> Any:
        (x, cache), (own, index) = carry, inputs
        own_cache: PyTree = cache.get(kind)
        place, traced[kind] = traced[kind], traced[kind] + 1
        if own_cache is not None and not scan:
            used = mixing(own_cache[place], 0)
        else:
            used = mixing(own_cache, index)
        result = layer(x, context.replace(mixing=used, per_layer=own, shared=shared))
        if own_cache is not None:
            kept = used.cache if scan else (*own_cache[:place], used.cache, *own_cache[place + 1 :])
            cache = {**cache, kind: kept}
        return (result.x, cache), None, result.keys

    carried, _ = model.visit_layers(
        one_layer,
        (x, cache),
        stacked=nnx.state(model.layers),
        inputs=(own, index),
        remat=NO_REMAT,
        scan=scan,
        round_per_layer=False,
    )
    return carried
