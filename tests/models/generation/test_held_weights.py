"""Weights held in the eight bits that their products round them to."""

import jax
import numpy as np

from tpukit.models import get_preset
from tpukit.models.generation import Generator, Sampling
from tpukit.models.matmul.eight_bit import held_weight
from tpukit.step import Workload


def test_tokens_are_those_of_wide_weights():
    config = get_preset("tiny", matmul="float8_static", float8_bound=4.0)
    work = Workload(config, batch_size=1, sequence_length=8)
    params = jax.jit(work.init)(jax.random.key(1)).params

    def held(path, leaf):
        name = jax.tree_util.keystr(path)
        is_matrix = "layers" in name and "kernel" in name
        return held_weight(leaf.astype(config.dtype), bound=4.0) if is_matrix else leaf

    narrow = jax.tree_util.tree_map_with_path(held, params)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(narrow)) < 0.7 * sum(
        leaf.nbytes for leaf in jax.tree.leaves(params)
    )
    found, truth = (
        Generator(config, given).generate(
            [[7, 3, 250], [5]], max_new_tokens=12, sampling=Sampling(temperature=0)
        )
        for given in (narrow, params)
    )
    assert found.tokens == truth.tokens
    assert len(set(np.concatenate(found.tokens))) > 2
