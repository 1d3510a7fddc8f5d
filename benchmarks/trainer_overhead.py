"""What the trainer costs outside the step: a bare jit loop and `TPUTrainer`, turn by turn.

Both run the same compiled step on the same batches. Three figures, all measured:
- wall: seconds a step of the trainer (from completion to completion, metrics, guard and log
  included) over those of the bare loop, the median over rounds. It means something on a machine
  that does nothing else; on a busy one it says how busy.
- CPU: the same of the process's CPU seconds, all threads together, which waiting for a core does
  not change. On a CPU the step itself is in both, so this is the overhead.
- host: CPU seconds of the main thread a step, which is what a device could be kept waiting for.

Usage: JAX_PLATFORMS=cpu python benchmarks/trainer_overhead.py [--steps 15] [--rounds 4]
"""

import argparse
import statistics
import tempfile
import time

import jax
import numpy as np
import optax
from claims import Claim, report

from tpukit.job import TrainingSettings
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step.workload import Workload
from tpukit.training import TPUTrainer, open_data

WIDTH, LAYERS, BATCH, LENGTH, VOCABULARY = 512, 4, 16, 64, 256


def model():
    def init(rng):
        keys = jax.random.split(rng, 3)
        return {
            "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
            "layers": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
            "head": jax.random.normal(keys[2], (WIDTH, VOCABULARY)) / WIDTH**0.5,
        }

    def apply(params, batch):
        x = params["embed"][batch["inputs"]]
        for layer in range(LAYERS):
            x = x + jax.nn.silu(x @ params["layers"][layer])
        return x @ params["head"]

    return init, apply


def clocks():
    return time.perf_counter(), time.process_time(), time.thread_time()


def bare_loop(work, mesh, step, tokens, steps):
    """(wall, process CPU, thread CPU) seconds a step of the loop anyone would write."""
    state = work.init_on(mesh, jax.random.key(0))
    stream = open_data(tokens, sequence_length=LENGTH, batch_size=BATCH).stream()
    places = work.shardings(mesh).batch
    state, metrics = step(state, jax.device_put(next(stream), places))
    jax.block_until_ready(metrics)
    began = clocks()
    for _ in range(steps):
        state, metrics = step(state, jax.device_put(next(stream), places))
    jax.block_until_ready((state, metrics))
    took = [(now - then) / steps for now, then in zip(clocks(), began, strict=True)]
    stream.close()
    return took


class Clock:
    """A hook that reads the clocks at every record."""

    def on_start(self, run_dir, identity):
        """Forget earlier runs."""
        self.readings = []

    def on_record(self, record):
        """Read the clock."""
        self.readings.append(clocks())

    def on_end(self, result):
        """Nothing."""


def trainer(tokens, steps, folder):
    """The same of the trainer, with its metrics file, guard and progress figures."""
    clock = Clock()
    result = TPUTrainer(
        model=model(),
        use_bf16=False,
        optimizer=optax.adamw(1e-4),
        settings=TrainingSettings(checkpoint_every=0, run_dir=folder),
        hooks=[clock],
        progress=False,
    ).train(tokens, steps + 1, batch_size=BATCH, sequence_length=LENGTH)
    assert len(result.losses) == steps + 1
    first, last = clock.readings[0], clock.readings[-1]
    return [(now - then) / steps for now, then in zip(last, first, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 200_000).astype(np.uint16)
    work = Workload(model(), batch_size=BATCH, sequence_length=LENGTH, optimizer=optax.adamw(1e-4))
    mesh = create_mesh(mesh_shape=(-1,), axis_names=("fsdp",))
    step = work.jit_train_step(mesh).lower(*work.abstract_args(mesh)).compile()
    rows = []
    for number in range(options.rounds):
        turns = ["bare", "trainer"] if number % 2 else ["trainer", "bare"]
        row = {}
        for turn in turns:
            if turn == "bare":
                row[turn] = bare_loop(work, mesh, step, tokens, options.steps)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    row[turn] = trainer(tokens, options.steps, f"{folder}/run")
            wall_s, cpu_s, host_s = row[turn]
            print(
                f"{turn:8} {wall_s * 1e3:7.1f} ms/step, CPU {cpu_s * 1e3:7.1f} ms, "
                f"main thread {host_s * 1e3:5.2f} ms"
            )
        rows.append(row)
    wall, cpu = (
        statistics.median(row["trainer"][one] / row["bare"][one] for row in rows) - 1
        for one in (0, 1)
    )
    host = statistics.median(row["trainer"][2] - row["bare"][2] for row in rows)
    shortest = min(row["bare"][0] for row in rows)
    report(
        Claim("bare step, the shortest round", shortest * 1e3, "ms", at_least=100),
        Claim("trainer over the bare loop, wall time", wall * 100, "%", at_most=1.0),
        Claim("trainer over the bare loop, CPU time", cpu * 100, "%", at_most=1.0),
        Claim("main thread's CPU time a step, more than bare", host * 1e3, "ms"),
        Claim("  that is, of the shortest step", host / shortest * 100, "%", at_most=1.0),
    )


if __name__ == "__main__":
    main()
