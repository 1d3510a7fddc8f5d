"""The gated delta rule against transformers' own functions and against itself in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tpukit.errors import TPUKernelError
from tpukit.kernels import gated_delta, gated_delta_step, get_tpu_op
from tpukit.kernels.ops.gated_delta import reference
from tpukit.kernels.ops.gated_delta.operands import DeltaBlocks
from tpukit.kernels.ops.gated_delta.xla import unit_lower_inverse


def problem(*, batch=2, tokens=150, key_heads=2, value_heads=4, width=16, value_width=24, seed=0):
    """Arrays as a model makes them: decays from almost none to almost all."""
    draw = np.random.default_rng(seed).standard_normal
    q, k = (draw((batch, tokens, key_heads, width)) for _ in range(2))
    v = draw((batch, tokens, value_heads, value_width))
    g = -np.exp(1.5 * draw((batch, tokens, value_heads)) - 2)
    beta = 1 / (1 + np.exp(-draw((batch, tokens, value_heads))))
    state = draw((batch, value_heads, width, value_width))
    return tuple(np.asarray(x, np.float32) for x in (q, k, v, g, beta, state))


def torch_rule(name, arrays, state):
    rule = getattr(qwen3_next, f"torch_{name}_gated_delta_rule")
    q, k, v, g, beta = map(torch.from_numpy, arrays)
    group = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    return rule(
        *(q, k, v, g, beta),
        initial_state=None if state is None else torch.from_numpy(state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def close(found, wanted, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        other = np.asarray(other)
        scale = max(np.abs(other).max(), 1.0)
        np.testing.assert_allclose(np.asarray(one) / scale, other / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize("rule", ["recurrent", "chunk"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("with_state", [False, True])
def test_it_is_transformers_rule(rule, implementation, with_state):
    *arrays, state = problem()
    state = state if with_state else None
    found = gated_delta(*arrays, initial_state=state, implementation=implementation)
    close(found, torch_rule(rule, arrays, state))


def test_one_token_is_transformers_rule():
    *arrays, state = problem(tokens=1)
    out, found = gated_delta_step(*(x[:, 0] for x in arrays), state)
    wanted, wanted_state = torch_rule("recurrent", arrays, state)
    close((out, found), (wanted[:, 0], wanted_state))


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
@pytest.mark.parametrize("chunk", [16, 64])
def test_any_length_and_chunk_gives_the_same(tokens, chunk):
    *arrays, state = problem(tokens=tokens)
    found = gated_delta(*arrays, initial_state=state, chunk=chunk)
    close(found, gated_delta(*arrays, initial_state=state, implementation="reference"))


def value_and_gradients(function, arrays):
    def total(*arrays):
        results = function(*arrays)
        return sum((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in results)

    return jax.jit(jax.value_and_grad(total, range(len(arrays))))(*arrays)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize("with_documents", [False, True])
def test_gradients_agree_with_float64(with_documents, implementation):
    arrays = problem(tokens=150)
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (2, 150)), axis=1)
    starts = np.diff(ids, axis=1, prepend=ids[:, :1]) != 0 if with_documents else None
    options = {"interpret": True} if implementation == "pallas_tpu" else {}

    def chunks(*arrays):
        return get_tpu_op("gated_delta").implementations[implementation](*arrays, starts, **options)

    with jax.enable_x64(True):
        wanted = value_and_gradients(
            lambda *arrays: reference.gated_delta(*arrays, starts),
            [x.astype(np.float64) for x in arrays],
        )
        wanted = jax.tree.map(np.asarray, wanted)
    close(value_and_gradients(chunks, arrays), wanted)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_kernels_have_no_races_and_read_nothing_they_did_not_write(key_heads, no_races):
    """Two cores, because v5p has two; what was never written is NaN."""
    careful = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )
    arrays = problem(tokens=200, batch=1)
    op = get_tpu_op("gated_delta")

    def kernel(*arrays):
        blocks = DeltaBlocks(key_heads)
        return op.implementations["pallas_tpu"](*arrays, blocks=blocks, interpret=careful)

    with no_races():
        found = value_and_gradients(kernel, arrays)
    close(found, value_and_gradients(op.implementations["xla"], arrays))


def test_documents_are_apart():
    *arrays, state = problem(tokens=90)
    ids = np.repeat([[3, 1, 2]], 2, axis=0).repeat([7, 63, 20], axis=1)
    out, last = gated_delta(*arrays, initial_state=state, segment_ids=ids)
    for first, end in ((0, 7), (7, 70), (70, 90)):
        alone = gated_delta(
            *(x[:, first:end] for x in arrays), initial_state=None if first else state
        )
        close(out[:, first:end], alone[0])
    close(last, alone[1])


def test_strong_decay_neither_overflows_nor_poisons_gradients():
    q, k, v, g, beta, _ = problem(tokens=128)
    found = value_and_gradients(gated_delta, (q, k, v, 200 * g - 50, beta))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_a_token_that_forgets_all_leaves_the_others_their_digits():
    q, k, v, g, beta, _ = problem(tokens=128)
    g = np.where(np.arange(128)[:, None] % 5 == 0, -700 + g, g / 10)
    close(gated_delta(q, k, v, g, beta), gated_delta(q, k, v, g, beta, implementation="reference"))


def test_repeated_keys_keep_their_digits():
    """One token over and over makes powers of the system's matrix as large as 10¹⁸."""
    q, k, v, g, beta, _ = problem(tokens=128)
    same = np.broadcast_to(k[:, :1], k.shape)
    arrays = (q, same, v, np.full_like(g, -1e-3), np.full_like(beta, 0.999))
    close(gated_delta(*arrays), gated_delta(*arrays, implementation="reference"))


