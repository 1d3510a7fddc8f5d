"""The gated delta rule token by token, in float32 or wider.

A head's state maps keys to values. Each token decays it by exp(g), reads the value for the token's
key, and writes the share `beta` of the difference to the token's value:

    S = exp(g) S;    S = S + k (beta (v - kᵀ S))ᵀ;    o = qᵀ S

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024; the letters are the paper's.)
"""

import jax
import jax.numpy as jnp

EPS = 1e-6  # of the sum of squares, where queries and keys are normalised


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None = None,
    starts: jax.Array | None = None,
    *,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the result (B, S, HV, DV) and the state after the last token (B, HV, DK, DV).

    `starts` (B, S) is True at the first token of a document, which begins with a state of zeros.
    Other implementations take chunks; here each token is one.
    """
    del chunk
    state = first_state(k, v, initial_state)
    if starts is None:
        starts = jnp.zeros(g.shape[:2], bool)

    def token(state: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta, is_start = x
        state = jnp.where(is_start[:, None, None, None], 0, state)
        out, state = step(q, k, v, g, beta, state)
        return state, out

    time_first = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, starts)]
    state, out = jax.lax.scan(token, state, tuple(time_first))
    return jnp.moveaxis(out, 0, 1), state


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return one token of `gated_delta`: heads (B, HK, DK) and (B, HV, DV), rates (B, HV)."""
    wide = state.dtype
    group = v.shape[1] // k.shape[1]
    queries, keys = (jnp.repeat(x, group, axis=1) for x in unit_heads(q, k, wide))
    values, beta = v.astype(wide), beta.astype(wide)
    state = state * jnp.exp(g.astype(wide))[..., None, None]
    held = jnp.sum(state * keys[..., None], axis=-2)
    missing = (values - held) * beta[..., None]
    state = state + keys[..., None] * missing[..., None, :]
    return jnp.sum(state * queries[..., None], axis=-2).astype(q.dtype), state


def unit_heads(q: jax.Array, k: jax.Array, wide: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Normalise queries and keys in `wide`, and scale queries by the root of their width."""

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(wide)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)

    return unit(q) * q.shape[-1] ** -0.5, unit(k)


def first_state(k: jax.Array, v: jax.Array, initial_state: jax.Array | None) -> jax.Array:
    """Return the state before the first token, in float32 or wider."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    if initial_state is not None:
        return initial_state.astype(wide)
    shape = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
    return jnp.zeros_like(v, wide, shape=shape)  # on one device if v is
