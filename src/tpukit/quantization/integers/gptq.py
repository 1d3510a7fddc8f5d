"""GPTQ as one loop over inputs: what rounding an input's weights loses, later inputs make good.

qwix has the same (`qwix.contrib.gptq_core`), written out input by input: a program of thousands of
steps, which takes minutes to compile for one matrix. A test holds this one to its numbers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve

DAMPING = 0.01  # of the mean of the Hessian's diagonal, as published


@partial(jax.jit, static_argnames=("bits", "group"))
def gptq_round(
    weight: jax.Array, hessian: jax.Array, *, bits: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """int8 values (inputs, outputs) of `bits` bits, and float32 scales (groups, outputs).

    Args:
        weight: (inputs, outputs); `group` divides the inputs.
        hessian: XᵀX of the inputs, of any scale.
        bits: Of an integer; its largest magnitude is used on both sides.
        group: Inputs that share a scale.
    """
    width, outputs = weight.shape
    most = 2 ** (bits - 1)
    diagonal = jnp.diag(hessian)
    dead = diagonal == 0
    damped = hessian + jnp.diag(jnp.where(dead, 1.0, 0.0) + DAMPING * jnp.mean(diagonal))
    inverse = cho_solve((jnp.linalg.cholesky(damped), True), jnp.eye(width))
    upper = jnp.linalg.cholesky(inverse, upper=True)

    def one_input(at: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, values, scales = state
        first = at // group

        def new_scales() -> jax.Array:
            rows = jax.lax.dynamic_slice(left, (first * group, 0), (group, outputs))
            # Half a step more, as in qwix: the outermost value is as wide as the others.
            largest = jnp.max(jnp.abs(rows), axis=0) / (most - 0.5)
            return scales.at[first].set(jnp.where(largest == 0, 1.0, largest))

        scales = jax.lax.cond(at % group == 0, new_scales, lambda: scales)
        row, scale = left[at], scales[first]
        rounded = jnp.clip(jnp.round(row / scale), -most, most - 1)
        lost = (row - rounded * scale) / upper[at, at]
        left = left - jnp.outer(upper[at], lost)
        return left, values.at[at].set(rounded.astype(jnp.int8)), scales

    start = (
        jnp.where(dead[:, None], 0.0, weight.astype(jnp.float32)),
        jnp.zeros((width, outputs), jnp.int8),
        jnp.zeros((width // group, outputs), jnp.float32),
    )
    _, values, scales = jax.lax.fori_loop(0, width, one_input, start)
    return values, scales
