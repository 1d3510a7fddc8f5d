"""Linear attention over a sequence that is sharded over devices: states move, tokens stay.

The effect of a piece of the sequence on a state S is affine: after it the state is N + M S, and its
results are O + R S. One call finds all four: the columns of an identity, to which no token writes,
are appended to those of a zero state. Devices exchange N and M, each computes the states before its
pieces, and adds R S to their results.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh
from ...errors import ShardingError
from ...kernels import gated_delta, short_convolution
from ...kernels.partition.sharded_call import sharded_call
from ..mesh.manual_axes import axis_size, mesh_in_use
from ..mesh.mesh import axis_sizes
from .order import RingLayout, check_layout, check_length, pieces_a_shard, zigzag_order


def context_gated_delta(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    mesh: AnyMesh | None = None,
    axis: str = "context",
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    chunk: int = 64,
    layout: RingLayout = "contiguous",
    batch_axes: tuple[str, ...] | None = None,
    head_axes: tuple[str, ...] = (),
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Return `gated_delta` with the sequence sharded over the mesh axis `axis`.

    Args:
        q: (B, S, HK, DK).
        k: (B, S, HK, DK).
        v: (B, S, HV, DV).
        g: (B, S, HV).
        beta: (B, S, HV).
        mesh: Mesh with `axis`; None uses the mesh in context, or computes everything here.
        axis: The mesh axis that shards the sequence.
        initial_state: (B, HV, DK, DV) before the first token.
        segment_ids: (B, S) document numbers of packed sequences.
        chunk: Tokens that are computed together.
        layout: Order of the sequence, as for `ring_attention`.
        batch_axes: Mesh axes that shard the batch. None leaves other axes automatic, where no
            kernel can run.
        head_axes: Mesh axes that shard the heads, beside `batch_axes`.
        implementation: As for `gated_delta`.

    Returns:
        The result (B, S, HV, DV), and the state after the last token, on every device.

    Raises:
        ShardingError: The sequence does not divide evenly.
        MeshError: The mesh has no such axis.
        TPUKernelError: Shapes do not match.
    """
    options: dict[str, Any] = {"chunk": chunk, "implementation": implementation}
    in_use, pieces = _pieces(q.shape[1], mesh, axis, layout)
    if in_use is None or pieces.shards == 1:
        options |= {"initial_state": initial_state, "segment_ids": segment_ids}
        return gated_delta(q, k, v, g, beta, **options)

    def attend(
        *arrays: Array, ids: Array | None = None, state: Array | None = None
    ) -> tuple[Array, Array]:
        q, k, v, g, beta = (pieces.apart(x) for x in arrays)
        ids = None if ids is None else pieces.apart(ids)
        wide, width = v.shape[-1], k.shape[-1]
        nothing = jnp.zeros((*v.shape[:-1], width), v.dtype)
        precise = jnp.promote_types(v.dtype, jnp.float32)
        beginning = jnp.eye(width, wide + width, wide, dtype=precise)
        out, behind = gated_delta(
            *(q, k, jnp.concatenate([v, nothing], axis=-1), g, beta),
            initial_state=jnp.broadcast_to(beginning, (v.shape[0], v.shape[2], *beginning.shape)),
            segment_ids=ids,
            **options,
        )
        pieces_behind = pieces.every(behind)
        first = jnp.zeros_like(pieces_behind[0, ..., :wide]) if state is None else state
        before, last = _pass_on(first.astype(behind.dtype), pieces_behind, pieces.goes_on(ids))
        exact = None if q.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
        from_before = jnp.einsum(
            "bshd,bhde->bshe", out[..., wide:], pieces.ours(before), precision=exact
        )
        return pieces.together((out[..., :wide] + from_before).astype(out.dtype)), last

    if k.shape[2] % math.prod(axis_sizes(in_use)[name] for name in head_axes):
        q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    rows = P(batch_axes or None, axis)
    heads, states = P(*rows, head_axes or None), P(batch_axes or None, head_axes or None)
    mapped = sharded_call(
        lambda *arrays: attend(*arrays[:5], ids=arrays[5], state=arrays[6]),
        in_use,
        axes={axis} if batch_axes is None else None,
        in_specs=(*(heads,) * 5, rows, states),
        out_specs=(heads, states),
    )
    return mapped(q, k, v, g, beta, segment_ids, initial_state)


