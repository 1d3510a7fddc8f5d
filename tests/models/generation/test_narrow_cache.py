"""Attention over keys and values that are kept in fewer bits than what attends to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.models import get_preset
from tpukit.models.generation.cache import CacheSpec
from tpukit.models.generation.cache_attention import attend_slots
from tpukit.models.generation.forward import read_prompts, read_token
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.models.transformer.mixing import SharedKeys
from tpukit.step import Workload


@pytest.mark.parametrize("changes", [{}, {"attention_soft_cap": 5.0}])
def test_fp8_slots_are_read_as_what_they_hold(changes):
    layer = get_preset("tiny", **changes).kinds["layer"]
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 1, 4, 16), jnp.bfloat16)
    held = [jax.random.normal(key, (2, 8, 2, 16)).astype(jnp.float8_e4m3fn) for key in keys[1:]]
    positions = jnp.asarray([5, 7])
    narrow = attend_slots(layer, q, SharedKeys(*held), positions)
    wide = attend_slots(layer, q, SharedKeys(*(one.astype(jnp.float32) for one in held)), positions)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(narrow, np.float32), np.asarray(wide, np.float32), atol=0.02
    )


KINDS = {
    "windows": get_preset(
        "tiny",
        layer_kinds={"local": {"sliding_window": 4}, "global": {}},
        layer_pattern="local, global",
    ),
    "latent": get_preset(
        "tiny",
        head_dim=24,
        n_kv_heads=4,
        latent={"kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "v_dim": 16},
    ),
}


@pytest.mark.parametrize("name", [pytest.param("windows", marks=pytest.mark.slow), "latent"])
def test_a_cache_in_fp8_costs_half_and_little_of_the_scores(name):
    config = KINDS[name].replace(dtype="bfloat16")
    params = jax.jit(Workload(config, batch_size=1, sequence_length=8).init)(jax.random.key(1))
    programs = [DecodingPrograms(config, kv=kv) for kv in (None, CacheSpec.of("fp8"))]
    wide, narrow = (one.decode_arguments(rows=2, slots=32)[0].cache for one in programs)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow)} == {"float8_e4m3fn"}
    assert [2 * leaf.size for leaf in jax.tree.leaves(narrow)] == [
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(wide)
    ]

    def scores(one):
        @jax.jit
        def after_one_more(params):
            prompts = (jnp.asarray([[7, 3, 250, 11, 90]]), jnp.asarray([5]))
            how = {"slots": 32, "execution": one.execution, "kv": one.kv}
            cache = read_prompts(config, params, *prompts, **how)[1]
            return read_token(config, params, jnp.asarray([14]), prompts[1], cache, **how)[0]

        return np.asarray(after_one_more(params.params), np.float32)

    wanted, found = map(scores, programs)
    away = abs(wanted - found).max() / abs(wanted).max()
    assert 0 < away < 0.1
