"""Exact attention over a sequence that is split over devices: keys and values travel in a ring.

No device ever holds the whole sequence or a whole score matrix: forward keeps one block of scores
and a running softmax, backward sends keys and values round once more and recomputes the scores.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ...annotations import AnyMesh
from ...errors import ShardingError, TPUValidationError
from ...kernels.ops.flash_attention.chunks import attend_in_chunks
from ...kernels.ops.flash_attention.pallas_tpu import KEPT_NAME, NARROWEST, SHORTEST, can_flash
from ...kernels.ops.flash_attention.sinks import add_sinks, sink_gradient
from ...kernels.registry.dispatch import dispatch
from ...kernels.registry.op import PALLAS_TPU, XLA
from ..mesh.manual_axes import axes_to_take, axis_size, divisors, mesh_in_use, whole_key_heads
from . import kernel as ring_kernel
from . import loop as ring_loop
from . import window as ring_window
from .blocks import Sight
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
    """Attention with the sequence split over the mesh axis `axis`.

    On TPU every device runs our flash kernel on its part, where it is told how the arrays are
    spread and a window reaches no farther than the piece before; else blocks of scores in XLA.

    Args:
        q: (B, S, H, D).
        k: (B, S, K, D), where K divides H: a key head serves H/K query heads.
        v: (B, S, K, Dv).
        mesh: Where `axis` is; None uses the mesh in context, or computes everything here.
        axis: The mesh axis the sequence is split over.
        causal: Whether a token attends only to itself and earlier ones.
        scale: Of the scores; 1/sqrt(D) by default.
        segment_ids: (B, S) ints; tokens attend only to tokens of their own segment.
        window: A token attends only to tokens fewer than `window` positions away. With causal, the
            ring then stops as soon as no device needs an older block.
        chunk: A token attends only to tokens of its own chunk of so many; the ring stops as soon as
            no chunk reaches farther.
        soft_cap: Scores are bent by a tanh to stay within ± this.
        sinks: (H,) scores that join the sum of a row's weights, and nothing else.
        layout: Order of the sequence. "zigzag" evens out causal work over the devices; put tokens,
            positions and targets in that order with `to_zigzag` first.
        block_size: Most queries and keys in one block of scores outside of the kernel.
        batch_axes: Mesh axes that split the batch. None leaves other axes automatic, where no
            kernel can run.
        head_axes: Mesh axes that split the heads, beside `batch_axes`.
        implementation: "pallas_tpu" or "xla"; None takes the kernel on TPU where it can.
        interpret: Run the kernel's meaning without a TPU, slowly.

    Returns:
        (B, S, H, Dv) in the type of `q`; the softmax is computed in float32 (or better).

    Raises:
        ShardingError: Shapes do not fit each other or the mesh, or the kernel asked for cannot.
    """
    check_layout(layout)
    _check_shapes(q, k, v, segment_ids, sinks)
    _check_reach(window, chunk)
    in_use = mesh_in_use(mesh, axis)
    shards = 1 if in_use is None else axis_size(in_use, axis, needed_for="Ring attention")
    check_length(q.shape[1], shards=shards, layout=layout, axis=axis)
    piece, around_the_ring = q.shape[1] // (shards * pieces_a_shard(layout)), shards
    own_chunk = None
    if causal and chunk is not None and piece % chunk == 0:
        # A device has whole chunks, which are sequences of their own: nothing has to travel.
        own_chunk, chunk = chunk, None
        piece, around_the_ring, layout = own_chunk, 1, "contiguous"
    sight = Sight(causal, window, q.shape[-1] ** -0.5 if scale is None else scale, chunk, soft_cap)
    near = window is None or (causal and ring_window.reaches_one_piece(window, piece))
    # Chunks of several pieces each: the kernel has no window that ends with one.
    whole = chunk is None or (causal and window is None and chunk % piece == 0)
    # A kernel gets one device's part: the partitioner cannot split it.
    kernel_can = batch_axes is not None and near and whole and can_flash(q, v, length=piece)
    if implementation == PALLAS_TPU and not kernel_can:
        raise ShardingError(
            "The kernel cannot run this ring attention: it needs batch_axes=, no window or a "
            f"causal one that reaches at most {piece} tokens back, chunks of whole pieces or "
            f"pieces of whole chunks (causal), {SHORTEST} tokens or more in a piece and heads of "
            f"{NARROWEST} or more; leave implementation= out to take blocks of scores instead."
        )
    kernel = ring_kernel if window is None else ring_window
    ring = Ring(axis, around_the_ring, layout, piece, _block(piece, block_size), sight)

    def attend(
        q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None
    ) -> Array:
        def part(*arrays: Array | None) -> Array:
            return _attend(
                {PALLAS_TPU: kernel.forward, XLA: ring_loop.forward},
                {PALLAS_TPU: kernel.backward, XLA: ring_loop.backward},
                arrays,
                sinks,
                implementation=implementation,
                on_tpu=PALLAS_TPU if kernel_can else XLA,
                on_gpu=XLA,
                elsewhere=XLA,
                options={"ring": ring},
                pallas_options={"interpret": interpret},
            )

        return attend_in_chunks(part, q, k, v, segment_ids, chunk=own_chunk)

    if in_use is None or (shards == 1 and batch_axes is None):
        return attend(q, k, v, segment_ids, sinks)
    if batch_axes is None:
        rows = P(None, axis)

        def local(
            q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None
        ) -> Array:
            # Every device has a share of their gradient; of what varies jax adds up the shares.
            sinks = None if sinks is None else jax.lax.pcast(sinks, axis, to="varying")
            return attend(q, k, v, segment_ids, sinks)

        mapped = jax.shard_map(
            local, mesh=in_use, in_specs=(*(rows,) * 4, P()), out_specs=rows, axis_names={axis}
        )
        return mapped(q, k, v, segment_ids, sinks)
    k, v = whole_key_heads(q, k, v, mesh=in_use, axes=head_axes)
    rows = P(batch_axes or None, axis)
    spread = P(*rows, head_axes or None)
    around, free = axes_to_take(in_use)
    mapped = jax.shard_map(
        attend,
        mesh=around,
        in_specs=(*(spread,) * 3, rows, P(head_axes or None)),
        out_specs=spread,
        axis_names=free,
        check_vma=False,
    )
    return mapped(q, k, v, segment_ids, sinks)


def _attend(
    forward: Mapping[str, Callable[..., Any]],
    backward: Mapping[str, Callable[..., Any]],
    arrays: tuple[Any, ...],
    sinks: Array | None,
    **choice: Any,
) -> Array:
    """One device's part, with its gradient; each pass is chosen by the platform.

    What a remat policy may keep is named outside of that choice: offloaded from inside of it, the
    stack of all layers would stay in HBM and be written by the host.
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
    """The largest divisor of `piece` that is at most `most`: blocks never straddle two pieces."""
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
            "they need one id a token."
        )
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ShardingError(
            f"sinks are {sinks.shape} for {q.shape[2]} query heads; they need one score a head."
        )


def _check_reach(window: int | None, chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise TPUValidationError(
            f"chunk={chunk} has no room for a token; use 1 or more, or None for no chunks."
        )
    if window is not None and window < 1:
        raise TPUValidationError(
            f"window={window} hides even the token itself; use 1 or more, or None for no window."
        )
