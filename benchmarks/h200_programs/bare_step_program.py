"""Our step alone, in a bare loop: what `TPUTrainer` adds around it is the difference."""

import sys
from functools import partial

import jax
import numpy as np
import optax
from initial_weights import config_of
from jax_loop import run_and_report
from shapes import SEQUENCE, SHAPES

from tpukit import create_mesh
from tpukit.step import Workload
from tpukit.training.matmul_tuning import tuned_options
from tpukit.training.recompile import StepProgram


def main(name, tokens_path, warm):
    s = SHAPES[name]
    work = Workload(
        config_of(name),
        batch_size=s.batch,
        sequence_length=SEQUENCE,
        optimizer=optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1),
        grad_norm=False,
    )
    mesh = create_mesh(mesh_shape=(1,), axis_names=("data",))
    program = StepProgram(work, mesh, tune=partial(tuned_options, progress=print))
    program.compile()
    state = work.init_on(mesh, jax.random.key(0))
    place = next(iter(work.shardings(mesh).batch.values()))

    def step(state, rows):
        batch = jax.device_put({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, place)
        state, metrics = program(state, batch)
        return state, metrics["loss"]

    run_and_report(step, state, np.load(tokens_path).astype(np.int32), warm)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
