"""What one would write in jax: scan over layers, cuDNN attention, remat of all but products."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from initial_weights import weights_of
from jax_loop import run_and_report
from shapes import HEAD, SEQUENCE, SHAPES

HALF = jnp.bfloat16


def norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def turn(x):
    frequencies = 1e4 ** -(np.arange(0, HEAD, 2) / HEAD)
    angles = jnp.arange(SEQUENCE)[:, None] * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)


def loss_of(params, batch, s):
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"].astype(HALF)[tokens]

    def layer(x, p):
        p = {k: v if "norm" in k else v.astype(HALF) for k, v in p.items()}
        h = norm(x, p["norm"])
        shape = (*h.shape[:2], -1, HEAD)
        q, k, v = (
            turn((h @ p["q"]).reshape(shape)),
            turn((h @ p["k"]).reshape(shape)),
            (h @ p["v"]).reshape(shape),
        )
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x = x + out.reshape(*h.shape[:2], -1) @ p["o"]
        h = norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params["layers"])
    logits = (norm(x, params["norm"]) @ params["head"].astype(HALF)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main(name, tokens_path, warm):
    s = SHAPES[name]
    optimizer = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    params = weights_of(name)
    state = (params, jax.jit(optimizer.init)(params))

    def step(state, batch):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, s)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    step = jax.jit(step, donate_argnums=0)
    batches = (jnp.asarray(rows.astype(np.int32)) for rows in np.load(tokens_path))
    run_and_report(step, state, batches, warm)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
