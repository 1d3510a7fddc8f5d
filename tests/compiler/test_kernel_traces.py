"""Kernels of a step, compiled alone, do what they do in the step's own generated code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukit.compiler import kernel_traces
from tpukit.compiler.aot import run_request
from tpukit.compiler.bundles import trace_call
from tpukit.compiler.kernel_traces import kernel_calls, trace_kernels
from tpukit.compiler.program.request import make_request
from tpukit.hardware import get_chip

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
# Too large for VMEM, where the step would keep it and the kernel need not fetch it.
SHAPE = jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
MOVED = 2 * 65536 * 1024 * 4  # read and written
COUNT = jax.ShapeDtypeStruct((1,), jnp.int32)
BLOCK = pl.BlockSpec((512, 1024), lambda i, *_: (i, 0))


def _twice(source, target):
    target[...] = 2 * source[...]


def _doubled_often(count, source, target):
    target[...] = jax.lax.fori_loop(0, count[0], lambda _, x: 2 * x, source[...])


def step(x, count):
    x = jnp.sin(x)
    x = pl.pallas_call(_twice, SHAPE, grid=(128,), in_specs=[BLOCK], out_specs=BLOCK, name="twice")(
        x
    )
    often = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(128,), in_specs=[BLOCK], out_specs=BLOCK
    )
    return pl.pallas_call(_doubled_often, SHAPE, grid_spec=often, name="often")(count, x).sum()


@pytest.fixture
def compiled():
    return run_request(make_request(step, "v6e-1", SHAPE, COUNT), bundles=True)


def test_alone_as_in_the_step(compiled, monkeypatch):
    wanted = {"wanted": lambda call: True}
    assert not trace_kernels(compiled.module, compiled.slice, compile_missing=False, **wanted)
    found = trace_kernels(compiled.module, compiled.slice, **wanted)
    calls = {call.name.split(".")[0]: call.name for call, _ in kernel_calls(compiled.module)}
    assert set(found) == {calls["twice"]}, "how often the other one doubles, only the step knows"
    alone = found[calls["twice"]]
    inside = trace_call(alone.name, compiled.kernel_listings[calls["twice"]], "v6e")
    assert dataclasses.replace(alone, name=inside.name) == inside
    assert alone.hbm_bytes == MOVED

    monkeypatch.setattr(kernel_traces, "compile_many", pytest.fail)  # it is known by now
    prediction = compiled.predict()
    timed = {op.name: op.seconds for op in prediction.top_ops() if op.cause == "kernel"}
    assert [name.split(".")[0] for name in timed] == ["twice"]
    fastest = MOVED / (get_chip("v6e").hbm_gbps.value * 1e9)
    assert fastest < timed.popitem()[1] < 1.5 * fastest
    assert "1 Pallas kernels could not be timed" in prediction.caveats[0]
