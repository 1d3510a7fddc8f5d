"""The generation a program is traced for is part of what jax remembers a trace by."""

import jax
import jax.numpy as jnp
import pytest

from tpukit.errors import SliceError
from tpukit.hardware.target import current_target, target_chip


def test_another_target_is_another_trace():
    seen: list[str | None] = []
    current_target()

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        seen.append(current_target())
        return x + 1

    for name in ("v6e", "v6e", "TPU v5"):
        with target_chip(name):
            traced(jnp.ones(2))
    traced(jnp.ones(2))
    assert seen == ["v6e", "v5p", None]


def test_a_target_must_be_a_generation():
    with pytest.raises(SliceError, match="Did you mean 'v6e'"), target_chip("v6f"):
        pass
