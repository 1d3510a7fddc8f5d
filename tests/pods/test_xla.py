"""Optimizer steps through the real TPU compiler; switches that change the program it makes."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpukit.errors import ConfigError, TPUOutOfMemoryError, TPUValidationError
from tpukit.hardware import Slice
from tpukit.pods import Pod, PodState, TpuOptimizer
from tpukit.pods.xla import OFF, OptimizationFlags, OptimizerConfig, XlaCompiler
from tpukit.runtime.flags import FlagRegistry

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
SHAPE = jax.ShapeDtypeStruct


def perceptron(params, batch):
    hidden = jax.nn.gelu(batch @ params["a"])
    return ((jax.nn.softmax(hidden @ params["b"]) - batch) ** 2).mean()


def attention(params, batch):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = params["embed"][batch]
    q, k, v = (jnp.einsum("btd,dhk->bhtk", x, params[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k).astype(jnp.float32))
    mixed = jnp.einsum("bhts,bhsk->bthk", scores.astype(jnp.bfloat16), v)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, params["o"])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[..., None], -1)
    return -chosen.mean()


def config(kind):
    if kind == "perceptron":
        shapes = {"a": SHAPE((1024, 2048), "float32"), "b": SHAPE((2048, 1024), "float32")}
        loss, batch = perceptron, SHAPE((1024, 1024), "float32")
    else:
        heads = SHAPE((512, 8, 64), "float32")
        shapes = {
            **dict.fromkeys("qkv", heads),
            "o": SHAPE((8, 64, 512), "float32"),
            "embed": SHAPE((1000, 512), "float32"),
        }
        loss, batch = attention, SHAPE((8, 512), "int32")
    return OptimizerConfig(
        optimizer=optax.adam(1e-3), parameters=shapes, on="v6e-1", loss=loss, batch=batch
    )


def test_every_switch_is_made_of_flags_that_libtpu_has():
    registry = FlagRegistry.installed()
    for flags in OFF.values():
        for name, off in flags.items():
            flag = registry.find(name)
            assert flag.compile_option
            assert str(flag.default).lower() != str(off).lower()


def test_levels_and_switches_become_options():
    on = OptimizationFlags().compiler_options(3, generation="v6e")
    off = OptimizationFlags(enable_fusion=False).compiler_options(3, generation="v6e")
    assert on["xla_tpu_dot_dot_fusion"] is True
    assert "xla_tpu_dot_dot_fusion" not in off
    assert off["xla_jf_conv_output_fusion"] is False
    assert OptimizationFlags().compiler_options(0, generation="v6e") == {}
    with pytest.raises(ConfigError, match="level 4"):
        XlaCompiler().with_optimization_level(4)


def test_a_pipeline_is_compiled_for_a_slice_that_is_not_here():
    compiler = XlaCompiler().with_optimization_level(3).with_flags(OptimizationFlags()).build()
    parameters = {"w": SHAPE((8192, 4096), "float32")}
    asked = OptimizerConfig(optimizer=optax.adam(1e-3), parameters=parameters, on="v3-8")

    async def main():
        return await compiler.compile_optimization_pipeline(asked)

    graph = asyncio.run(main())
    assert str(graph.compiled.slice) == "v3-8"
    assert graph.compiled.fits
    # Weights, two moments and gradients in, the first three out: each device has an eighth.
    array = 8192 * 4096 * 4 // 8
    assert graph.compiled.memory.total_bytes >= 7 * array
    assert graph.compiled.collectives == {"all-reduce": 1}  # only the norm needs the others
    plain = compiler.compile_optimization_pipeline(asked)
    assert plain.fingerprint == graph.fingerprint


def test_what_does_not_fit_is_said():
    huge = OptimizerConfig(
        optimizer=optax.adam(1e-3), parameters={"w": SHAPE((2**17, 2**16), "float32")}, on="v6e-1"
    )
    with pytest.raises(TPUOutOfMemoryError):
        XlaCompiler().compile_optimization_pipeline(huge)
    with pytest.raises(ConfigError, match="needs a batch"):
        XlaCompiler().compile_optimization_pipeline(
            OptimizerConfig(
                optimizer=optax.sgd(1.0), parameters={}, on="v6e-1", loss=lambda p, b: 0.0
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("perceptron", {"enable_fusion", "enable_memory_optimization"}),
        (
            "attention",
            {"enable_fusion", "enable_layout_optimization", "enable_memory_optimization"},
        ),
    ],
)
def test_each_switch_changes_the_program_that_the_compiler_makes(kind, changed):
    graph = XlaCompiler().compile_optimization_pipeline(config(kind))
    effects = graph.effects()
    assert {switch for switch, differs in effects.items() if differs} == changed


@pytest.mark.slow
def test_without_fusion_there_are_more_operations_and_without_memory_nothing_in_vmem():
    def compiled(**switches):
        compiler = XlaCompiler(flags=OptimizationFlags(**switches))
        return compiler.compile_optimization_pipeline(config("perceptron")).compiled

    usual, unfused = compiled(), compiled(enable_fusion=False)
    assert unfused.hlo.count(" fusion(") > usual.hlo.count(" fusion(")
    assert unfused.predict().step_time_s > usual.predict().step_time_s
    assert "S(1)" in usual.hlo
    assert "S(1)" not in compiled(enable_memory_optimization=False).hlo


def test_the_next_step_runs_the_loaded_graph():
    pod = Pod(
        name="job-a1",
        provider="local",
        slice=Slice.parse("v6e-8"),
        zone="here",
        state=PodState.READY,
    )
    optimizer = TpuOptimizer(pod).with_optimizer(optax.adam(1e-2)).with_loss(perceptron).build()
    params = {
        "a": optimizer.create_distributed_tensor([64, 128], init=jax.nn.initializers.normal()),
        "b": optimizer.create_distributed_tensor([128, 64]),
    }
    data = optimizer.load_gradients_from_dataset(
        np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    )
    before = optimizer.step_distributed(params, data)
    graph = XlaCompiler().compile_optimization_pipeline(optimizer.config_for(params, data))
    optimizer.load_xla_graph(graph)
    after = optimizer.step_distributed(params, data)
    assert (before.program, after.program) == (None, graph.fingerprint)
    assert after.loss < before.loss
    other = optimizer.load_gradients_from_dataset(np.ones((8, 64), np.float32))
    with pytest.raises(TPUValidationError, match="compiled for batch"):
        optimizer.step_distributed(params, other)
    optimizer.reduce_batch_size()  # and the graph, which is for the size before, is left
    assert optimizer.step_distributed(params, data).program is None