def context_short_convolution(
    x: Array,
    weight: Array,
    *,
    mesh: AnyMesh | None = None,
    axis: str = "context",
    segment_ids: Array | None = None,
    activation: str | None = "silu",
    layout: RingLayout = "contiguous",
    batch_axes: tuple[str, ...] | None = None,
    channel_axes: tuple[str, ...] = (),
) -> Array:
    """Return `short_convolution` with the sequence sharded over `axis`, without states.

    Raises:
        ShardingError: The sequence does not divide evenly, or pieces are shorter than the filter.
        MeshError: The mesh has no such axis.
        TPUKernelError: Shapes do not match.
    """
    in_use, pieces = _pieces(x.shape[1], mesh, axis, layout)
    if in_use is None or pieces.shards == 1:
        return short_convolution(x, weight, segment_ids=segment_ids, activation=activation)[0]
    reach = weight.shape[-1] - 1
    piece = x.shape[1] // pieces.count
    if piece < reach:
        raise ShardingError(
            f"A filter of {reach + 1} tokens extends beyond the piece before, of {piece} tokens; "
            f"shard the sequence over fewer devices than '{axis}'={pieces.shards}."
        )

    def convolve(x: Array, weight: Array, ids: Array | None) -> Array:
        x = pieces.apart(x)
        ids = None if ids is None else pieces.apart(ids)
        # The tokens that the next piece needs: the last ones, of the last document only.
        tail = None if ids is None else ids[:, -reach:]
        _, left = short_convolution(x[:, -reach:], weight, segment_ids=tail)
        before = jnp.roll(pieces.every(left), 1, axis=0)
        before = jnp.where(pieces.goes_on(ids)[..., None, None], before, 0).at[0].set(0)
        out, _ = short_convolution(
            x, weight, initial_state=pieces.ours(before), segment_ids=ids, activation=activation
        )
        return pieces.together(out)

    rows = P(batch_axes or None, axis)
    spread = P(*rows, channel_axes or None)
    mapped = sharded_call(
        convolve,
        in_use,
        axes={axis} if batch_axes is None else None,
        in_specs=(spread, P(channel_axes or None), rows),
        out_specs=spread,
    )
    return mapped(x, weight, segment_ids)


@dataclass(frozen=True)
class Pieces:
    """The runs of consecutive tokens on the devices of an axis, `count` in all.

    `apart` puts the pieces of one device along its batch: (pieces · B, tokens, …).
    """

    axis: str
    shards: int
    layout: RingLayout

    @property
    def here(self) -> int:
        """Pieces per device."""
        return pieces_a_shard(self.layout)

    @property
    def count(self) -> int:
        """Number of all pieces."""
        return self.shards * self.here

    def apart(self, x: Array) -> Array:
        """Reshape this device's (B, S, …) to (pieces · B, S / pieces, …)."""
        x = x.reshape(x.shape[0], self.here, -1, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:])

    def together(self, x: Array) -> Array:
        """Undo `apart`."""
        x = x.reshape(self.here, -1, *x.shape[1:])
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def every(self, x: Array) -> Array:
        """Gather (pieces · B, …) of each device as (count, B, …), in the order of the sequence."""
        everyone = lax.all_gather(x.reshape(self.here, -1, *x.shape[1:]), self.axis)
        flat = everyone.reshape(self.count, *everyone.shape[2:])
        return flat[np.argsort(self._numbers())]

    def ours(self, x: Array) -> Array:
        """Return this device's (pieces · B, …) of a result of `every`."""
        numbers = jnp.asarray(self._numbers().reshape(self.shards, self.here))
        return x[numbers[lax.axis_index(self.axis)]].reshape(-1, *x.shape[2:])

    def goes_on(self, ids: Array | None) -> Array:
        """Return (count, B or 1): whether a piece continues the document of the piece before."""
        if ids is None:
            return jnp.ones((self.count, 1), bool)
        first, last = self.every(ids[:, 0]), self.every(ids[:, -1])
        return (first == jnp.roll(last, 1, axis=0)).at[0].set(True)

    def _numbers(self) -> np.ndarray:
        """Return the piece numbers of all devices, flat."""
        if self.layout == "zigzag":
            return zigzag_order(self.count, self.shards)
        return np.arange(self.count)


def _pass_on(first: Array, behind: Array, goes_on: Array) -> tuple[Array, Array]:
    """Return the state before each piece, (count, B, HV, DK, DV), and that after the last."""
    wide = first.shape[-1]

    def piece(state: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        behind, goes_on = x
        state = jnp.where(goes_on[:, None, None, None], state, 0)
        kept = jnp.matmul(behind[..., wide:], state, precision=lax.Precision.HIGHEST)
        return behind[..., :wide] + kept, state

    last, before = lax.scan(piece, first, (behind, goes_on))
    return before, last


def _pieces(
    length: int, mesh: AnyMesh | None, axis: str, layout: RingLayout
) -> tuple[AnyMesh | None, Pieces]:
    check_layout(layout)
    in_use = mesh_in_use(mesh, axis)
    shards = 1 if in_use is None else axis_size(in_use, axis, needed_for="Linear attention")
    check_length(length, shards=shards, layout=layout, axis=axis)
    return in_use, Pieces(axis, shards, layout)
