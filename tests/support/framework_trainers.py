"""One small trainer per framework, each as its users write it, none of which knows tpukit."""

LINEN = """
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
from flax.training.train_state import TrainState

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(4096, dtype=jnp.bfloat16)(x))
        return nn.Dense(10)(x)

net = Net()
params = net.init(jax.random.key(0), jnp.zeros((1, 4096)))["params"]
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))

@jax.jit
def train_step(state, x, y):
    def loss(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return state.apply_gradients(grads=jax.grad(loss)(state.params))

for _ in range(3):
    state = train_step(state, np.zeros((4096, 4096), np.float32), np.zeros((4096,), np.int32))
"""

NNX = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4096, 4096, rngs=rngs) for _ in range(4)])
    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x

model = nnx.jit(lambda: Net(nnx.Rngs(0)))()
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

for _ in range(3):
    print(train_step(model, optimizer, np.zeros((4096, 4096), np.float32)))
"""

EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax

model = eqx.filter_jit(lambda key: eqx.nn.MLP(4096, 4096, 4096, 4, key=key))(jax.random.key(0))
optimizer = optax.adam(1e-3)
state = optimizer.init(eqx.filter(model, eqx.is_array))

@eqx.filter_jit(donate="all")
def train_step(model, state, x):
    loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss

for _ in range(3):
    model, state, loss = train_step(model, state, np.zeros((4096, 4096), np.float32))
"""

PMAP = """
import functools, jax, jax.numpy as jnp, numpy as np

def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()

@functools.partial(jax.pmap, axis_name="data")
def train_step(w, x):
    return w - 0.1 * jax.lax.pmean(jax.grad(loss)(w, x), "data")

n = jax.local_device_count()
w = jnp.zeros((n, 4096, 4096))
for _ in range(3):
    w = train_step(w, np.zeros((n, 2048, 4096), np.float32))
"""

# A Pallas kernel for TPUs with a gradient of its own, on the parts of sharded arrays.
KERNEL = """
import functools, jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec as P

assert jax.default_backend() == "tpu"
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

def double_kernel(x, out):
    out[...] = x[...] * 2

def call(x):
    return pl.pallas_call(
        double_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0] // 256,),
        in_specs=[pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0)), name="double",
    )(x)

@jax.custom_vjp
def double(x):
    return call(x)

double.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
spread = jax.shard_map(double, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)

@functools.partial(jax.jit, donate_argnums=0)
def train_step(w, x):
    return w - 0.1 * jax.grad(lambda w: (spread(x @ w) ** 2).mean())(w)

w = jax.device_put(np.zeros((2048, 2048), np.float32), NamedSharding(mesh, P()))
x = jax.device_put(np.zeros((8192, 2048), np.float32), NamedSharding(mesh, P("data")))
for _ in range(3):
    w = train_step(w, x)
"""

TORCHAX = """
import jax, numpy as np, optax, torch, torchax
from torchax import interop
from torchax.train import make_train_step

torchax.enable_globally()
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).to("jax")
weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())

def forward(weights, buffers, batch):
    return torch.func.functional_call(model, {**weights, **buffers}, batch)

step = interop.jax_jit(
    make_train_step(forward, lambda out, label: (out ** 2).mean(), optax.adam(1e-3)),
    kwargs_for_jax_jit={"donate_argnums": (0, 2)},
)
state = interop.call_jax(optax.adam(1e-3).init, weights)
for _ in range(3):
    batch = torch.zeros((8192, 2048), device="jax")
    loss, weights, state = step(weights, buffers, state, batch, batch)
"""

FRAMEWORKS = {
    "linen": LINEN,
    "nnx": NNX,
    "equinox": EQUINOX,
    "pmap": PMAP,
    "kernel": KERNEL,
    "torchax": TORCHAX,
}
