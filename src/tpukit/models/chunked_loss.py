"""Next-token loss straight from activations, a chunk of tokens at a time: no array of all logits.

The loss is a sum over tokens, so a chunk's gradients are known as soon as its logits are. They are
computed with the loss, which leaves the backward pass only a factor to apply: the same matrix
products as for whole logits, and nothing is computed twice.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..parallel.activations import activation_sharding
from ..parallel.manual_axes import axes_of
from ..parallel.mesh import axis_sizes
from .loss import WeightedLoss, next_token_loss

LossChunks: TypeAlias = int | Literal["auto"] | None

# "auto" cuts the loss only where one device's logits would be larger than this ...
LOGITS_BYTES = 512 * 2**20
# ... and not into fewer tokens than this: every chunk reads and writes the gradient of the head
# once, in float32, which takes longer than its matrix product when fewer tokens share it (v6e:
# 918 TFLOP/s over 1.6 TB/s, times 8 bytes over 2 FLOPs a token, is 2300 tokens; others need less).
MIN_TOKENS = 2048


class TokenSplit(NamedTuple):
    """How one device's share of logits (batch, sequence, vocabulary) comes about."""

    sharding: NamedSharding | None

    @classmethod
    def of(cls, logits: tuple[int, ...]) -> "TokenSplit":
        """The split that the strategy in force gives logits of this shape."""
        return cls(activation_sharding(logits, "batch", "sequence", "vocab"))

    def axes(self, dimension: int) -> tuple[str, ...]:
        """The mesh axes that split a dimension of the logits."""
        if self.sharding is None:
            return ()
        return axes_of(PartitionSpec((*self.sharding.spec, None, None, None)[dimension]))

    def ways(self, dimension: int) -> int:
        """Into how many pieces a dimension of the logits is split."""
        if self.sharding is None:
            return 1
        sizes = axis_sizes(self.sharding.mesh)
        return math.prod(sizes[axis] for axis in self.axes(dimension))

    def place(self, x: jax.Array, *, groups: int, vocab: int | None = None) -> jax.Array:
        """Put `x` where the split says, given which of its dimensions are groups and vocabulary."""
        if self.sharding is None:
            return x
        entries: list[Any] = [None] * x.ndim
        entries[groups] = (*self.axes(0), *self.axes(1)) or None
        if vocab is not None:
            entries[vocab] = self.axes(2) or None
        place = NamedSharding(self.sharding.mesh, PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(x, place)


def count_chunks(
    wanted: LossChunks, logits: tuple[int, ...], *, itemsize: int, split: TokenSplit
) -> int:
    """Into how many chunks a device's tokens are cut; 1 is not at all."""
    if wanted != "auto":
        return wanted or 1
    batch, length, vocab = (size // split.ways(place) for place, size in enumerate(logits))
    tokens = batch * length
    fewest = math.ceil(tokens * vocab * itemsize / LOGITS_BYTES)
    most = max(1, tokens // MIN_TOKENS)
    if fewest >= most:
        return most
    # A number that divides the tokens needs no padding.
    return next((n for n in range(fewest, most) if tokens % n == 0), fewest)


def chunked_next_token_loss(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    chunks: LossChunks = "auto",
    z_loss: float = 0.0,
) -> WeightedLoss:
    """`next_token_loss(x @ kernel, targets)` that never holds all logits.

    Every device cuts its own tokens, so nothing moves between devices that would not for whole
    logits, and the head's gradient is summed over devices once, not once a chunk.

    Args:
        x: (B, S, d) normed activations.
        kernel: (d, V) the unembedding, in the dtype logits are computed in.
        targets: (B, S) the token that comes next; negative takes the place out of the loss.
        chunks: Pieces to cut each device's tokens into. "auto" keeps one device's logits of a
            chunk below 512 MiB, but chunks at 2048 tokens or more; None is one piece.
        z_loss: See `next_token_loss`.
    """
    batch, length = x.shape[:2]
    vocab = kernel.shape[-1]
    split = TokenSplit.of((batch, length, vocab))
    count = count_chunks(
        chunks, (batch, length, vocab), itemsize=kernel.dtype.itemsize, split=split
    )
    rows, columns = split.ways(0), split.ways(1)
    groups = rows * columns

    def cut(leaf: jax.Array, fill: int) -> jax.Array:
        rest = leaf.shape[2:]
        leaf = leaf.reshape(rows, batch // rows, columns, length // columns, *rest)
        leaf = leaf.swapaxes(1, 2).reshape(groups, -1, *rest)
        missing = -leaf.shape[1] % count
        if missing:
            room = ((0, 0), (0, missing), *((0, 0) for _ in rest))
            leaf = jnp.pad(leaf, room, constant_values=fill)
        leaf = split.place(leaf, groups=0).reshape(groups, count, -1, *rest)
        return split.place(leaf.swapaxes(0, 1), groups=1)

    total: jax.Array = _total(cut(x, 0), kernel, cut(targets, -1), split, z_loss)
    return WeightedLoss(total, jnp.sum(targets >= 0, dtype=total.dtype))


# Shapes below: n chunks, g groups (devices that split tokens), c tokens, width d, vocabulary v.


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _total(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, split: TokenSplit, z_loss: float
) -> jax.Array:
    """The sum of losses of (n, g, c, d) activations, a (d, v) head and (n, g, c) targets."""
    copies = _copies(kernel, x.shape[1], split)

    def one_chunk(_: None, piece: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, _chunk_losses(_logits(piece[0], copies, split), piece[1], z_loss)

    _, totals = jax.lax.scan(one_chunk, None, (x, targets))
    return totals.sum()


def _total_and_gradients(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, split: TokenSplit, z_loss: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    copies = _copies(kernel, x.shape[1], split)
    precise = jnp.promote_types(kernel.dtype, jnp.float32)

    def one_chunk(
        d_copies: jax.Array, piece: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, targets = piece
        logits = _logits(x, copies, split)
        totals, pull = jax.vjp(lambda logits: _chunk_losses(logits, targets, z_loss), logits)
        (d_logits,) = pull(jnp.ones_like(totals))
        d_logits = split.place(d_logits, groups=0, vocab=2)
        d_x = split.place(jnp.einsum("gcv,gdv->gcd", d_logits, copies), groups=0)
        more = jnp.einsum("gcd,gcv->gdv", x, d_logits, preferred_element_type=precise)
        return split.place(d_copies + more, groups=0, vocab=2), (totals, d_x)

    nothing = split.place(jnp.zeros_like(copies, dtype=precise), groups=0, vocab=2)
    d_copies, (totals, d_x) = jax.lax.scan(one_chunk, nothing, (x, targets))
    # Summed over devices in its own type, as every other weight's gradient is.
    none = jnp.zeros((), kernel.dtype)
    d_kernel = jax.lax.reduce(d_copies.astype(kernel.dtype), none, jax.lax.add, (0,))
    # The layers' backward pass waits for this sum, or each device would hold its own, as large
    # as the whole head in float32, until the optimizer asks for it.
    d_x, d_kernel = jax.lax.optimization_barrier((d_x, d_kernel))
    return totals.sum(), (d_x, d_kernel)


def _scale_gradients(
    split: TokenSplit, z_loss: float, gradients: tuple[jax.Array, jax.Array], factor: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    d_x, d_kernel = ((gradient * factor).astype(gradient.dtype) for gradient in gradients)
    return d_x, d_kernel, None


_total.defvjp(_total_and_gradients, _scale_gradients)


def _copies(kernel: jax.Array, groups: int, split: TokenSplit) -> jax.Array:
    """A copy of the head for every group: gathered once, and gradients that stay where they are."""
    copies = jnp.broadcast_to(kernel, (groups, *kernel.shape))
    return split.place(copies, groups=0, vocab=2)


def _logits(x: jax.Array, copies: jax.Array, split: TokenSplit) -> jax.Array:
    return split.place(jnp.einsum("gcd,gdv->gcv", x, copies), groups=0, vocab=2)


def _chunk_losses(logits: jax.Array, targets: jax.Array, z_loss: float) -> jax.Array:
    return jax.vmap(lambda *one: next_token_loss(*one, z_loss=z_loss).total)(logits, targets)
