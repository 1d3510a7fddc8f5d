"""Which caches the kernel takes, and that layers get from it what XLA gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.hardware.target import target_chip
from tpukit.models import get_preset
from tpukit.models.generation.cache import CacheSpec, KeyCache, empty_cache, rotation_of
from tpukit.models.generation.cache_attention import SlotKernel
from tpukit.models.generation.mixing import TokenMixing
from tpukit.models.transformer.mixing import SharedKeys
from tpukit.parallel import create_mesh

SLOTS, ROWS = 32, 2


@pytest.fixture(scope="module")
def config():
    return get_preset(
        "tiny", n_layers=2, d_model=256, n_heads=4, n_kv_heads=2, head_dim=128, dtype="float32"
    )


@pytest.fixture(scope="module")
def kernel():
    mesh = create_mesh(mesh_shape=(1,), axis_names=("tensor",), devices=jax.devices()[:1])
    return SlotKernel(mesh=mesh, batch_axes=(), head_axes=("tensor",))


def tokens(config):
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    return [
        jax.random.normal(key, (ROWS, 1, count, config.head_dim))
        for key, count in zip(keys, heads, strict=True)
    ]


def cache_of(config, kv, slots=SLOTS) -> KeyCache:
    (found,) = empty_cache(config, rows=ROWS, slots=slots, kv=CacheSpec.of(kv)).values()
    return found


@pytest.mark.parametrize(
    ("kv", "slots", "taken"),
    [
        ("fp8", SLOTS, True),
        ("bf16", SLOTS, True),  # narrower than queries in float32
        ("int8", SLOTS, False),  # codes under scales
        ("int4", 128, False),
        ("int4", SLOTS, True),  # so few tokens are kept in bfloat16
    ],
)
def test_it_takes_arrays_narrower_than_queries(config, kernel, kv, slots, taken):
    q, *_ = tokens(config)
    with target_chip("v6e"):
        assert kernel.takes(q, cache_of(config, kv, slots), None) is taken
        assert not kernel.takes(q, cache_of(config, kv, slots), jnp.zeros(config.n_heads))
    assert not kernel.takes(q, cache_of(config, kv, slots), None)  # no TPU


@pytest.mark.parametrize("kv", [pytest.param("fp8", marks=pytest.mark.slow), "int4"])
def test_a_layer_gets_what_it_gets_without_the_kernel(config, kernel, kv):
    q, k, v = tokens(config)
    (layer,) = config.kinds.values()
    turn = rotation_of(CacheSpec.of(kv))  # int4 turns channels, of tokens kept in bfloat16 too
    before = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape).astype(leaf.dtype),
        cache_of(config, kv),
    )

    def one_token(kernel):
        @jax.jit
        def attend(cache):
            mixing = TokenMixing(cache, 1, jnp.asarray([3, SLOTS + 5]), turn, kernel)
            return mixing.attend(layer, q, SharedKeys(k, v), None), mixing.cache

        return jax.tree.leaves(attend(before))

    with pltpu.force_tpu_interpret_mode(), target_chip("v6e"):
        found = one_token(kernel)
    for one, wanted in zip(found, one_token(None), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(wanted, np.float32), atol=1e-5
        )
