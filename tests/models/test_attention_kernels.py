"""Attention kernels as the models call them, against attention with the whole score matrix."""

import re

import jax
import jax.numpy as jnp
import pytest

from tpukit.errors import TPUModelError
from tpukit.models import get_preset
from tpukit.models.attention.choice import automatic_attention, dot_attention
from tpukit.models.attention.tpu_kernels import (
    flash_attention,
    splash_attention,
    splash_attention_in_two,
)
from tpukit.models.remat.policy import RematPolicy
from tpukit.parallel import abstract_mesh, create_mesh
from tpukit.step import Workload


def arrays(*, batch=1, length=256, heads=2, kv_heads=1, width=128):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, heads, width), *[(batch, length, kv_heads, width)] * 2]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    ("attention", "window", "width"),
    [
        (flash_attention, None, 64),
        (flash_attention, 100, 128),
        (splash_attention, 100, 128),
        (splash_attention_in_two, None, 128),
    ],
)
def test_values_and_gradients_of_grouped_heads(attention, window, width):
    q, k, v = arrays(width=width)

    def total(attend, q, k, v, **options):
        # A sum of squares: positive terms do not cancel, so its relative error means something.
        return jnp.sum(jnp.square(attend(q, k, v, window=window, **options)))

    plain = jax.value_and_grad(lambda *a: total(dot_attention, *a), (0, 1, 2))
    kernel = jax.value_and_grad(lambda *a: total(attention, *a, interpret=True), (0, 1, 2))
    expected, wanted = jax.jit(plain)(q, k, v)
    value, gradients = jax.jit(kernel)(q, k, v)
    assert float(value) == pytest.approx(float(expected), rel=1e-4)
    for seen, known in zip(gradients, wanted, strict=True):
        assert jnp.max(jnp.abs(seen - known)) < 2e-3 * jnp.max(jnp.abs(known))


@pytest.mark.parametrize("attention", [flash_attention, splash_attention])
def test_packed_documents_stay_apart(attention):
    q, k, v = arrays(batch=1, length=256)
    ids = jnp.where(jnp.arange(256) < 100, 0, 1)[None]
    expected = dot_attention(q, k, v, segment_ids=ids)
    seen = jax.jit(lambda *a: attention(*a, segment_ids=ids, interpret=True))(q, k, v)
    assert jnp.allclose(seen, expected, atol=1e-3)


def test_a_mesh_splits_examples_and_heads():
    q, k, v = arrays(batch=2, heads=4, kv_heads=1)
    mesh = create_mesh(mesh_shape=(2, 2), axis_names=("data", "model"), devices=jax.devices()[:4])

    def attend(*a):
        return flash_attention(
            *a, mesh=mesh, batch_axes=("data",), head_axes=("model",), interpret=True
        )

    assert jnp.allclose(jax.jit(attend)(q, k, v), dot_attention(q, k, v), atol=1e-3)


def test_off_a_tpu_auto_is_plain_attention():
    q, k, v = arrays()
    mesh = create_mesh(mesh_shape=(1,), axis_names=("data",), devices=jax.devices()[:1])
    seen = automatic_attention(q, k, v, mesh=mesh, batch_axes=("data",))
    assert jnp.allclose(seen, dot_attention(q, k, v), atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("fsdp", {"fsdp": 8}),
        ("fsdp+context", {"fsdp": 4, "context": 2}),
        ("pipeline+fsdp", {"stage": 2, "fsdp": 4}),
        ("pipeline+context+fsdp", {"stage": 2, "context": 2, "fsdp": 2}),
    ],
)
def test_a_program_lowered_for_tpu_holds_our_kernel(strategy, sizes):
    work = Workload(
        get_preset("small-125m", n_layers=2),
        batch_size=16,
        sequence_length=512,
        strategy=strategy,
        attention="auto",
        microbatches=2,
    )
    mesh = abstract_mesh(mesh_shape=tuple(sizes.values()), axis_names=tuple(sizes))
    traced = work.jit_train_step(mesh).trace(*work.abstract_args(mesh))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert 'kernel_name = "flash_attention_backward"' in text


def test_shapes_the_kernel_cannot_take():
    q = jax.ShapeDtypeStruct((1, 100, 2, 128), jnp.float32)
    with pytest.raises(TPUModelError, match="multiples of 128"):
        jax.eval_shape(splash_attention, q, q, q)
    with pytest.raises(TPUModelError, match=r"128 tokens or more .* \(1, 100, 2, 128\)"):
        jax.eval_shape(flash_attention, q, q, q)


def kernel_calls(text: str) -> int:
    """How often a program without loops runs a kernel; a function of it may be called often."""
    bodies = {body.split("(")[0]: body for body in re.split(r"func\.func \w+ @", text)[1:]}

    def count(body: str) -> int:
        called = (bodies[name] for name in re.findall(r"call @(\w+)", body) if name in bodies)
        return len(re.findall("@tpu_custom_call", body)) + sum(map(count, called))

    return count(bodies["main"])


@pytest.mark.parametrize("attention", [flash_attention, splash_attention])
def test_keeping_attention_spares_the_backward_pass_the_forward_kernel(attention):
    def kernels(remat: str) -> int:
        q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
        attend = RematPolicy.parse(remat).wrap(lambda q: attention(q, q, q) * 2)
        step = jax.jit(jax.value_and_grad(lambda q: jnp.sum(attend(q).astype(jnp.float32))))
        return kernel_calls(step.trace(q).lower(lowering_platforms=("tpu",)).as_text())

    assert kernels("save=attention") == kernels("full") - 1
