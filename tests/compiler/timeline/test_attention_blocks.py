"""The share of blocks that splash kernels visit, against the tables jax makes for them."""

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

from tpukit.compiler.hlo import Shape
from tpukit.compiler.timeline.attention import _visited_share

LENGTH, BLOCK = 8192, 512
CAUSAL = masks.CausalMask((LENGTH, LENGTH))
WINDOW = masks.LocalMask((LENGTH, LENGTH), window_size=(1023, 0), offset=0)


def shares(mask, *, by_keys):
    """What the timeline takes as visited, and what jax tabulates."""
    tabulate = info.process_mask_dkv if by_keys else info.process_mask
    found, _ = tabulate(masks.MultiHeadMask([mask]), (BLOCK, BLOCK))
    visited = np.count_nonzero(found.block_mask) / (LENGTH / BLOCK) ** 2
    heads = Shape("bf16", (1, LENGTH, 128))
    tables = [Shape("s8", found.block_mask.shape)]
    return _visited_share(tables, heads, heads, by_keys=by_keys), visited


@pytest.mark.parametrize("by_keys", [False, True])
def test_visited_blocks_of_a_causal_mask(by_keys):
    taken, visited = shares(CAUSAL, by_keys=by_keys)
    assert taken == visited


@pytest.mark.parametrize("by_keys", [False, True])
def test_visited_blocks_of_a_window(by_keys):
    taken, visited = shares(WINDOW, by_keys=by_keys)
    # The first (or last) two blocks see two and one fewer than the others, which is not counted.
    assert taken - visited == pytest.approx(3 / (LENGTH / BLOCK) ** 2)
