"""Exact attention over a sequence that is sharded over devices: keys and values move in a ring.

No device ever has the full sequence or a full score matrix: the forward pass keeps one block of
scores and a running softmax, the backward pass sends keys and values round once more and recomputes
the scores.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh
from ...errors import ShardingError, TPUValidationError
from ...kernels.ops.flash_attention.pallas_tpu import KEPT_NAME, NARROWEST, SHORTEST, can_flash
from ...kernels.ops.flash_attention.reference import add_sinks, sink_gradient
from ...kernels.ops.flash_attention.spec import AttentionSpec, SegmentIds
from ...kernels.partition.sharded_call import sharded_call
from ...kernels.registry.dispatch import dispatch
from ...kernels.registry.op import PALLAS_TPU, XLA
from ..mesh.manual_axes import axis_size, divisors, mesh_in_use, whole_key_heads
from . import kernel as ring_kernel
from . import loop as ring_loop
from . import window as ring_window
from .loop import Ring
from .order import RingLayout, check_layout, check_length, pieces_a_shard

OP_NAME = "ring_attention"


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mesh: AnyMesh | None = None,
    axis: str = "context",
    causal: bool = True,
    scale: float | None = None,
    segment_ids: Array | None = None,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    layout: RingLayout = "contiguous",
    block_size: int = 512,
    batch_axes: tuple[str, ...] | None = None,
    head_axes: tuple[str, ...] = (),
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """Return attention with the sequence sharded over the mesh axis `axis`.

    On TPU every device runs the flash kernel on its shard if `batch_axes` is given and a window
    extends no farther than the piece before; else blocks of scores in XLA.

    Args:
        q: (B, S, H, D).
        k: (B, S, K, D), where K divides H: a key head serves H/K query heads.
        v: (B, S, K, Dv).
        mesh: Mesh with `axis`; None uses the mesh in context, or computes everything here.
        axis: The mesh axis that shards the sequence.
        causal: Whether a token attends only to itself and earlier ones.
        scale: Factor of the scores; 1/sqrt(D) by default.
        segment_ids: (B, S) ints; tokens attend only to tokens of their own segment.
        window: A token attends only to tokens fewer than `window` positions away. With causal, the
            ring then stops as soon as no device needs an older block.
        chunk: A token attends only to tokens of its own chunk of this length; the ring stops as
            soon as no chunk extends farther.
        soft_cap: Squeeze scores into ±soft_cap by a tanh.
        sinks: (H,) scores that only join the softmax's sum.
        layout: Order of the sequence. "zigzag" balances causal work over the devices; put tokens,
            positions and targets in that order with `to_zigzag` first.
        block_size: Most queries and keys in one block of scores outside of the kernel.
        batch_axes: Mesh axes that shard the batch. None leaves other axes automatic, where no
            kernel can run.
        head_axes: Mesh axes that shard the heads, beside `batch_axes`.
        implementation: "pallas_tpu" or "xla"; None takes the kernel on TPU where it can.
        interpret: Run the kernel without a TPU, slowly.

    Returns:
        (B, S, H, Dv) in the dtype of `q`; the softmax is computed in float32 (or better).

    Raises:
        ShardingError: Shapes do not match each other or the mesh, or the named kernel cannot run.
    """
    check_layout(layout)
    _check_shapes(q, k, v, segment_ids, sinks)
    _check_reach(window, chunk)
    spec = AttentionSpec(
        causal=causal,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        scale=scale,
        segment_ids=SegmentIds.of(segment_ids),
        sinks=sinks,
    )
    in_use = mesh_in_use(mesh, axis)
    shards = 1 if in_use is None else axis_size(in_use, axis, needed_for="Ring attention")
    check_length(q.shape[1], shards=shards, layout=layout, axis=axis)
    piece, around_the_ring = q.shape[1] // (shards * pieces_a_shard(layout)), shards
    # Where a device has full chunks, which are independent sequences, nothing has to move.
    own_chunk = chunk if causal and chunk is not None and piece % chunk == 0 else None
    if own_chunk is not None:
        piece, around_the_ring, layout, chunk = own_chunk, 1, "contiguous", None
    near = window is None or (causal and ring_window.reaches_one_piece(window, piece))
    # Chunks of several pieces each: the kernel has no window that ends with one.
    chunks_fit = chunk is None or (causal and window is None and chunk % piece == 0)
    # A kernel gets one device's part, because it cannot be partitioned.
    kernel_can = batch_axes is not None and near and chunks_fit and can_flash(q, v, length=piece)
    if implementation == PALLAS_TPU and not kernel_can:
        raise ShardingError(
            "The kernel cannot run this ring attention: it needs batch_axes=, no window or a "
            f"causal one of at most {piece} tokens back, chunks of full pieces or "
            f"pieces of full chunks (causal), {SHORTEST} tokens or more in a piece and heads of "
            f"{NARROWEST} or more; leave implementation= out to take blocks of scores instead."
        )
    kernel = ring_kernel if window is None else ring_window
    around = replace(spec, chunk=chunk, segment_ids=None, sinks=None)
    ring = Ring(axis, around_the_ring, layout, piece, _block(piece, block_size), around)

    def part(q: Array, k: Array, v: Array, spec: AttentionSpec) -> Array:
        ids = None if spec.segment_ids is None else spec.segment_ids.q
        return _attend(
            {PALLAS_TPU: kernel.forward, XLA: ring_loop.forward},
            {PALLAS_TPU: kernel.backward, XLA: ring_loop.backward},
            (q, k, v, ids),
            spec.sinks,
            implementation=implementation,
            on_tpu=PALLAS_TPU if kernel_can else XLA,
            on_gpu=XLA,
            elsewhere=XLA,
            options={"ring": ring},
            pallas_options={"interpret": interpret},
        )

    def attend(q: Array, k: Array, v: Array, spec: AttentionSpec) -> Array:
        return spec.by_chunk(part, q, k, v) if own_chunk is not None else part(q, k, v, spec)

    if in_use is None or (shards == 1 and batch_axes is None):
        return attend(q, k, v, spec)
    if batch_axes is None:
        rows = P(None, axis)

        def local(q: Array, k: Array, v: Array, spec: AttentionSpec) -> Array:
            # Every device has a share of their gradient; jax sums the shares of varying values.
            varying = partial(jax.lax.pcast, axis_name=axis, to="varying")
            return attend(q, k, v, replace(spec, sinks=jax.tree.map(varying, spec.sinks)))

        in_specs = (rows, rows, rows, spec.with_arrays(rows, P()))
        mapped = sharded_call(
            local, in_use, in_specs=in_specs, out_specs=rows, axes={axis}, checks_varying=True
        )
        return mapped(q, k, v, spec)
    k, v = whole_key_heads(q, k, v, mesh=in_use, axes=head_axes)
    rows = P(batch_axes or None, axis)
    spread = P(*rows, head_axes or None)
    in_specs = (spread, spread, spread, spec.with_arrays(rows, P(head_axes or None)))
    mapped = sharded_call(attend, in_use, in_specs=in_specs, out_specs=spread)
    return mapped(q, k, v, spec)


def _attend(
    forward: Mapping[str, Callable[..., Any]],
    backward: Mapping[str, Callable[..., Any]],
    arrays: tuple[Any, ...],
    sinks: Array | None,
    **choice: Any,
) -> Array:
    """Compute one device's part, with its gradient; each pass is chosen by the platform.

    Results get their names for remat policies after that choice. A result that is named and
    offloaded inside of it would keep the stack of all layers in HBM.
    """

    def attend(arrays: tuple[Any, ...], sinks: Array | None) -> tuple[Array, Array]:
        out, sums = dispatch(OP_NAME, forward, *arrays, **choice)
        return (out, sums) if sinks is None else add_sinks(out, sums, sinks)

    @jax.custom_vjp
    def call(arrays: tuple[Any, ...], sinks: Array | None) -> Array:
        return attend(arrays, sinks)[0]

    def keep(
        arrays: tuple[Any, ...], sinks: Array | None
    ) -> tuple[Array, tuple[ring_loop.Saved, Array | None]]:
        out, sums = (checkpoint_name(x, KEPT_NAME) for x in attend(arrays, sinks))
        return out, ((*arrays, out, sums), sinks)

    def pull(
        kept: tuple[ring_loop.Saved, Array | None], d_out: Array
    ) -> tuple[tuple[Any, ...], Array | None]:
        saved, sinks = kept
        of_arrays = *dispatch(OP_NAME, backward, saved, d_out, **choice), None
        if sinks is None:
            return of_arrays, None
        *_, out, sums = saved
        dots = (out.astype(sums.dtype) * d_out.astype(sums.dtype)).sum(-1)
        return of_arrays, sink_gradient(sinks, sums, dots)

    call.defvjp(keep, pull)
    return call(arrays, sinks)


def _block(piece: int, most: int) -> int:
    """Return the largest divisor of `piece` up to `most`, so that blocks never span two pieces."""
    return max(size for size in divisors(piece) if size <= most)


def _check_shapes(
    q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None
) -> None:
    together = k.shape[:3] == v.shape[:3] and k.shape[:2] == q.shape[:2]
    if q.ndim != 4 or not together or k.shape[3] != q.shape[3]:
        raise ShardingError(
            f"Ring attention got q {q.shape}, k {k.shape}, v {v.shape}; it needs q (B, S, H, D), "
            "k (B, S, K, D) and v (B, S, K, Dv)."
        )
    if q.shape[2] % k.shape[2]:
        raise ShardingError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly; "
            "the number of key heads must divide the number of query heads."
        )
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ShardingError(
            f"segment_ids are {segment_ids.shape} for a batch of {q.shape[:2]}; "
            "they need one id per token."
        )
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ShardingError(
            f"sinks are {sinks.shape} for {q.shape[2]} query heads; they need one score per head."
        )


def _check_reach(window: int | None, chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise TPUValidationError(f"chunk={chunk} must be at least 1; None means no chunks.")
    if window is not None and window < 1:
        raise TPUValidationError(
            f"window={window} must be at least 1, the token itself; None means no window."
        )
