"""Quantized folders on several devices: the tokens of one, and cuts that cannot be made."""

import jax
import numpy as np
import pytest

from tpukit.errors import ShardingError
from tpukit.models import get_preset
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.generation import Generator, Sampling
from tpukit.models.stored.placement import stored_shardings
from tpukit.parallel import create_mesh
from tpukit.quantization import quantize_for_tpu, quantize_model, save_quantized
from tpukit.training.trained_model import load_trained

CONFIG = get_preset(
    "tiny", d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64, vocab_size=64, n_layers=2,
    dtype="float32", param_dtype="float32",
)  # fmt: skip
PROMPTS = [[7, 3, 50, 11], [5, 6]]


def params():
    made = TransformerAdapter(CONFIG).init(jax.random.key(3)).params
    return jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim >= 2 else leaf, made)


def mesh_of(**sizes):
    count = int(np.prod([*sizes.values()]))
    return create_mesh(
        mesh_shape=[*sizes.values()], axis_names=[*sizes], devices=jax.devices()[:count]
    )


def tokens(folder, mesh=None):
    model = load_trained(folder, mesh=mesh)
    generator = Generator(model.config, model.params)
    return generator.generate(PROMPTS, max_new_tokens=6, sampling=Sampling(temperature=0)).tokens


@pytest.mark.slow
def test_several_devices_give_the_tokens_of_one(tmp_path):
    text = [np.random.default_rng(0).integers(0, 64, (4, 16)) for _ in range(2)]
    made = quantize_model(
        CONFIG, text, params=params(), format="int8",
        rules=[("mlp/up", "vq2"), ("mlp/down", "int4")], codec={"refit": False},
    )  # fmt: skip
    folder = save_quantized(made.model, tmp_path / "small", tokenizer="bytes")
    mesh = mesh_of(fsdp=2, tensor=2)
    layers = load_trained(folder, mesh=mesh).params["layers"]
    codes = layers["mlp"]["up_proj"]["kernel"].parts[0].codes
    assert codes.sharding.shard_shape(codes.shape) == (1, 8, 32)  # 64 / 4 vectors, 64 columns
    assert tokens(folder, mesh) == tokens(folder)


def test_arrays_lie_like_their_matrix_and_cuts_through_words_are_refused():
    made = quantize_for_tpu(CONFIG, 8, params=params(), rules=[("mlp/down", "int4")]).params
    adapter = TransformerAdapter(CONFIG)
    from tpukit.models.generation.programs import DecodingPrograms

    layout = DecodingPrograms(CONFIG, mesh_of(fsdp=2, tensor=2)).layout
    found = stored_shardings(made, layout.shardings)
    wanted = layout.shardings["layers"]["mlp"]["down_proj"]["kernel"].spec
    part = found["layers"]["mlp"]["down_proj"]["kernel"].parts[0]
    assert part.data.spec == jax.sharding.PartitionSpec(*wanted[1:])
    assert adapter.head_counts
    awkward = jax.sharding.NamedSharding(mesh_of(data=3), jax.sharding.PartitionSpec(None, "data"))
    shardings = jax.tree.map(lambda _: awkward, layout.shardings)
    with pytest.raises(ShardingError, match="devices do not divide"):
        stored_shardings(made, shardings)
    stack = jax.sharding.NamedSharding(mesh_of(expert=2), jax.sharding.PartitionSpec("expert"))
    with pytest.raises(ShardingError, match="use fsdp or tensor"):
        stored_shardings(made, jax.tree.map(lambda _: stack, layout.shardings))
