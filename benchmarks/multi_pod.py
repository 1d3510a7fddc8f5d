"""One model on several pods: bytes of a hierarchical all-reduce, and loss with rare averaging.

python benchmarks/multi_pod.py allreduce
python benchmarks/multi_pod.py diloco
"""

from harness import MEASURED, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "allreduce",
        "bytes between slices of a hierarchical all-reduce",
        options={
            "--on": {"default": "2xv6e-8"},
            "--megabytes": {"type": int, "default": 64},
        },
        environment={"JAX_PLATFORMS": "cpu"},
    ),
    Subcommand(
        "diloco",
        "held-out loss of pods that average rarely or in 8 bits",
        options={
            "--steps": {"type": int, "default": 300},
            "--meet-every": {"type": int, "nargs": "*", "default": [10, 50]},
        },
        environment={
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    ),
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler import compile_for
from tpukit.compiler.timeline.network import SliceExchange
from tpukit.hardware import Slice
from tpukit.models.adapters import Variables
from tpukit.pods import MultiPodManager, PodConfig
from tpukit.pods.multipod.sums import (
    DCN,
    ICI,
    AllReduceStrategy,
    PodTopology,
    RoundingResiduals,
    compressed_sum,
    sum_over_devices,
)
from tpukit.step.parts import StepSettings
from tpukit.step.update import loss_and_gradients
from tpukit.step.workload import Workload

EVERY = PartitionSpec((DCN, ICI))
WAYS = {
    "flat": (AllReduceStrategy.FLAT, PodTopology.MESH),
    "hierarchical, mesh": (AllReduceStrategy.HIERARCHICAL, PodTopology.MESH),
    "hierarchical, ring": (AllReduceStrategy.HIERARCHICAL, PodTopology.RING),
    "hierarchical, tree": (AllReduceStrategy.HIERARCHICAL, PodTopology.TREE),
    "ring of all devices": (AllReduceStrategy.RING, PodTopology.RING),
    "hierarchical, 8 bits": None,
}


def run_allreduce(options):
    """What the real TPU compiler makes of each way to add up gradients over two slices.

    64 MiB of float32 gradients on every device of 2xv6e-8, no TPU: the collectives that the
    compiler wrote, the bytes that each device sends between slices, and the predicted time.
    """
    on = Slice.parse(options.on)
    pods, chips = on.num_slices, on.devices // on.num_slices
    mesh = AbstractMesh((pods, chips), (DCN, ICI), axis_types=(AxisType.Auto,) * 2)
    shape = (on.devices, options.megabytes * 2**18)
    values = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, EVERY))

    def compiled(way):
        def add_up(rows):
            if way is None:
                piece = jax.lax.psum_scatter(rows[0], ICI, tiled=True)
                piece, _ = compressed_sum(piece, RoundingResiduals.zeros(piece.size, pods), pods)
                return jax.lax.all_gather(piece, ICI, tiled=True)[None]
            strategy, topology = way
            order = range(pods)
            return sum_over_devices(
                rows[0],
                strategy=strategy,
                topology=topology,
                pods=pods,
                chips=chips,
                order=order,
            )[None]

        mapped = jax.shard_map(add_up, mesh=mesh, in_specs=EVERY, out_specs=EVERY, check_vma=False)
        return compile_for(mapped, on, values, dcn_mesh_shape=(pods, 1), until="schedule")

    print(f"{options.megabytes} MiB a device on {on}; bytes by the compiler, times by the model")
    print(f"{'':22} {'between slices':>16} {'predicted':>11}  collectives")
    for name, way in WAYS.items():
        step = compiled(way)
        sent = [
            SliceExchange.of(one)
            for computation in step.module.computations.values()
            for one in computation
            if one.opcode == "send"
        ]
        crossing = sum(one.wire_bytes for one in sent) / 2**20
        took = step.predict().step_time_s * 1e3
        print(f"{name:22} {crossing:9.2f} MiB/dev {took:8.2f} ms  {step.collectives}")
        report(
            Result(
                f"{options.megabytes} MiB added over {on}, {name}: sent between slices per device",
                crossing,
                "MiB",
                key=name.replace(",", "").replace(" ", "_"),
                form=".2f",
                compares="compiler : compiler",
                sample="none",
            )
        )


