"""Generation over eight devices gives the tokens of one, whatever a layer keeps in its cache."""

import jax
import numpy as np
import pytest
from small_decoders import latent, linear, params_of, small, windowed

from tpukit.errors import ShardingError
from tpukit.models.generation import Generator, Sampling
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.parallel import create_mesh

GREEDY = Sampling(temperature=0)
PROMPTS = [[7, 3, 50, 11, 9, 14, 2], [5], [20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
CONFIGS = {
    "llama": small(),
    "windows": windowed(4),
    "moe": small("tiny-moe"),
    "latent": latent("tiny-moe", shared_d_ff=16),
    "linear": linear(attention_gate=True, qk_norm="head"),
}
MESHES = {
    "llama": {"data": 4, "tensor": 2},
    "windows": {"fsdp": 8},
    "moe": {"expert": 4, "tensor": 2},
    "latent": {"data": 2, "tensor": 4},
    "linear": {"fsdp": 4, "tensor": 2},
}


SELDOM = ("windows",)


def sharp(config):
    return jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim >= 2 else leaf, params_of(config))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in CONFIGS],
)
def test_eight_devices_give_the_tokens_of_one(name):
    config, params = CONFIGS[name], sharp(CONFIGS[name])
    programs = DecodingPrograms(config, create_mesh(MESHES[name]))
    split = jax.device_put(params, programs.layout.shardings)
    on_mesh, alone = Generator(config, split), Generator(config, params)
    assert on_mesh.programs.mesh == programs.mesh  # the parameters say where they are
    # Three rows do not share out over four or eight devices: they are filled up, and cut again.
    found, truth = (
        one.generate(PROMPTS, max_new_tokens=10, sampling=GREEDY) for one in (on_mesh, alone)
    )
    assert found.tokens == truth.tokens
    assert found.ended == ("length",) * 3
    assert len(set(found.tokens[0])) > 1


def test_caches_lie_where_the_check_compiles_them():
    config = CONFIGS["llama"]
    programs = DecodingPrograms(config, create_mesh(MESHES["llama"]))
    state, *_ = programs.decode_arguments(rows=4, slots=32)
    tokens, lengths = programs.put_rows((np.ones((4, 32), np.int32), np.full(4, 3, np.int32)))
    params = jax.device_put(sharp(config), programs.layout.shardings)
    begin = programs.prefill(sampling=GREEDY, slots=32)
    made = begin(params, tokens, lengths, np.asarray([-1], np.int32), np.uint32(0))
    for leaf, planned in zip(jax.tree.leaves(made), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype) == (planned.shape, planned.dtype)
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
    keys = made.cache["layer"].keys.array
    assert keys.sharding.shard_shape(keys.shape) == (2, 1, 32, 8)  # rows by 4, heads by 2


def test_axes_without_a_use_are_refused():
    with pytest.raises(ShardingError, match="does not support the mesh axis context=8"):
        DecodingPrograms(CONFIGS["llama"], create_mesh({"context": 8}))
