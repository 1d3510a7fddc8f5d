"""One token over a cache: the kernel against softmax in float64, and what it leaves there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.kernels.ops.flash_attention import slots as module
from tpukit.kernels.ops.flash_attention.slots import attend_slots_adding, can_attend_slots
from tpukit.kernels.ops.flash_attention.spec import AttentionSpec

LAYERS, ROWS, HEADS, KEY_HEADS, CHANNELS = 2, 3, 4, 2, 128


def arrays(room, dtype):
    keys = jax.random.split(jax.random.key(0), 5)
    width = KEY_HEADS * CHANNELS
    q = jax.random.normal(keys[0], (ROWS, HEADS, CHANNELS))
    new = tuple(jax.random.normal(key, (ROWS, width)) for key in keys[1:3])
    held = tuple(
        jax.random.normal(key, (LAYERS, ROWS, room, width)).astype(dtype) for key in keys[3:]
    )
    return q, new, held


def attended(q, keys, values, held, *, soft_cap):
    """One row in float64: `held` are the slots that it sees."""
    group = HEADS // KEY_HEADS
    out = np.zeros((HEADS, CHANNELS))
    for head in range(HEADS):
        own = slice(head // group * CHANNELS, (head // group + 1) * CHANNELS)
        scores = keys[held][:, own] @ q[head] * CHANNELS**-0.5
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[held][:, own] / weights.sum()
    return out


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float8_e4m3fn", {}),
        ("bfloat16", {"window": 20}),
        ("float32", {"chunk": 16, "soft_cap": 5.0}),
    ],
)
def test_it_is_softmax_over_the_slots_that_are_seen(dtype, options, monkeypatch):
    room = 64
    q, new, held = arrays(room, dtype)
    monkeypatch.setattr(module, "BLOCK_BYTES", held[0].dtype.itemsize * 32 * 256)  # two blocks
    positions = [5, room - 1, room + 37]  # few slots, all of them, and all of them again
    out, *after = attend_slots_adding(
        q, new, held, jnp.int32(1), jnp.asarray(positions), AttentionSpec(causal=True, **options),
        interpret=True,
    )  # fmt: skip
    wanted = [np.array(one, np.float64) for one in held]
    for array, token in zip(wanted, new, strict=True):
        rounded = np.asarray(token.astype(dtype), np.float64)
        for row, position in enumerate(positions):
            array[1, row, position % room] = rounded[row]
    for found, array in zip(after, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float64), array)
    for row, position in enumerate(positions):
        first = max(0, position - room + 1, position - options.get("window", room) + 1)
        if "chunk" in options:
            first = max(first, position // options["chunk"] * options["chunk"])
        seen = [one % room for one in range(first, position + 1)]
        truth = attended(
            np.asarray(q[row], np.float64), *(array[1, row] for array in wanted), seen,
            soft_cap=options.get("soft_cap"),
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(out[row]), truth, atol=1e-5)


def test_it_takes_whole_tiles_of_whole_heads():
    q, _, (keys, values) = arrays(64, "bfloat16")
    assert can_attend_slots(q, keys, values)
    assert not can_attend_slots(q[..., :64], keys, values)
    assert not can_attend_slots(q, keys[:, :, :40], values[:, :, :40])
