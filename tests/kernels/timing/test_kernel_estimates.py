"""Estimates of real compiles: loops, bytes and cycles against what is known of the kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import SliceError, TPUOutOfMemoryError
from tpukit.kernels.timing import Calibration, estimate_kernel, profile_kernel, time_profile

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
MIB = 2**20
# Cycles that libtpu 0.0.42.1 gives for the same kernels in its own static profile
# (--xla_jf_dump_static_llo_profile_to), which reads no scalar inputs and limits no bandwidth.
LIBTPU_CYCLES = {("v6e", "flash"): 431_469, ("v5e", "matmul"): 1_199_616}


def scaled(x, *, rows):
    """Twice an array, `rows` rows at a time."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body, grid=(x.shape[0] // rows,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="scaled",
    )(x)  # fmt: skip


def repeated(times, x):
    """x summed times[i] times in the i-th block; an argument decides the length of a loop."""

    def body(times_ref, x_ref, o_ref):
        count = times_ref[pl.program_id(0)]
        zero = jnp.zeros_like(o_ref)
        o_ref[...] = jax.lax.fori_loop(0, count, lambda _, acc: acc * 1.5 + x_ref[...], zero)

    spec = pl.BlockSpec((8, 128), lambda i, _: (i, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(4,), in_specs=[spec], out_specs=spec
    )
    # The kernel sees not the argument but what the program makes of it.
    return pl.pallas_call(
        body, grid_spec=grid, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="repeated"
    )(jnp.cumsum(times), x)  # fmt: skip


@pytest.fixture(scope="module")
def copied():
    shape = jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
    return profile_kernel(functools.partial(scaled, rows=256), (shape,), "v6e")


def test_bytes_and_turns_are_exact(copied):
    found = time_profile(copied)
    assert found.dma_bytes == 2 * 64 * MIB
    assert found.grid_steps == 8192 // 256 + 2
    assert found.reason == ""


PERFECT = Calibration(
    hbm_efficiency=1.0, transfer_latency_s=0.0, transfer_issue_cycles=0.0,
    compute_factor=1.0, turn_cycles=0.0, launch_s=0.0,
)  # fmt: skip


def test_a_copy_is_bound_by_hbm_and_takes_what_its_bytes_take(copied):
    found = time_profile(copied, calibration=PERFECT)
    floor = 2 * 64 * MIB / 1640e9
    assert found.bound == "HBM"
    assert floor <= found.kernel_s < 1.08 * floor  # the first and last block cannot overlap
    slower = time_profile(copied, calibration=dataclasses.replace(PERFECT, hbm_efficiency=0.5))
    assert slower.kernel_s == pytest.approx(2 * found.kernel_s, rel=0.05)


def test_the_parts_add_up_and_say_what_they_are(copied):
    constants = dataclasses.replace(PERFECT, compute_factor=1.2, turn_cycles=50, launch_s=1e-6)
    data = time_profile(copied, calibration=constants).to_dict()
    assert data["origin"] == "model"
    assert data["overhead_cycles"] == pytest.approx((8192 // 256 + 2) * 50 + 1750)
    assert data["cycles"] == pytest.approx(
        1.2 * data["compute_cycles"] + data["dma_stall_cycles"] + data["overhead_cycles"]
    )
    assert set(data["utilisation"]) >= {"MXU", "VALU", "VLOAD", "VSTORE", "HBM"}


class TestLoopsThatAnArgumentDecides:
    shape = jax.ShapeDtypeStruct((32, 128), jnp.float32)

    def test_values_of_arguments_are_followed(self):
        few = estimate_kernel(repeated, (np.array([0, 0, 0, 0], np.int32), self.shape), "v6e")
        many = estimate_kernel(repeated, (np.array([100, 0, 0, 7], np.int32), self.shape), "v6e")
        (short,), (long,) = few.calls.values(), many.calls.values()
        turns = 100 + 100 + 100 + 107
        per_turn = (long.issued_bundles - short.issued_bundles) / turns
        assert per_turn == pytest.approx(round(per_turn), abs=0.1)  # a whole number of bundles
        assert 5 <= per_turn <= 12

    def test_values_can_be_given_apart(self):
        apart = estimate_kernel(
            repeated,
            (jax.ShapeDtypeStruct((4,), jnp.int32), self.shape),
            "v6e",
            scalar_inputs={0: np.array([3, 0, 0, 7], np.int32)},
        )
        given = estimate_kernel(repeated, (np.array([3, 0, 0, 7], np.int32), self.shape), "v6e")
        assert apart.time_s == given.time_s is not None

    def test_without_them_no_time_is_told(self):
        found = estimate_kernel(
            repeated, (jax.ShapeDtypeStruct((4,), jnp.int32), self.shape), "v6e"
        )
        assert found.time_s is None
        assert "pass the integers it prefetches" in found.reason
        assert found.low_s is None
        assert found.high_s is None


def test_causal_tables_of_small_integers_skip_the_right_blocks():
    """jax's splash kernel reads its mask from int8 tables: of 16 blocks of a head 10 are seen."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    def products(mask):
        sizes = kernel.BlockSizes(block_q=256, block_kv=256, block_kv_compute=256)
        attend = kernel.make_splash_mha(
            mask=masks.MultiHeadMask([mask] * 2), head_shards=1, q_seq_shards=1, block_sizes=sizes
        )
        shape = jax.ShapeDtypeStruct((2, 1024, 128), jnp.bfloat16)
        profile = profile_kernel(lambda q, k, v: attend(q, k, v), (shape,) * 3, "v6e")
        assert profile.reasons == {}
        (trace,) = profile.calls.values()
        return trace.cores[0].busy["MXU"]

    causal = products(masks.CausalMask((1024, 1024)))
    full = products(masks.FullMask((1024, 1024)))
    assert causal / full == 10 / 16


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "name"), LIBTPU_CYCLES)
def test_cycles_are_near_libtpus_own_profile(chip, name):
    if name == "flash":
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        sizes = flash.BlockSizes(block_q=512, block_k_major=512, block_k=512, block_b=1)
        shape = jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16)

        def function(q, k, v):
            return flash.flash_attention(q, k, v, causal=True, sm_scale=0.1, block_sizes=sizes)

        arguments = (shape,) * 3
    else:
        from jax.experimental.pallas.ops.tpu import matmul

        shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

        def function(x, y):
            return matmul.matmul(x, y, block_shape=(512, 512), block_k=512)

        arguments = (shape,) * 2
    found = estimate_kernel(function, arguments, chip)
    assert found.compute_cycles == pytest.approx(LIBTPU_CYCLES[chip, name], rel=0.10)


def test_what_xla_alone_makes_is_timed_by_its_schedule():
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    profile = profile_kernel(lambda x: x + 1, (shape,), "v6e")
    assert profile.compiled.stage == "schedule"
    found = time_profile(profile)
    assert found.time_s > 2 * 64 * MIB / 1640e9
    assert found.error is None  # bands are those of kernels


def test_what_does_not_fit_is_refused():
    huge = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)
    with pytest.raises(TPUOutOfMemoryError):
        profile_kernel(lambda x: x + 1, (huge,), "v5e")


def test_a_chip_that_is_none_is_named():
    with pytest.raises(SliceError, match="Did you mean 'v6e'"):
        estimate_kernel(jnp.sin, (jax.ShapeDtypeStruct((8, 128), jnp.float32),), "v6f")
