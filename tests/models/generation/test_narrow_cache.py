"""Attention over keys and values that are kept in fewer bits than what attends to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.models import get_preset
from tpukit.models.generation.slots import attend_slots
from tpukit.models.transformer.mixing import Keys


@pytest.mark.parametrize("changes", [{}, {"attention_soft_cap": 5.0}])
def test_fp8_slots_are_read_as_what_they_hold(changes):
    layer = get_preset("tiny", **changes).kinds["layer"]
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 1, 4, 16), jnp.bfloat16)
    held = [jax.random.normal(key, (2, 8, 2, 16)).astype(jnp.float8_e4m3fn) for key in keys[1:]]
    positions = jnp.asarray([5, 7])
    narrow = attend_slots(layer, q, Keys(*held), positions)
    wide = attend_slots(layer, q, Keys(*(one.astype(jnp.float32) for one in held)), positions)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(narrow, np.float32), np.asarray(wide, np.float32), atol=0.02
    )
