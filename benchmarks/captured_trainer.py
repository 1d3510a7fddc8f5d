"""A training script that knows nothing of tpukit: `python captured_trainer.py --size 8b`.

Plain jax: layers under scan and remat, parameters sharded over all devices (FSDP), AdamW by optax,
one jitted step. `captured.py cost` captures it.
"""

import argparse
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, SEQUENCE, HEAD = 32_000, 2048, 128


@dataclass(frozen=True)
class Size:
    """A decoder; each token goes to 2 of `experts` where there are several."""

    layers: int
    width: int
    hidden: int
    experts: int = 1


SIZES = {
    "1b": Size(16, 2048, 8192),
    "8b": Size(32, 4096, 14336),
    "70b": Size(80, 8192, 28672),
    "moe-47b": Size(32, 4096, 14336, experts=8),
}


def new_params(size: Size, key: jax.Array) -> dict[str, jax.Array]:
    """Return random parameters in float32."""
    layers, width, hidden, experts = size.layers, size.width, size.hidden, size.experts
    shapes = {
        "embedding": (VOCABULARY, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "router": (layers, width, experts),
        "up": (layers, experts, width, 2 * hidden),
        "down": (layers, experts, hidden, width),
    }
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.02 * jax.random.normal(key, shape) for key, (name, shape) in pairs}


def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Return the output of attention and of the experts, each added to its input."""
    x = by_rows(x)
    weights = jax.tree.map(lambda one: one.astype(jnp.bfloat16), weights)
    rows, length, width = x.shape
    q, k, v = jnp.split(norm(x) @ weights["qkv"], 3, axis=-1)
    q, k, v = (one.reshape(rows, length, width // HEAD, HEAD) for one in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(rows, length, width) @ weights["out"]
    experts = weights["up"].shape[0]
    gates = jax.nn.softmax((norm(x) @ weights["router"]).astype(jnp.float32))
    if experts == 1:
        return x + expert(norm(x), weights["up"][0], weights["down"][0]), None
    _, chosen = jax.lax.top_k(gates, 2)  # (rows, length, 2)
    slots = 2 * length // experts
    wanted = jax.nn.one_hot(chosen, experts).sum(2)  # (rows, length, experts)
    _, tokens = jax.lax.top_k((gates * wanted).swapaxes(1, 2), slots)  # (rows, experts, slots)
    sent = jnp.take_along_axis(norm(x)[:, None], tokens[..., None], axis=2)
    made = jax.vmap(expert, in_axes=(1, 0, 0), out_axes=1)(sent, weights["up"], weights["down"])
    rows_of = jnp.arange(rows)[:, None, None]
    return x.at[rows_of, tokens].add(made), None


def expert(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Return the gated feed-forward layer."""
    gate, value = jnp.split(x @ up, 2, axis=-1)
    return (jax.nn.silu(gate) * value) @ down


def by_rows(x: jax.Array) -> jax.Array:
    """Return activations sharded by rows; without it XLA gathers them and keeps weights sharded."""
    return jax.lax.with_sharding_constraint(x, P("fsdp"))


def norm(x: jax.Array) -> jax.Array:
    """Return rows of unit size."""
    size = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt(size + 1e-6)).astype(x.dtype)


def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the next token."""
    x = by_rows(params["embedding"].astype(jnp.bfloat16)[tokens])
    stacked = {name: value for name, value in params.items() if name != "embedding"}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, stacked)
    logits = (norm(x) @ params["embedding"].astype(jnp.bfloat16).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="1b")
    size = SIZES[parser.parse_args().size]
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread(shape: tuple[int, ...]) -> NamedSharding:
        fits = [axis for axis, length in enumerate(shape) if length % jax.device_count() == 0]
        largest = max(fits, key=lambda axis: shape[axis], default=None)
        axes = ["fsdp" if axis == largest else None for axis in range(len(shape))]
        return NamedSharding(mesh, P(*axes))

    optimizer = optax.adamw(1e-4)
    make = functools.partial(new_params, size)
    shapes = jax.eval_shape(make, jax.random.key(0))
    placed = jax.tree.map(lambda one: spread(one.shape), shapes)
    params = jax.jit(make, out_shardings=placed)(jax.random.key(0))
    moments = jax.tree.map(lambda one: spread(one.shape), jax.eval_shape(optimizer.init, shapes))
    state = jax.jit(optimizer.init, out_shardings=moments)(params)
    rows = NamedSharding(mesh, P("fsdp"))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(placed, moments, None))
    def train_step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    local = np.zeros((jax.local_device_count(), SEQUENCE), np.int32)
    with jax.set_mesh(mesh):
        for step in range(10):
            tokens = jax.make_array_from_process_local_data(rows, local)
            params, state, value = train_step(params, state, tokens)
            print(step, value)


if __name__ == "__main__":
    main()
