"""Train your own flax model on eight virtual devices, and see that the mesh changes nothing."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tpukit.parallel import create_mesh
from tpukit.step import Workload


class Classifier(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, pixels):
        """Logits of ten classes."""
        return self.out(jax.nn.relu(self.hidden(pixels)))


def loss(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def train(work, state, step, place):
    for number in range(20):
        batch = work.example_batch(number)
        batch["label"] = (batch["pixels"].sum(-1) > 0).astype(jnp.int32)
        state, metrics = step(state, place(batch))
    return float(metrics["loss"])


work = Workload(
    Classifier,
    batch={
        "pixels": jax.ShapeDtypeStruct((64, 64), jnp.float32),
        "label": jax.ShapeDtypeStruct((64,), jnp.int32),
    },
    inputs=("pixels",),
    loss=loss,
    optimizer=optax.adam(1e-2),
    strategy="fsdp",
)
alone = train(work, work.init(jax.random.key(0)), jax.jit(work.train_step), lambda batch: batch)
mesh = create_mesh(mesh_shape=(8,), axis_names=("fsdp",))
split = train(
    work,
    work.init_on(mesh, jax.random.key(0)),
    work.jit_train_step(mesh),
    lambda batch: work.put_batch(mesh, batch),
)
print(f"loss after 20 steps: one device {alone:.6f}, eight devices {split:.6f}")
