"""Training scripts that know nothing of tpukit, as their authors would write them."""

HEADER = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
WIDTH, LAYERS = 2048, 4


def loss(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None
    x, _ = jax.lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params["w"])
    return (x.astype(jnp.float32) * params["scale"]).mean()


def new_params():
    made = jax.jit(
        lambda key: {"w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) * 0.02,
                     "scale": jnp.ones((WIDTH,))},
        out_shardings={"w": NamedSharding(mesh, P(None, "data")), "scale": whole},
    )
    return made(jax.random.key(0))


def batches():
    local = np.zeros((32 * jax.local_device_count(), WIDTH), np.float32)
    while True:
        yield jax.make_array_from_process_local_data(rows, local)
"""

ONE_STEP = (
    HEADER
    + """
import functools

params = new_params()
moments = jax.tree.map(jnp.zeros_like, params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, moments, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
    return params, moments, value


print("devices", jax.device_count(), jax.process_count(), jax.devices()[0].device_kind)
for step, batch in zip(range(3), batches()):
    params, moments, value = train_step(params, moments, batch)
    open("checkpoint-0", "w").write("a step was taken")
"""
)

APART = (
    HEADER
    + """
params = new_params()
gradients = jax.jit(jax.grad(loss))
add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))


@jax.jit
def apply(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


feed = batches()
for step in range(3):
    total = gradients(params, next(feed))
    total = add(total, gradients(params, next(feed)))
    params = apply(params, total)
"""
)

DECIDES = ONE_STEP.replace(
    "for step, batch",
    """
evaluate = jax.jit(loss)
if evaluate(params, next(batches())) > 0:
    print("warm")
for step, batch""",
)
