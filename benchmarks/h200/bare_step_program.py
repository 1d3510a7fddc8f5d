"""Our step alone, in a bare loop: what `TPUTrainer` adds around it is the difference."""

import json
import sys
import time

import jax
import numpy as np
import optax
from initial_weights import config_of
from shapes import SEQUENCE, SHAPES

from tpukit import create_mesh
from tpukit.models import Workload
from tpukit.training.gpu import workload_options
from tpukit.training.recompile import StepProgram


def main(name, tokens_path, warm):
    s = SHAPES[name]
    work = Workload(
        config_of(name),
        batch_size=s.batch,
        sequence_length=SEQUENCE,
        optimizer=optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1),
        **workload_options(s.layers),
    )
    mesh = create_mesh(mesh_shape=(1,), axis_names=("data",))
    program = StepProgram(work, mesh)
    program.compile()
    state = work.init_on(mesh, jax.random.key(0))
    place = next(iter(work.shardings(mesh).batch.values()))
    data = np.load(tokens_path).astype(np.int32)
    losses = []
    for number, rows in enumerate(data):
        if number == warm:
            jax.block_until_ready(state)
            began = time.perf_counter()
        batch = jax.device_put({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, place)
        state, metrics = program(state, batch)
        losses.append(metrics["loss"])
    jax.block_until_ready(state)
    step_s = (time.perf_counter() - began) / (len(data) - warm)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    report = {"step_s": step_s, "peak_bytes": peak, "losses": [float(x) for x in losses]}
    print("REPORT " + json.dumps(report))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
