"""`MemoryOptimizer` changes what a compiled step holds, and says how much in milliseconds."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.compiler import compile_for
from tpukit.errors import ConfigError, TPUModelError
from tpukit.models import Transformer, TransformerConfig, get_preset, list_presets
from tpukit.planner.batch_size import LARGEST_FALL, rising_memory
from tpukit.planner.cost.memory_model import MemorySplit
from tpukit.planner.memory_optimizer import MemoryOptimizer
from tpukit.step import Workload

CONFIG = TransformerConfig(
    name="optimized",
    n_layers=6,
    d_model=256,
    n_heads=2,
    n_kv_heads=2,
    head_dim=128,
    d_ff=1024,
    vocab_size=512,
    max_seq_len=1024,
)


@pytest.mark.parametrize(
    ("arguments", "remat"),
    [
        ({"strategy": "none"}, "none"),
        ({"strategy": "none", "enable_rematerialization": True}, "minimal"),
        ({"strategy": "none", "gradient_checkpointing": True}, "full"),
        ({"strategy": "none", "activation_checkpointing_layers": 4}, "none"),
        ({}, "minimal"),
        ({"strategy": "aggressive", "activation_checkpointing_layers": 2}, "full every=2"),
    ],
)
def test_the_switches_choose_a_policy(arguments, remat):
    optimizer = MemoryOptimizer(**arguments)
    assert optimizer.remat == remat
    work = Workload("tiny", batch_size=1, sequence_length=64)
    assert str(optimizer.optimize(work).remat) == remat


def test_wrong_settings_say_what_there_is():
    with pytest.raises(ConfigError, match=r"'agressive' is not one of .* mean 'aggressive'"):
        MemoryOptimizer("agressive")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"=0; a segment has at least 1 layer"):
        MemoryOptimizer(activation_checkpointing_layers=0)
    with pytest.raises(TPUModelError, match=r"has no function to checkpoint.*remat='minimal'"):
        MemoryOptimizer().optimize("llama3.1-8b")


def test_an_estimate_compiles_nothing(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("something is compiled"))
    optimizer = MemoryOptimizer("aggressive")
    found = optimizer.estimate_memory("llama3.1-70b", 64, 4096, chips=64)
    parts = ("weights", "gradients", "optimizer", "activations", "temporaries")
    assert found["total_gb"] == pytest.approx(sum(found[f"{part}_gb"] for part in parts))
    assert found["weights_gb"] == pytest.approx(70.553706496 * 4 / 64)
    assert found["origin"] == "model"
    assert dict(found) == found.to_dict()


def test_an_estimate_knows_the_optimizer():
    def optimizer_gb(*how):
        asked = dict(zip(("optimizer", "moment_dtype"), how, strict=False))
        return MemoryOptimizer().estimate_memory("llama3.1-70b", 64, 4096, **asked)["optimizer_gb"]

    parameters = get_preset("llama3.1-70b").parameter_count().total / 1e9
    assert optimizer_gb() == pytest.approx(8 * parameters)
    assert optimizer_gb("lion", "bfloat16") == pytest.approx(2 * parameters)
    assert optimizer_gb("adamw", "int8") == pytest.approx((2 + 8 / 256) * parameters, rel=1e-4)
    assert optimizer_gb("adafactor") < 0.01 * parameters
    with pytest.raises(ConfigError, match="adafactor has none"):
        optimizer_gb("adafactor", "bfloat16")


def test_a_workload_or_model_is_estimated_like_its_name():
    optimizer = MemoryOptimizer()
    named = optimizer.estimate_memory("tiny", 4, 64).to_dict()
    model = nnx.eval_shape(lambda: Transformer(get_preset("tiny"), rngs=nnx.Rngs(0)))
    work = Workload("tiny", batch_size=4, sequence_length=64)
    for source in (get_preset("tiny"), model, work):
        assert optimizer.estimate_memory(source, 4, 64).to_dict() == named


@settings(deadline=None)
@given(
    preset=st.sampled_from(list_presets()),
    strategy=st.sampled_from(["none", "normal", "aggressive"]),
    every=st.integers(1, 4),
    chips=st.sampled_from([1, 3, 8, 256]),
    length=st.integers(1, 32768),
    sizes=st.lists(st.integers(1, 4096), min_size=2, max_size=6),
)
def test_a_larger_batch_never_gets_a_smaller_estimate(
    preset, strategy, every, chips, length, sizes
):
    optimizer = MemoryOptimizer(strategy, activation_checkpointing_layers=every)
    totals = [
        optimizer.estimate_memory(preset, size, length, chips=chips)["total_gb"]
        for size in sorted(sizes)
    ]
    assert totals == sorted(totals)


@given(
    falls=st.lists(st.floats(0, LARGEST_FALL), min_size=14, max_size=14),
    rises=st.lists(st.floats(0, 2), min_size=14, max_size=14),
    sizes=st.lists(st.integers(1, 4096), min_size=2, max_size=8),
)
def test_estimates_rise_where_the_compiler_s_figures_do_not(falls, rises, sizes):
    figures, most = {}, 1.0
    for power, (fall, rise) in enumerate(zip(falls, rises, strict=True)):
        figures[2**power] = most * (1 + rise) if rise > fall else most * (1 - fall)
        most = max(most, figures[2**power])

    def compile_batch(size):
        parts = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "host"), 0.0)
        return MemorySplit(temporaries=figures[size], **parts)

    found = {size: rising_memory(compile_batch, size)[0].total for size in sorted(sizes)}
    for size, total in found.items():
        assert total >= figures.get(size, 0)
    totals = list(found.values())
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(totals))


def test_a_model_of_one_batch_size_is_estimated_with_it():
    def compile_batch(size):
        if size != 5:
            raise TPUModelError("its batch is 5")
        return MemorySplit(
            weights=1, gradients=0, optimizer=0, activations=0, temporaries=0, host=0
        )

    split, is_compiled = rising_memory(compile_batch, 5)
    assert (split.total, is_compiled) == (1, True)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_the_compiler_is_asked_about_anybody_s_own_model():
    model = linen.Sequential([linen.Embed(512, 256), linen.Dense(512)])
    asked = {"batch_size": 8, "sequence_length": 128, "optimizer": "sgd"}
    found = MemoryOptimizer("none").estimate_memory(model=model, **asked)
    assert found["origin"] == "compiler"
    parameters = 512 * 256 + 256 * 512 + 512
    assert found["weights_gb"] == pytest.approx(parameters * 4 / 1e9, rel=0.01)
    parts = ("weights", "gradients", "optimizer", "activations", "temporaries")
    assert found["total_gb"] == pytest.approx(sum(found[f"{part}_gb"] for part in parts))
    logits_gb = 8 * 128 * 512 * 2 / 1e9
    assert found["weights_gb"] < found["total_gb"] < found["weights_gb"] + 3 * logits_gb


def temp_of_workload(optimizer):
    work = Workload(CONFIG, batch_size=8, sequence_length=1024)
    return compile_for(
        optimizer.optimize(work), "v6e-1", mesh={"fsdp": 1}, until="memory"
    ).memory.temp_bytes


def temp_of_model(optimizer):
    model = nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(optimizer.optimize(model))

    def loss(state, tokens):
        return nnx.merge(definition, state)(tokens).astype(jnp.float32).mean()

    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    found = compile_for(jax.grad(loss), "v6e-1", nnx.to_pure_dict(state), tokens, until="memory")
    return found.memory.temp_bytes


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize("temp_of", [temp_of_workload, temp_of_model])
def test_a_compiled_step_holds_less(temp_of):
    kept = 8 * 1024 * CONFIG.n_layers * 2 * CONFIG.d_ff * 2  # two products of each layer, bfloat16
    everything = temp_of(MemoryOptimizer("none"))
    assert temp_of(MemoryOptimizer("aggressive")) < everything - kept
