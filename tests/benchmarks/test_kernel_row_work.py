import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_rows import attention, ragged_dot
from kernel_rows.families import Work, work_of
from kernel_rows.rows import as_row, device_of, padded_bytes

ROW = {
    "id": "r",
    "case_id": "c",
    "device": "v6e",
    "op": "ragged_dot",
    "impl": "xla",
    "dims": {"variant": "fwd_gmm", "m": 4096, "k": 1024, "n": 2048, "num_groups": 8},
    "shapes": {},
    "dtypes": {"lhs": "bfloat16", "rhs": "bfloat16"},
    "config": {},
    "static_args": {},
    "mask_kind": None,
    "group_sizes": None,
    "measured_us": 100.0,
    "timing_method": "xprof_device_span",
    "source_date": "2026-08-20",
}


def sizes_of(q_len, kv_len):
    return attention.Sizes(1, q_len, kv_len, 1, 1, 128, 128, 2)


@given(
    q_blocks=st.integers(1, 6),
    kv_blocks=st.integers(1, 6),
    block_q=st.sampled_from([8, 16, 24]),
    block_kv=st.sampled_from([8, 16, 24]),
)
@settings(max_examples=50)
def test_causal_tiles_are_those_the_mask_reaches_and_cuts(q_blocks, kv_blocks, block_q, block_kv):
    q_len, kv_len = q_blocks * block_q, kv_blocks * block_kv
    mask = np.tri(q_len, kv_len, dtype=bool)
    blocks = mask.reshape(q_blocks, block_q, kv_blocks, block_kv).swapaxes(1, 2)
    reached = blocks.any(axis=(2, 3))
    cut = reached & ~blocks.all(axis=(2, 3))
    assert attention.tiles(sizes_of(q_len, kv_len), block_q, block_kv, causal=True) == (
        reached.sum(),
        cut.sum(),
    )


def test_without_a_mask_every_tile_is_visited_and_none_cut():
    assert attention.tiles(sizes_of(100, 200), 64, 64, causal=False) == (2 * 4, 0)


@given(groups=st.lists(st.integers(0, 40), min_size=1, max_size=12), tile=st.sampled_from([4, 16]))
@settings(max_examples=50)
def test_visits_are_the_tiles_each_group_touches(groups, tile):
    sizes = ragged_dot.Sizes("fwd_gmm", sum(groups), 128, 128, len(groups), 2, tuple(groups))
    owner = np.repeat(np.arange(len(groups)), groups)
    pairs = {(group, position // tile) for position, group in enumerate(owner)}
    assert sizes.visits(tile) == max(len(pairs), 1)


# What libtpu 0.0.42.1 wrote as `ragged_dot_tiling` when these products were compiled offline.
@pytest.mark.parametrize(
    ("device", "k", "n", "tiles"),
    [
        ("v6e", 7168, 2048, (256, 7168, 512)),
        ("v6e", 1536, 4096, (256, 1536, 2048)),
        ("v6e", 512, 7168, (256, 512, 3840)),
        ("v6e", 256, 7168, (256, 256, 4608)),
        ("v6e", 2880, 2880, (256, 2880, 1280)),
        ("v6e", 768, 2048, (256, 768, 2048)),
        ("tpu7x", 14336, 4096, (256, 11520, 256)),
        ("tpu7x", 4096, 1536, (256, 4096, 768)),
        ("v5e", 512, 7168, (128, 512, 1920)),
        ("v5e", 7168, 1024, (128, 7168, 128)),
        ("v5e", 768, 2048, (128, 768, 1536)),
        ("v5p", 2048, 768, (128, 2048, 640)),
    ],
)
def test_tiles_are_those_the_compiler_wrote(device, k, n, tiles):
    sizes = ragged_dot.Sizes("fwd_gmm", 131072, k, n, 128, 2, (1024,) * 128)
    assert ragged_dot.compiler_tiles(sizes, device_of(device)) == tiles


def test_a_device_of_tpu7x_is_half_a_chip():
    assert device_of("tpu7x").mxu_us(1153.5e12) == pytest.approx(1e6)
    assert device_of("v5p").mxu_us(459e12) == pytest.approx(1e6)


def test_arrays_take_whole_tiles():
    assert padded_bytes((3, 5, 64), 2) == 3 * 16 * 128 * 2
    assert padded_bytes((4096,), 4) == 4096 * 4


def test_work_grows_with_what_is_asked():
    plain = work_of(as_row(ROW))
    residual = work_of(as_row(ROW | {"static_args": {"return_residuals": True}}))
    assert isinstance(plain, Work)
    assert isinstance(residual, Work)
    assert plain.terms["residuals"] == 0
    assert residual.terms["residuals"] == pytest.approx(4096 * 2048 * 2 / 1638e3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timing_method": "host_wall_clock_incl_dispatch"}, "not known to be the kernel alone"),
        ({"op": "fused_moe_ep"}, "several devices"),
        ({"device": "v99"}, "v99"),
        ({"impl": "cuda"}, "no model for ragged_dot as cuda"),
        ({"dims": {"variant": "fwd_gmm", "m": 8}}, "does not say 'num_groups'"),
    ],
)
def test_a_row_without_an_estimate_says_why(change, reason):
    assert reason in str(work_of(as_row(ROW | change)))