@pytest.mark.parametrize("size", [2, 16, 64])
def test_the_inverse_and_its_gradient_are_those_of_linear_algebra(size):
    a = jnp.tril(jax.random.normal(jax.random.key(0), (3, size, size)), -1) / np.sqrt(size)
    weights = jax.random.normal(jax.random.key(1), a.shape)

    def total(inverse, a):
        return (inverse(a) * weights).sum()

    plain = lambda a: jnp.linalg.inv(jnp.eye(size) + jnp.tril(a, -1))  # noqa: E731
    close(unit_lower_inverse(a), plain(a))
    found, wanted = (
        jax.grad(partial(total, inverse))(a) for inverse in (unit_lower_inverse, plain)
    )
    close(found, wanted)


def test_bfloat16_stays_near_float64():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in problem(width=64, value_width=64)[:5]]
    arrays[3] = arrays[3].astype(jnp.float32)
    out, state = gated_delta(*arrays)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        wanted = reference.gated_delta(*(x.astype(jnp.float64) for x in arrays))
    close((out.astype(jnp.float32), state), wanted, tolerance=1e-2)


def test_what_does_not_go_together_is_refused():
    q, k, v, g, beta, state = problem(tokens=8)
    with pytest.raises(TPUKernelError, match=r"g and beta of v's shape .* \(2, 8, 3\)"):
        gated_delta(q, k, v, g[..., :3], beta)
    with pytest.raises(TPUKernelError, match="4 heads of values cannot share 3"):
        gated_delta(*(np.zeros((2, 8, 3, 16)),) * 2, v, g, beta)
    with pytest.raises(TPUKernelError, match="chunk=48 is not a power of two"):
        gated_delta(q, k, v, g, beta, chunk=48)
    with pytest.raises(TPUKernelError, match=r"expected \(B, HV, DK, DV\) = \(2, 4, 16, 24\)"):
        gated_delta(q, k, v, g, beta, initial_state=state[:, :2])
    with pytest.raises(TPUKernelError, match=r"one for each token, \(2, 8\)"):
        gated_delta(q, k, v, g, beta, segment_ids=np.zeros((2, 7), np.int32))
    with pytest.raises(TPUKernelError, match="Did you mean 'xla'"):
        gated_delta(q, k, v, g, beta, implementation="xls")
