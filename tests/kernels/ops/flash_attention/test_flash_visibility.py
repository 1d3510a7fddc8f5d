"""Spans of blocks against the mask of every single token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.kernels.ops.flash_attention.problem import FlashBlocks
from tpukit.kernels.ops.flash_attention.scores import sparse_table
from tpukit.kernels.ops.flash_attention.spec import AttentionSpec, BlockMask
from tpukit.kernels.ops.flash_attention.visibility import Visibility

lengths = st.integers(1, 60)


@st.composite
def visibilities(draw: st.DrawFn) -> Visibility:
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 30))
    offset = draw(st.integers(0, 40)) if window is not None and not causal else 0
    spec = AttentionSpec(causal=causal, window=window)
    return Visibility(draw(lengths), draw(lengths), spec, key_offset=offset)


def check(seen: np.ndarray, span: tuple[int, int, int, int], block: int) -> None:
    """`seen`: (tokens of the block at hand, other tokens)."""
    first, full_first, full_end, end = span
    assert first <= full_first <= full_end <= end
    for number in range(-(-seen.shape[1] // block)):
        part = seen[:, number * block : (number + 1) * block]
        if not first <= number < end:
            assert not part.any()
        if full_first <= number < full_end:
            assert part.all()


@settings(max_examples=300, deadline=None)
@given(sees=visibilities(), block=st.integers(1, 17), rows=st.integers(1, 17))
def test_keys_of_a_block_of_queries(sees: Visibility, block: int, rows: int) -> None:
    mask = sees.token_mask()
    for row in range(0, sees.q_len, rows):
        check(mask[row : row + rows], sees.keys_of(row, rows, block=block), block)


@settings(max_examples=300, deadline=None)
@given(sees=visibilities(), block=st.integers(1, 17), columns=st.integers(1, 17))
def test_queries_of_a_block_of_keys(sees: Visibility, block: int, columns: int) -> None:
    mask = sees.token_mask()
    for column in range(0, sees.kv_len, columns):
        part = mask[:, column : column + columns].T
        check(part, sees.queries_of(column, columns, block=block), block)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    per_step=st.integers(1, 3),
    bits=st.integers(0, 2**16 - 1),
    causal=st.booleans(),
)
def test_the_table_of_a_block_mask_lists_each_seen_block_once(
    rows: int, columns: int, per_step: int, bits: int, causal: bool
) -> None:
    blocks = np.array([(bits >> n) & 1 for n in range(16)], bool).reshape(4, 4)[:rows, :columns]
    mask = BlockMask.from_array(blocks, block_size=128)
    sees = Visibility(rows * 128, columns * 128, AttentionSpec(causal=causal, mask=mask))
    steps = -(-columns // per_step)
    table = sparse_table(sees, outer=rows, steps=steps, inner_per_step=per_step, by_keys=False)
    entries = table.reshape(rows, steps, 2 + per_step)
    tokens = sees.token_mask().reshape(rows, 128, columns, 128)
    for row in range(rows):
        listed = [
            (step * per_step + int(entry[2 + n]), n < entry[0])
            for step, entry in enumerate(entries[row])
            for n in range(entry[1])
        ]
        assert sorted(n for n, _ in listed) == list(np.flatnonzero(tokens[row].any((0, 2))))
        assert all(tokens[row, :, n].all() for n, whole in listed if whole)


@settings(max_examples=200, deadline=None)
@given(
    sees=visibilities(),
    sizes=st.tuples(*[st.integers(1, 9).map(lambda n: 128 * n)] * 6),
)
def test_cut_blocks_tile_each_other(sees: Visibility, sizes: tuple[int, ...]) -> None:
    q, kv, compute, back_q, back_compute, back_kv = sizes
    cut = FlashBlocks(q, kv, compute, 1, back_q, back_compute, back_kv).cut_to(sees)
    assert cut.block_kv % cut.block_kv_compute == 0
    assert cut.backward_q % cut.backward_q_compute == 0
    assert cut.cut_to(sees) == cut
