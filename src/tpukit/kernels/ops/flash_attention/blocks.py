"""VMEM of blocks, and which blocks are tried, tuned or taken by default."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...blocks.tiling import round_up, word_sublanes
from ...blocks.vmem import vmem_capacity_bytes
from ...registry.op import KernelCase
from .problem import LANES, FlashBlocks, Problem
from .spec import STATIC_FIELDS, AttentionSpec
from .visibility import Visibility

# From static timing of causal bfloat16 heads of 128 (benchmarks/attention_rivals.py): large blocks
# of queries save the MXU reloads of keys.
PREFERRED = FlashBlocks(
    block_q=2048,
    block_kv=8192,
    block_kv_compute=256,
    backward_q=8192,
    backward_q_compute=512,
    backward_kv=1024,
)
# From the same timing without a causal diagonal: larger tiles of scores, and with a symmetric
# window fewer queries, which share less of it.
PREFERRED_WITHOUT_STAIRS = dataclasses.replace(PREFERRED, block_kv_compute=512)
PREFERRED_IN_WINDOWS = dataclasses.replace(PREFERRED_WITHOUT_STAIRS, block_q=1024)
# Heads of 512 on 7x take 13.1 ms with tiles of 128 keys, and 4.4 ms with fewer keys in VMEM
# instead.
_HELD, SHORTEST_HELD = ("block_kv", "backward_q"), 2048
# Without a generation: small enough for the 16 MiB of the oldest.
SAFE = FlashBlocks()


def problem_of(case: KernelCase) -> Problem:
    """Return the problem of a case."""
    given = {name: case.options[name] for name in STATIC_FIELDS if name in case.options}
    q, k, v = case.arguments[:3]
    mask_rows: int = case.options.get("mask_rows", 0)
    return make_problem(q, k, v, AttentionSpec(**given), mask_rows=mask_rows)


def make_problem(q: Any, k: Any, v: Any, spec: AttentionSpec, *, mask_rows: int = 0) -> Problem:
    """Return the static part of a call with q (B, S, H, D), k (B, S, KV, D), v (B, S, KV, Dv)."""
    return Problem(
        visibility=Visibility(q.shape[1], k.shape[1], spec),
        scale=spec.scale_of(q.shape[3]),
        heads=q.shape[2],
        kv_heads=k.shape[2],
        width=q.shape[3],
        v_width=v.shape[3],
        dtype=jnp.dtype(q.dtype),
        mask_rows=mask_rows,
    )


def case_of(
    q: Any, k: Any, v: Any, rope: Any, dense_mask: Any, options: Mapping[str, Any]
) -> KernelCase:
    """Return the case of a call."""
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    read = {"rope": rope is not None, "mask_rows": 0 if dense_mask is None else dense_mask.shape[2]}
    return KernelCase("call", shapes, {**options, **read})


def bucket(case: KernelCase) -> str:
    """Return the bucket: dtype, head width, lengths as powers of two, and the mask."""
    problem = problem_of(case)
    visibility = problem.visibility
    lengths = [1 << (max(n, LANES) - 1).bit_length() for n in (visibility.q_len, visibility.kv_len)]
    kind = "full" if not visibility.causal else "causal"
    if visibility.window is not None:
        kind = (
            f"full_window{visibility.window}"
            if visibility.symmetric
            else f"window{visibility.window}"
        )
    masked = f"_blocks{visibility.mask.block_size}" if visibility.mask else ""
    masked = "_mask" if problem.mask_rows > 1 else masked
    name = problem.dtype.name
    width, v_width = problem.padded_width, problem.padded_v_width
    widths = f"d{width}" if width == v_width else f"d{width}v{v_width}"
    return f"{name}_{kind}{masked}_q{lengths[0]}_kv{lengths[1]}_{widths}"


def vmem_bytes(case: KernelCase, blocks: FlashBlocks) -> int:
    """Return the VMEM of the larger kernel; the backward one limits its keys to what fits."""
    problem = problem_of(case)
    rope = bool(case.options.get("rope"))
    return max(forward_bytes(problem, blocks, rope=rope), backward_bytes(problem, blocks, keys=0))


def forward_bytes(problem: Problem, blocks: FlashBlocks, *, rope: bool = False) -> int:
    """Return the VMEM of the forward kernel: windows twice, scratch, and two blocks of scores."""
    blocks = blocks.cut_to(problem.visibility)
    width, v_width, item = problem.padded_width, problem.padded_v_width, problem.dtype.itemsize
    rows, held = blocks.block_q, blocks.block_kv
    windows = 2 * ((rows + held) * (width + v_width) * item + word_sublanes() * rows * 4)
    scratch = rows * (width * item + v_width * 4) + 3 * rows * LANES * 4
    if rope:
        windows += 2 * 2 * (rows + held) * width * 4
        scratch += held * width * item
    scores = 2 * rows * blocks.block_kv_compute * 4
    if problem.mask_rows > 1:
        windows += 2 * rows * held
        scores += rows * blocks.block_kv_compute * 4
    elif problem.mask_rows:
        windows += 2 * word_sublanes() * held * 4
    return windows + scratch + scores


def backward_bytes(problem: Problem, blocks: FlashBlocks, *, keys: int) -> int:
    """Return the VMEM of the backward kernel when it sums gradients of that many keys."""
    blocks = blocks.cut_to(problem.visibility)
    width, v_width, item = problem.padded_width, problem.padded_v_width, problem.dtype.itemsize
    held, columns = blocks.backward_q, blocks.backward_kv
    # For queries: themselves, their gradient, the result and its gradient; for keys and values:
    # both.
    windows = 4 * (held + columns) * (width + v_width) * item + 2 * word_sublanes() * held * 4
    scratch = held * width * (item + 4) + word_sublanes() * held * 4 + columns * LANES * 4
    sums = max(round_up(keys, columns), columns) * (width + v_width) * 4
    scores = 3 * columns * blocks.backward_q_compute * 4
    if problem.mask_rows > 1:
        windows += 2 * held * columns
        scores += columns * blocks.backward_q_compute * 4
    elif problem.mask_rows:
        windows += 2 * word_sublanes() * columns * 4
        scratch += columns * LANES * 4
    return windows + scratch + sums + scores


def keys_at_a_time(problem: Problem, blocks: FlashBlocks, chip: str | None) -> int:
    """Return how many keys the backward kernel takes per call, limited by its sums in VMEM."""
    cut = blocks.cut_to(problem.visibility)
    step = cut.backward_kv
    # A fifth is left to the compiler for register spills.
    room = vmem_capacity_bytes(chip) * 4 // 5 - backward_bytes(problem, blocks, keys=step)
    of_a_step = (problem.padded_width + problem.padded_v_width) * 4 * step
    further = max(0, room // of_a_step)
    return min((1 + further) * step, round_up(problem.visibility.kv_len, step))


def default_blocks(case: KernelCase, chip: str | None) -> FlashBlocks:
    """Return the preferred blocks, halved until they fit the chip, and cut to the sequences.

    Without a chip they are small.

    Raises:
        TPUKernelError: Even the smallest blocks do not fit, because heads are too wide.
    """
    blocks = SAFE if chip is None else _preferred(problem_of(case))
    capacity = vmem_capacity_bytes(chip) * 4 // 5
    while vmem_bytes(case, blocks) > capacity:
        smaller = _halved(blocks)
        if smaller == blocks:
            raise TPUKernelError(
                f"heads of {problem_of(case).width} do not fit in the VMEM of "
                f"{chip or 'every generation'} even in blocks of {LANES}; use "
                "implementation='xla', or split the heads."
            )
        blocks = smaller
    return blocks.cut_to(problem_of(case).visibility)


def _preferred(problem: Problem) -> FlashBlocks:
    if problem.visibility.symmetric:
        return PREFERRED_IN_WINDOWS
    staircase = problem.visibility.causal and problem.mask_rows <= 1
    return PREFERRED if staircase else PREFERRED_WITHOUT_STAIRS


def _halved(blocks: FlashBlocks) -> FlashBlocks:
    """Halve the tokens in VMEM while they are many; then halve everything."""
    sizes = {name: value for name, value in blocks.to_dict().items() if name != "unroll"}
    held = {name: sizes[name] for name in _HELD if sizes[name] > SHORTEST_HELD}
    halves = {name: max(LANES, value // 2) for name, value in (held or sizes).items()}
    return dataclasses.replace(blocks, **halves)


def block_space(case: KernelCase, chip: str) -> Iterator[FlashBlocks]:
    """Yield candidates for the tuner: forward sizes and backward sizes are varied separately."""
    base = default_blocks(case, chip)
    capacity = vmem_capacity_bytes(chip)
    seen: set[FlashBlocks] = set()
    visibility = problem_of(case).visibility
    # For 4096 queries the diagonal is so long (39,000 bundles on v5e) that the core fetches as many
    # bundles as it executes. Static timing, which prefers it by a tenth, does not model the
    # fetching.
    forward = [
        {"block_q": q, "block_kv_compute": compute, "unroll": unroll}
        for q in (512, 1024, 2048)
        for compute in (256, 512, 1024)
        for unroll in (1, 2)
    ]
    backward = [
        {"backward_kv": columns, "backward_q_compute": compute}
        for columns in (512, 1024, 2048)
        for compute in (256, 512, 1024)
    ]
    for sizes in [{}, *forward, *backward]:
        blocks = dataclasses.replace(base, **sizes).cut_to(visibility)
        if blocks not in seen and vmem_bytes(case, blocks) <= capacity:
            seen.add(blocks)
            yield blocks
