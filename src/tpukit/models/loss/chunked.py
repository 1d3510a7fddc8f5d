"""Next-token loss straight from activations, a chunk of tokens at a time: no array of all logits.

The loss itself is the chunked cross-entropy of the kernels room; here every device of a mesh cuts
its own tokens for it.
"""

import math
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import TPUModelError
from ...kernels.ops.cross_entropy.chunked import LOGITS_BYTES as LOGITS_BYTES
from ...kernels.ops.cross_entropy.chunked import MIN_TOKENS as MIN_TOKENS
from ...kernels.ops.cross_entropy.chunked import chunk_count, weighted_total
from ...kernels.ops.cross_entropy.terms import LossTerms
from ...parallel.mesh.manual_axes import axes_of
from ...parallel.mesh.mesh import axis_sizes
from ...parallel.sharding.activations import activation_sharding
from .loss import WeightedLoss


class HeadLoss(Protocol):
    """A loss of one's own from activations, e.g. a kernel that never holds all logits."""

    def __call__(self, x: jax.Array, kernel: jax.Array, targets: jax.Array) -> WeightedLoss:
        """As `chunked_next_token_loss`: normed activations, the unembedding, the next tokens."""
        ...


LossChunks: TypeAlias = int | Literal["auto"] | HeadLoss | None


def loss_chunks_text(chunks: LossChunks) -> int | str | None:
    """The setting as plain data: a function by its name."""
    return getattr(chunks, "__name__", "a function") if callable(chunks) else chunks


def check_loss_chunks(chunks: LossChunks, *, own_loss: bool) -> None:
    """Refuse what is no number of pieces, and a loss that is not the transformer's own.

    Raises:
        TPUModelError: With the way out.
    """
    if chunks is None or chunks == "auto":
        return
    if not callable(chunks) and (type(chunks) is not int or chunks < 1):
        raise TPUModelError(
            f"loss_chunks={chunks!r} is not a number of pieces; use 'auto', None, an integer "
            "from 1 or a function of activations, unembedding and targets."
        )
    if chunks != 1 and not own_loss:
        raise TPUModelError(
            f"loss_chunks={loss_chunks_text(chunks)} cuts the reference transformer's own loss, "
            "and this workload has another model or a loss= that is given whole logits; leave it "
            "out, or call tpukit.models.chunked_next_token_loss in your model and return what it "
            "returns."
        )


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
        """The number of pieces a dimension of the logits is split into."""
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
    wanted: int | Literal["auto"] | None,
    logits: tuple[int, ...],
    *,
    itemsize: int,
    split: TokenSplit,
) -> int:
    """The number of chunks a device's tokens are cut into; 1 is not at all."""
    if wanted != "auto":
        return wanted or 1
    batch, length, vocab = (size // split.ways(place) for place, size in enumerate(logits))
    return chunk_count(batch * length, vocab, itemsize)


def chunked_next_token_loss(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    chunks: int | Literal["auto"] | None = "auto",
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    frozen: bool = False,
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
        soft_cap: Logits are bent by a tanh to stay within ± this.
        frozen: Whether the kernel is not trained: its gradient, which chunks add up as they go, is
            not made.
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

    if split.sharding is not None and not frozen:
        x, kernel = _head_first(x, kernel)
    labels = cut(targets, -1)
    counted = (labels >= 0).astype(jnp.promote_types(kernel.dtype, jnp.float32))
    terms = LossTerms(z_loss, soft_cap)
    result: Any = weighted_total(
        cut(x, 0), kernel, labels, counted, terms, split, kernel.dtype, frozen=frozen
    )
    total = result[0]
    return WeightedLoss(total, jnp.sum(targets >= 0, dtype=total.dtype))


@jax.custom_vjp
def _head_first(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The arguments, `x` of which has a gradient once the gradient of `kernel` is summed.

    Each device has a gradient of the whole head. If the layers' backward pass did not wait for
    the sum of them, of which every device keeps its share, all would lie there until the optimizer
    runs. A barrier says the same, but published sets of flags remove barriers.
    """
    return x, kernel


def _head_first_forward(x: jax.Array, kernel: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return (x, kernel), None


def _head_first_backward(
    _: None, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    d_x, d_kernel = gradients
    return d_x + (0 * d_kernel[0, 0]).astype(d_x.dtype), d_kernel


_head_first.defvjp(_head_first_forward, _head_first_backward)