PODS, BATCH, LENGTH = 4, 8, 32
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a", "asia-east1-c")
RATE = 3e-3


class Tokens:
    """Sequences of a Markov chain with a few likely successors for each token."""

    def __init__(self, vocabulary, seed=0):
        rng = np.random.default_rng(seed)
        weights = rng.gamma(0.1, size=(vocabulary, vocabulary)) + 1e-6
        self._chances = weights / weights.sum(1, keepdims=True)
        steady = np.full(vocabulary, 1 / vocabulary)
        for _ in range(200):
            steady = steady @ self._chances
        self.entropy = -(steady[:, None] * self._chances * np.log(self._chances)).sum()
        self._reach = self._chances.cumsum(1)

    def batch(self, *seed):
        rng = np.random.default_rng(seed)
        rows = np.empty((BATCH, LENGTH + 1), np.int32)
        rows[:, 0] = rng.integers(len(self._reach), size=BATCH)
        for at in range(LENGTH):
            drawn = rng.random((BATCH, 1))
            rows[:, at + 1] = (
                (self._reach[rows[:, at]] < drawn).sum(1).clip(max=len(self._reach) - 1)
            )
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def run_diloco(options):
    """Compare losses of pods that average at every step, in 8 bits, or rarely (DiLoCo).

    Four pods of two virtual devices train the preset `tiny` on tokens of a random Markov chain,
    whose entropy no model can go below. All see the same batches and the same number of steps; the
    loss is that of held-out tokens with what the pods have in common at the end. What a pod sends
    to others in a step is beside it. Meetings take the outer step of DiLoCo's paper (Nesterov's
    momentum), or just the mean of the pods.
    """
    work = Workload("tiny", batch_size=BATCH, sequence_length=LENGTH)
    tokens = Tokens(work.config.vocab_size)
    start = work.adapter.init(jax.random.key(0))
    settings = StepSettings(
        adapter=work.adapter,
        loss=None,
        execution=work.execution,
        microbatches=1,
        pipeline_schedule=work.pipeline_schedule,
        strategy=work.strategy,
        grad_norm=False,
        mesh=None,
    )

    @jax.jit
    def learn(params, batch):
        variables = Variables(params, start.model_state)
        found = loss_and_gradients(settings, variables, batch, jax.random.key(0))
        return found.loss, found.gradients

    def train(manager):
        configs = [PodConfig(tpu_type="v6e-8", zones=(zone,)) for zone in ZONES]
        pods = manager.with_optimizer(optax.adam(RATE)).with_pods(configs).build()
        pods.distribute_model(start.params)
        sent = 0.0
        for step in range(options.steps):
            own = jax.device_get(pods.own_parameters)
            gradients = [
                learn(jax.tree.map(lambda leaf, pod=pod: leaf[pod], own), tokens.batch(step, pod))[
                    1
                ]
                for pod in range(PODS)
            ]
            result = pods.step_synchronized(jax.device_get(gradients)).result()
            met = manager.strategy != "local_steps" or (step + 1) % manager.local_steps == 0
            sent += result.sent.value if met else 0.0
        params = jax.device_get(pods.parameters)
        losses = [float(learn(params, tokens.batch(10**6, n))[0]) for n in range(32)]
        return float(np.mean(losses)), sent / options.steps

    runs = {
        "every step": MultiPodManager(),
        "every step, 8 bits": MultiPodManager().with_compression(),
        **{
            f"every {every} steps, {words}": MultiPodManager().with_local_steps(every, outer=outer)
            for every in options.meet_every
            for words, outer in (("momentum", None), ("the mean", optax.sgd(1.0)))
        },
    }
    found = {name: train(manager) for name, manager in runs.items()}
    synchronous, _ = found["every step"]
    print(f"{options.steps} steps of {PODS} pods; entropy of the data {tokens.entropy:.4f}")
    for name, (loss, sent) in found.items():
        report(
            Result(
                f"held-out loss of tiny after {options.steps} steps on {PODS} pods, {name}",
                loss,
                key="loss_" + name.replace(",", "").replace(" ", "_"),
                form=".3f",
                **MEASURED,
            ),
            Result(f"{name}: over the synchronous one", loss - synchronous, "nats"),
            Result(f"{name}: sent by a pod in a step", sent / 1e3, "kB"),
        )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        allreduce=run_allreduce,
        diloco=run_diloco,
    )
