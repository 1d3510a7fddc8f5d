"""Cross-entropy as published runs compute it: MaxText's of whole logits, and tokamax's in blocks.

MaxText's keeps what its forward pass made for its gradients (`cross_entropy_with_logits` of
max_utils.py) and masks each token's loss: with it qwen3-8b of 24 sequences needs 31.36 GiB, where
31.37 were published, and with ours, which keeps logits alone, 30.99. Steps take as long with either
(1.034 and 1.033 of the published one for llama3.1-8b on v6e-8), and rows are timed with ours.
tokamax's is that of the "wk-" rows, in plain XLA: the one of llama3 (train.py: _ce_tokamax) and
the one of the "qwen3_cc5" pages differ in the format of the unembedding. openxla/tokamax's
chunked_xla.py states the order of the loops.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tpukit.models.loss import Batch, WeightedLoss
from tpukit.parallel.sharding.activations import activation_sharding

Pair = tuple[jax.Array, jax.Array]
Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
TOKENS, WORDS = 1024, 2048  # the blocks that tokamax's tuning chose on v6e (kernel_timings.json)


def loss_of_maxtext(logits: jax.Array, batch: Batch) -> WeightedLoss:
    """The sum over the tokens that count, and how many they are."""
    targets = batch["targets"]
    wanted = jax.nn.one_hot(targets, logits.shape[-1])
    counted = (targets >= 0).astype("float32")  # it asks the targets' segments
    losses = _of_logits(logits.astype("float32"), wanted)
    return WeightedLoss(jnp.sum(losses * counted), jnp.sum(counted))


@jax.custom_vjp
def _of_logits(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    return _of_logits_forward(logits, wanted)[0]


def _of_logits_forward(
    logits: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, Kept]]:
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    powers = jnp.exp(shifted)
    total = powers.sum(axis=-1, keepdims=True)
    logs = shifted - jnp.log(total)
    return -jnp.sum(wanted * logs, axis=-1), (logits, (wanted, powers, total, logs))


def _of_logits_backward(kept: tuple[jax.Array, Kept], slopes: jax.Array) -> Pair:
    logits, (wanted, powers, total, logs) = kept
    slopes = slopes[..., None]
    of_logits = slopes * (powers / total) - slopes * wanted
    return of_logits.astype(logits.dtype), -slopes * logs


_of_logits.defvjp(_of_logits_forward, _of_logits_backward)


def blocked_loss(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, *, head: str = "float32"
) -> WeightedLoss:
    """Blocks of tokens by blocks of words, logits of which are made again for the gradients.

    Activations are widened to float32 first. One trainer widens the unembedding too (`head`) and
    leaves it to the compiler when its gradient, of which every device has all, is summed: it lies
    there until the optimizer runs, which is why six sequences a chip were slower than five. The
    other's loss has a gradient function of its own, and the memory it needs has no room for that.
    """
    place = activation_sharding(targets.shape, "batch", "sequence")
    if place is None:
        raise ValueError("published runs with this loss are split over a mesh")
    axis, is_summed_at_once = place.spec[0], head != "float32"

    def of_device(x: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
        if is_summed_at_once:
            x, w = _gathered(x, w, axis)
        return jax.lax.psum(_sum_of_losses(x, labels, w), axis)

    total = jax.shard_map(
        of_device,
        mesh=place.mesh,
        in_specs=(P(axis), P(axis), P(axis) if is_summed_at_once else P()),
        out_specs=P(),
        check_vma=False,
    )(x.reshape(-1, x.shape[-1]).astype("float32"), targets.reshape(-1), kernel.astype(head))
    return WeightedLoss(total, jnp.asarray(targets.size, total.dtype))


blocked_loss_of_narrow_head = partial(blocked_loss, head="bfloat16")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered(x: jax.Array, w: jax.Array, axis: Any) -> Pair:
    """`x`, which has no gradient before that of all of `w` is summed, and all of `w`."""
    return x, jax.lax.all_gather(w, axis, tiled=True)


def _gathered_forward(x: jax.Array, w: jax.Array, axis: Any) -> tuple[Pair, None]:
    return _gathered(x, w, axis), None


def _gathered_backward(axis: Any, _: None, gradients: Pair) -> Pair:
    of_x, of_w = gradients
    of_w = jax.lax.psum_scatter(of_w, axis, tiled=True)
    return of_x + 0 * jnp.max(of_w).astype(of_x.dtype), of_w


_gathered.defvjp(_gathered_forward, _gathered_backward)


@jax.custom_vjp
def _sum_of_losses(x: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
    return _forward(x, labels, w)[0]


def _forward(x: jax.Array, labels: jax.Array, w: jax.Array) -> tuple[jax.Array, Kept]:
    padded = _padded(w)

    def of_tokens(total: jax.Array, block: Pair) -> Pair:
        tokens, wanted = block

        def of_words(place: jax.Array, seen: Pair) -> Pair:
            normaliser, chosen = seen
            logits, hits = _logits(tokens, wanted, padded, place)
            normaliser = jnp.logaddexp(normaliser, jax.nn.logsumexp(logits, axis=-1))
            return normaliser, chosen + jnp.sum(logits * hits, axis=-1)

        nothing = (jnp.full(TOKENS, -jnp.inf), jnp.zeros(TOKENS))
        normaliser, chosen = jax.lax.fori_loop(0, _blocks(padded), of_words, nothing)
        return total + jnp.sum(normaliser - chosen), normaliser

    total, normalisers = jax.lax.scan(of_tokens, jnp.zeros(()), (_cut(x), _cut(labels)))
    return total, (x, labels, w, normalisers)


def _backward(kept: Kept, slope: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    x, labels, w, normalisers = kept
    padded = _padded(w)

    def of_tokens(of_w: jax.Array, block: tuple[jax.Array, ...]) -> Pair:
        tokens, wanted, normaliser = block

        def of_words(place: jax.Array, sums: Pair) -> Pair:
            of_x, of_w = sums
            logits, hits = _logits(tokens, wanted, padded, place)
            error = jnp.exp(logits - normaliser[:, None]) - hits
            words = _words(padded, place)
            moved = _words(of_w, place) + tokens.T @ error
            of_w = jax.lax.dynamic_update_slice(of_w, moved, (0, place * WORDS))
            return of_x + error @ words.T, of_w

        of_x, of_w = jax.lax.fori_loop(0, _blocks(padded), of_words, (jnp.zeros_like(tokens), of_w))
        return of_w, of_x

    blocks = (_cut(x), _cut(labels), normalisers)
    of_w, of_x = jax.lax.scan(of_tokens, jnp.zeros(padded.shape), blocks)
    of_w = (of_w[:, : w.shape[1]] * slope).astype(w.dtype)
    return of_x.reshape(x.shape) * slope, None, of_w


_sum_of_losses.defvjp(_forward, _backward)


def _logits(tokens: jax.Array, wanted: jax.Array, w: jax.Array, place: jax.Array) -> Pair:
    """Logits of a block of words, and which of them are the wanted ones."""
    hits = jax.nn.one_hot(wanted - place * WORDS, WORDS, dtype=tokens.dtype)
    return tokens @ _words(w, place), hits


def _words(w: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice(w, (0, place * WORDS), (w.shape[0], WORDS))


def _cut(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, TOKENS, *leaf.shape[1:])


def _padded(w: jax.Array) -> jax.Array:
    return jnp.pad(w, ((0, 0), (0, -w.shape[1] % WORDS)))


def _blocks(w: jax.Array) -> int:
    return w.shape[1] // WORDS
