"""The real TPU compiler on flash attention: every generation, both passes, and their memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tpukit.compiler.aot import compile_for
from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.flash_attention.api import OP, case, flash_attention

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]


def gradients(*, causal: bool = True, **options: Any) -> Any:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=causal, **options).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize("slice_name", ["v5e-1", "v5p-8", "v6e-1", "tpu7x-1x1x1"])
def test_both_passes_compile_for_every_generation(slice_name: str) -> None:
    chip = slice_name.split("-")[0].removeprefix("tpu")
    with target_chip(chip):
        compiled = compile_for(gradients(), slice_name, *OP.cases[0].arguments)
    assert compiled.fits
    assert compiled.hlo.count('custom_call_target="tpu_custom_call"') == 2


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    arguments = case(16384, heads=2, kv_heads=1).arguments
    with target_chip("v6e"):
        compiled = compile_for(gradients(), "v6e-1", *arguments, until="schedule")
    tokens_bytes = sum(x.size * x.dtype.itemsize for x in arguments)
    scores_bytes = 2 * 16384**2 * 4
    # Result, cotangent and log-sum-exp of the forward pass, and room for one copy of each array.
    assert compiled.memory.temp_bytes < 3 * tokens_bytes < scores_bytes / 10


def test_masks_are_read_by_the_kernels_and_copied_once_at_a_time() -> None:
    tokens, heads = 2048, 8
    arguments = case(tokens, heads=heads, kv_heads=2, batch=2).arguments
    mask = jax.ShapeDtypeStruct((2, heads, tokens, tokens), jnp.bool_)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, mask=mask).astype(jnp.float32).sum()

    with target_chip("v6e"):
        compiled = compile_for(jax.grad(loss, (0, 1, 2)), "v6e-1", *arguments, mask)
    assert compiled.hlo.count('custom_call_target="tpu_custom_call"') == 2
    tokens_bytes = sum(x.size * x.dtype.itemsize for x in arguments)
    assert compiled.memory.temp_bytes < mask.size + 3 * tokens_bytes < mask.size * 4


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 1, 1, 700), {"causal": True}), ((1, 4, 700, 700), {"window": 200})],
    ids=["keys", "symmetric_window"],
)
@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v5e-1", "v5p-8", "v6e-1", "tpu7x-1x1x1"])
def test_masks_compile_for_every_generation(
    slice_name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    arguments = case(700, heads=4, kv_heads=2, batch=2).arguments
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, mask=mask, **options).astype(jnp.float32).sum()

    with target_chip(slice_name.split("-")[0].removeprefix("tpu")):
        compiled = compile_for(jax.grad(loss, (0, 1, 2)), slice_name, *arguments, mask)
    assert compiled.hlo.count('custom_call_target="tpu_custom_call"') == 2
