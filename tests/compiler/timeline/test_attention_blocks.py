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


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("by_keys", [False, True])
def test_visited_blocks(mask, by_keys):
    tabulate = info.process_mask_dkv if by_keys else info.process_mask
    found, _ = tabulate(masks.MultiHeadMask([mask]), (BLOCK, BLOCK))
    visited = np.count_nonzero(found.block_mask) / (LENGTH / BLOCK) ** 2
    tables = [Shape("s8", found.block_mask.shape)]
    heads = Shape("bf16", (1, LENGTH, 128))
    assert _visited_share(tables, heads, heads, by_keys=by_keys) == pytest.approx(visited, rel=0.1)
