"""Next-token cross-entropy with masked labels and an optional z-loss, from logits or in chunks.

The chunked loss takes activations, a chunk of tokens at a time, so that all logits never exist at
once. It uses the chunked cross-entropy of the kernels room; here every device of a mesh splits its
own tokens into chunks.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import TPUModelError
from ..kernels.ops.cross_entropy.chunked import LOGITS_BYTES as LOGITS_BYTES
from ..kernels.ops.cross_entropy.chunked import MIN_TOKENS as MIN_TOKENS
from ..kernels.ops.cross_entropy.chunked import chunk_count, weighted_total
from ..kernels.ops.cross_entropy.terms import LossTerms
from ..parallel.mesh.manual_axes import axes_of
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.sharding.activations import activation_sharding

Batch = Mapping[str, jax.Array]


class WeightedLoss(NamedTuple):
    """A sum of losses and a sum of their weights; the loss is `total / weight`.

    Separate sums make a step with micro-batches equal to one without, even where micro-batches
    have different numbers of unmasked tokens.
    """

    total: jax.Array
    weight: jax.Array


# (outputs of the model, batch) -> a mean loss, or a sum and its weight.
LossFunction = Callable[[Any, Batch], "jax.Array | WeightedLoss"]


def next_token_loss(logits: jax.Array, targets: jax.Array, *, z_loss: float = 0.0) -> WeightedLoss:
    """Return the cross-entropy of `logits` (..., V) against `targets` (...).

    Args:
        logits: Any float type; the loss is computed in at least float32.
        targets: The next token; a negative number excludes the position from the loss.
        z_loss: Weight of the squared log of the softmax's normaliser, which keeps logits small.
    """
    losses, _ = LossTerms(z_loss).of_logits(logits, targets)
    counted = (targets >= 0).astype(losses.dtype)
    return WeightedLoss(jnp.sum(losses * counted), jnp.sum(counted))


def token_targets(batch: Batch, shape: tuple[int, ...]) -> jax.Array | None:
    """Return `batch["targets"]` if they are token ids of this shape, else None."""
    targets = batch.get("targets")
    if targets is None or targets.shape != shape:
        return None
    return targets if jnp.issubdtype(targets.dtype, jnp.integer) else None


def default_loss(outputs: Any, batch: Batch, *, z_loss: float = 0.0) -> jax.Array | WeightedLoss:
    """Return a scalar output as the loss, or the next-token loss of logits.

    Raises:
        TPUModelError: The outputs are neither.
    """
    if isinstance(outputs, WeightedLoss):
        return outputs
    if isinstance(outputs, jax.Array):
        if outputs.ndim == 0:
            return outputs
        targets = token_targets(batch, outputs.shape[:-1])
        if targets is not None:
            return next_token_loss(outputs, targets, z_loss=z_loss)
    shapes = jax.tree.map(jnp.shape, outputs)
    raise TPUModelError(
        f"the model returns {shapes}, but without loss= it must return a scalar, or logits for "
        "integer batch['targets']; pass loss=lambda outputs, batch: …"
    )


class HeadLoss(Protocol):
    """A user-defined loss of activations, e.g. a kernel that never holds all logits."""

    def __call__(self, x: jax.Array, kernel: jax.Array, targets: jax.Array) -> WeightedLoss:
        """Return the loss of normed activations, the unembedding and the next tokens."""
        ...


LossChunks: TypeAlias = int | Literal["auto"] | HeadLoss | None


def loss_chunks_text(chunks: LossChunks) -> int | str | None:
    """Return the setting as plain data; a function is represented by its name."""
    return getattr(chunks, "__name__", "a function") if callable(chunks) else chunks


def check_loss_chunks(chunks: LossChunks, *, own_loss: bool) -> None:
    """Check the setting `loss_chunks`.

    Raises:
        TPUModelError: It is no number of chunks, or the loss is not the reference transformer's.
    """
    if chunks is None or chunks == "auto":
        return
    if not callable(chunks) and (type(chunks) is not int or chunks < 1):
        raise TPUModelError(
            f"loss_chunks={chunks!r}; expected 'auto', None, an integer from 1, or a function of "
            "activations, unembedding and targets."
        )
    if chunks != 1 and not own_loss:
        raise TPUModelError(
            f"loss_chunks={loss_chunks_text(chunks)} works with the loss of a reference "
            "transformer, but this workload has another model or a loss=; leave it out, or return "
            "tpukit.models.chunked_next_token_loss(…) from your model."
        )


class TokenSplit(NamedTuple):
    """The sharding of logits (batch, sequence, vocabulary); None on one device."""

    sharding: NamedSharding | None

    @classmethod
    def of(cls, logits: tuple[int, ...]) -> "TokenSplit":
        """Return the sharding of logits of this shape under the current activation rules."""
        return cls(activation_sharding(logits, "batch", "sequence", "vocab"))

    def axes(self, dimension: int) -> tuple[str, ...]:
        """Return the mesh axes that shard a dimension of the logits."""
        if self.sharding is None:
            return ()
        return axes_of(PartitionSpec((*self.sharding.spec, None, None, None)[dimension]))

    def ways(self, dimension: int) -> int:
        """Return the number of shards of a dimension of the logits."""
        if self.sharding is None:
            return 1
        sizes = axis_sizes(self.sharding.mesh)
        return math.prod(sizes[axis] for axis in self.axes(dimension))

    def place(self, x: jax.Array, *, groups: int, vocab: int | None = None) -> jax.Array:
        """Constrain `x`, given which of its dimensions are groups and vocabulary."""
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
    """Return the number of chunks of a device's tokens; 1 means no chunking."""
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
    """Return `next_token_loss(x @ kernel, targets)` without holding all logits.

    Every device splits its own tokens, so no more data moves between devices than for all logits,
    and the gradient of the head is summed over devices once, not once per chunk.

    Args:
        x: (B, S, d) normed activations.
        kernel: (d, V) the unembedding, in the dtype of the logits.
        targets: (B, S) the next token; a negative number excludes the position from the loss.
        chunks: Chunks per device. "auto" keeps one device's logits of a chunk below 512 MiB, but
            chunks at 2048 tokens or more; None is one chunk.
        z_loss: See `next_token_loss`.
        soft_cap: Logits are limited to ± this by a tanh.
        frozen: Whether the kernel is not trained, so that its gradient is not computed.
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
    """Return the arguments; the gradient of `x` depends on the summed gradient of `kernel`.

    Each device has a gradient of the full head. Unless the layers' backward pass waits for the sum,
    of which every device keeps a shard, the full gradients stay in memory until the optimizer runs.
    An optimization barrier would do the same, but published flag sets remove barriers.
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
