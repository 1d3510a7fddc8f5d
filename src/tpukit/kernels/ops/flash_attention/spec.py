"""`AttentionSpec`: which keys a query attends to, and how scores become weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ....errors import TPUKernelError

Positions = TypeVar("Positions", jax.Array, np.ndarray)


@dataclass(frozen=True)
class BlockMask:
    """A static block-sparse pattern: which blocks of the score matrix are computed.

    Attributes:
        blocks: One row per block of queries, one value per block of keys.
        block_size: Tokens of a block, a multiple of 128.
    """

    blocks: tuple[tuple[bool, ...], ...]
    block_size: int

    @classmethod
    def from_array(cls, blocks: ArrayLike, *, block_size: int) -> "BlockMask":
        """Make a mask from a two-dimensional array of booleans that is known while tracing.

        Raises:
            TPUKernelError: The array is traced or not two-dimensional, or the size is not a
                multiple of 128.
        """
        if isinstance(blocks, Tracer):
            raise TPUKernelError(
                "a block mask decides which blocks are computed, so it must be known while "
                "tracing, but it is a traced array; pass a numpy array or a BlockMask."
            )
        array = np.asarray(blocks, dtype=bool)
        if array.ndim != 2 or not array.size:
            raise TPUKernelError(
                f"a block mask has one row of booleans per block of queries, but this one "
                f"has shape {array.shape}; pass (query blocks, key blocks)."
            )
        if block_size < 1 or block_size % 128:
            raise TPUKernelError(
                f"blocks of {block_size} tokens cannot be tiled; use a multiple of 128."
            )
        return cls(tuple(tuple(map(bool, row)) for row in array), block_size)

    def to_array(self) -> np.ndarray:
        """Return the blocks as booleans."""
        return np.array(self.blocks, dtype=bool)

    def allows(self, queries: Positions, keys: Positions) -> Positions:
        """Return booleans: whether the blocks of these queries and keys are computed."""
        array: Any = queries.__array_namespace__()
        blocks = array.asarray(self.to_array())
        return blocks[queries // self.block_size, keys // self.block_size]


class SegmentIds(NamedTuple):
    """Document numbers of packed sequences: (B, q_len) and (B, kv_len)."""

    q: jax.Array
    kv: jax.Array

    @classmethod
    def of(cls, ids: jax.Array | None) -> "SegmentIds | None":
        """Return the ids (B, S) of self-attention for queries and keys alike."""
        return None if ids is None else cls(ids, ids)


STATIC_FIELDS = ("causal", "window", "chunk", "mask", "soft_cap", "scale")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("segment_ids", "sinks"),
    meta_fields=STATIC_FIELDS,
)
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One kind of attention: which keys a query attends to, and how scores become weights.

    A query attends to a key only if every field allows it. Positions of queries and keys both count
    from 0. A spec is a tree whose leaves are its arrays; without arrays it can be hashed.

    Attributes:
        causal: Whether query i attends only to keys j <= i.
        window: Query i attends only to keys j with |i - j| < window.
        chunk: Query i attends to key j only if i // chunk == j // chunk.
        mask: Blocks of scores to compute.
        soft_cap: Scores are limited to ± this by a tanh.
        scale: Factor of the scores; the head width to the power of -0.5 by default.
        segment_ids: Document numbers; a query attends only to keys of its own document.
        sinks: (H,) learned scores that are added to the softmax's denominator only.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    mask: BlockMask | None = None
    soft_cap: float | None = None
    scale: float | None = None
    segment_ids: SegmentIds | None = None
    sinks: jax.Array | None = None

    def with_arrays(self, rows: Any, heads: Any) -> "AttentionSpec":
        """Return a tree of the same structure, with `rows` for each (B, S) and `heads` for (H,)."""
        ids = jax.tree.map(lambda _: rows, self.segment_ids)
        return replace(self, segment_ids=ids, sinks=None if self.sinks is None else heads)

    @property
    def options(self) -> dict[str, Any]:
        """The static fields by name, without those that have their defaults."""
        plain = AttentionSpec()
        given = {name: getattr(self, name) for name in STATIC_FIELDS}
        return {name: value for name, value in given.items() if value != getattr(plain, name)}

    def scale_of(self, width: int) -> float:
        """Return the factor of the scores for heads of this width."""
        return width**-0.5 if self.scale is None else self.scale

    def allows(self, queries: Positions, keys: Positions) -> Positions:
        """Return booleans: whether queries may attend to keys at these positions.

        Both are integers of shapes that broadcast, in numpy or jax. `mask`, which needs indices
        and not positions, and segment ids are not considered.
        """
        distance: Any = queries - keys
        visible: Any = distance >= 0 if self.causal else distance == distance
        if self.window is not None:
            visible = visible & (abs(distance) < self.window)
        if self.chunk is not None:
            visible = visible & (queries // self.chunk == keys // self.chunk)
        return visible

    def allows_any(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Return whether any query of a block may attend to any key; positions ascend in both."""
        visible = jnp.ones((), bool)
        if self.causal:
            visible &= keys[0] <= queries[-1]
        if self.window is not None:
            visible &= queries[0] - keys[-1] < self.window
            visible &= keys[0] - queries[-1] < self.window
        if self.chunk is not None:
            visible &= keys[0] // self.chunk <= queries[-1] // self.chunk
            visible &= queries[0] // self.chunk <= keys[-1] // self.chunk
        return visible

    def cap(self, scores: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return capped scores, and the slope of the cap; None without one."""
        if self.soft_cap is None:
            return scores, None
        bent = jnp.tanh(scores / self.soft_cap)
        return self.soft_cap * bent, 1 - bent * bent

    def by_chunk(
        self,
        attend: Callable[[jax.Array, jax.Array, jax.Array, "AttentionSpec"], jax.Array],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> jax.Array:
        """Compute attention by `attend`, which needs to know no chunks.

        Chunks are independent, so they become examples of their own: attention over shorter
        sequences, in every implementation, that neither computes nor reads anything else.

        Args:
            attend: Attention of q, k and v (B, S, ...) by a spec without chunks.
            q: Queries.
            k: Keys, as many as queries.
            v: Values.
        """
        whole = replace(self, chunk=None)
        batch, length = q.shape[:2]
        if self.chunk is None or self.chunk >= length:
            return attend(q, k, v, whole)
        size = self.chunk
        in_chunks = length // size * size

        def attend_to(part: Callable[[jax.Array], jax.Array]) -> jax.Array:
            own = replace(whole, segment_ids=jax.tree.map(part, self.segment_ids))
            return attend(part(q), part(k), part(v), own)

        out = attend_to(lambda x: x[:, :in_chunks].reshape(-1, size, *x.shape[2:]))
        out = out.reshape(batch, in_chunks, *out.shape[2:])
        if in_chunks == length:
            return out
        rest = attend_to(lambda x: x[:, in_chunks:])
        return jnp.concatenate([out, rest], axis=1)


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of a model's causal self-attention.

    Attributes:
        window: How many keys back a query attends to, itself included; None for all.
        chunk: Query i attends to key j only if i // chunk == j // chunk.
        soft_cap: Scores are limited to ± this by a tanh.
        scale: Scale of the scores; `Dk ** -0.5` by default.
        segment_ids: (B, S) document numbers; tokens attend within their document only.
        sinks: (H,) learned scores that are added to the softmax's denominator only.
    """

    window: int | None
    chunk: int | None
    soft_cap: float | None
    scale: float | None
    segment_ids: jax.Array | None
    sinks: jax.Array | None


def causal_spec(**options: Unpack[AttentionOptions]) -> AttentionSpec:
    """Return the spec of causal self-attention with these options."""
    rest: dict[str, Any] = {name: options[name] for name in options if name != "segment_ids"}
    ids = SegmentIds.of(options.get("segment_ids"))
    return AttentionSpec(causal=True, segment_ids=ids, **rest)
