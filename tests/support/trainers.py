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

TOO_LARGE = (
    ONE_STEP.replace("WIDTH, LAYERS = 2048, 4", "WIDTH, LAYERS = 8192, 16")
    .replace(", donate_argnums=(0, 1)", "")
    .replace("jax.checkpoint(layer)", "layer")
    .replace('P(None, "data")', "P()")
    .replace("32 * jax.local", "512 * jax.local")
)

DECIDES = ONE_STEP.replace(
    "for step, batch",
    """
evaluate = jax.jit(loss)
if evaluate(params, next(batches())) > 0:
    print("warm")
for step, batch""",
)

CARELESS = (
    HEADER
    + """
import jax.experimental

SEQUENCE, HEADS, HEAD = 2048, 2, 128
params = new_params()
state = {"params": params, "moments": jax.device_put(jax.tree.map(jnp.zeros_like, params), whole),
         "count": 0}


def attend(params, x):
    q = x.reshape(-1, HEADS, SEQUENCE, HEAD) * params["scale"][:HEAD].astype(x.dtype)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, q)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), q).mean()


def careless_loss(params, batch):
    x = batch.reshape(-1, WIDTH)
    for layer in range(LAYERS):
        x = jnp.tanh(jnp.dot(x, params["w"][layer], precision="highest"))
    x = jax.lax.with_sharding_constraint(x, rows)
    jax.debug.print("mean {}", x.mean())
    return (x * params["scale"]).mean() + attend(params, batch.astype(jnp.bfloat16))


@jax.jit
def train_step(state, batch):
    value, grads = jax.value_and_grad(careless_loss)(state["params"], batch)
    rate = jax.experimental.io_callback(lambda: np.float32(0.9), jax.ShapeDtypeStruct((), "f4"))
    moments = jax.tree.map(lambda m, g: rate * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    count = jnp.int32(state["count"]) + 1
    return {"params": params, "moments": moments, "count": count}, value


for step in range(3):
    state, value = train_step(state, np.zeros((8, SEQUENCE * HEADS * HEAD), np.float32))
"""
)

GATHERS = (
    HEADER
    + """
import functools

params = new_params()
moments = jax.tree.map(jnp.zeros_like, params)


def unrolled(params, batch):
    x = batch.astype(jnp.bfloat16)
    weights = jax.lax.with_sharding_constraint(params["w"].astype(jnp.bfloat16), whole)

    def layer(x, w):
        return jnp.tanh(x @ w), None
    x, _ = jax.lax.scan(layer, x, weights)
    merged = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w), prevent_cse=False)
    return merged(x, weights[0]).astype(jnp.float32).mean() * params["scale"].mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, moments, batch):
    grads = jax.grad(unrolled)(params, batch)
    moments = jax.tree.map(lambda m, g: (0.9 * m + g).astype(jnp.bfloat16), moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


for step, batch in zip(range(3), batches()):
    params, moments = train_step(params, moments, batch)
"""
)

SMALL_BLOCKS = (
    HEADER
    + """
import functools
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK, ROWS = 128, 2048


def multiply(x_ref, w_ref, o_ref, sum_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)
    sum_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = sum_ref[...].astype(o_ref.dtype)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"),
                   check_vma=False)
def kernel(x, w):
    return pl.pallas_call(
        multiply,
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16),
        grid=(ROWS // BLOCK, WIDTH // BLOCK, WIDTH // BLOCK),
        in_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
                  pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.float32)],
        name="their_matmul",
    )(x, w)


params = new_params()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(params, batch):
    fixed = jax.lax.stop_gradient(params["w"][0].astype(jnp.bfloat16))
    grads = jax.grad(loss)(params, kernel(batch.astype(jnp.bfloat16), fixed))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


for step in range(3):
    batch = jax.make_array_from_process_local_data(rows, np.zeros((ROWS * 8, WIDTH), np.float32))
    params = train_step(params, batch)
"""
)

# Hosts agree on a value as jax's own broadcast does: each gives a row, and the rows are added up.
AGREES = (
    HEADER
    + """
from jax.experimental.multihost_utils import host_local_array_to_global_array

devices = np.array(jax.devices()).reshape(jax.process_count(), jax.local_device_count())
hosts = jax.sharding.Mesh(devices, ("hosts", "local"))
status = host_local_array_to_global_array(np.array([7], np.int32), hosts, P("hosts"))
agreed = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(hosts, P()))(status)
assert jax.device_get(agreed.addressable_data(0)) == 7, agreed
"""
    + ONE_STEP[len(HEADER) :]
)

ALONE = """
import jax, jax.numpy as jnp

@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

step(jnp.zeros((4096, 4096)), jnp.zeros((512, 4096)))
"""

KERNEL = ALONE.replace("jnp.tanh(x @ w)", "double(x @ w)").replace(
    "@jax.jit",
    """from jax.experimental import pallas as pl

def body(x, out):
    out[...] = 2 * x[...]

block = pl.BlockSpec((64, 4096), lambda row: (row, 0))

@jax.custom_jvp
def double(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        body, shape, grid=(8,), in_specs=[block], out_specs=block, name="double"
    )
    return call(x)

double.defjvp(lambda primals, tangents: (double(*primals), 2 * tangents[0]))

@jax.jit""",
)

OFFLOADS = (
    HEADER
    + """
import functools

split = NamedSharding(mesh, P(None, "data"))
host = split.with_memory_kind("pinned_host")
params = new_params()
moments = jax.jit(lambda: jnp.zeros((LAYERS, WIDTH, WIDTH)), out_shardings=host)()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, moments, batch):
    grads = jax.grad(loss)(params, batch)
    here = jax.device_put(moments, split.with_memory_kind("device"))
    here = 0.9 * here + grads["w"]
    return {**params, "w": params["w"] - 0.1 * here}, jax.device_put(here, host)


for step, batch in zip(range(3), batches()):
    params, moments = train_step(params, moments, batch)
"""
)
