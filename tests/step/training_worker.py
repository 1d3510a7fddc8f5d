"""One host of a training job: five steps on a mesh over all hosts, losses out as a line of JSON.

Usage: training_worker.py NUM_HOSTS HOST_ID ADDRESS
"""

import json
import sys

from tpukit.runtime.multihost import MultiHostConfig


def train(num_hosts):
    import jax
    import optax

    from tpukit.models.presets import get_preset
    from tpukit.parallel.mesh.mesh import create_mesh
    from tpukit.step.workload import Workload

    mesh = create_mesh(
        mesh_shape=(1, jax.local_device_count()),
        axis_names=("fsdp", "model"),
        dcn_mesh_shape=(num_hosts, 1),
    )
    config = get_preset("tiny", d_model=32, d_ff=64, head_dim=8, vocab_size=64)
    work = Workload(
        config,
        batch_size=8,
        sequence_length=16,
        strategy="fsdp+megatron",
        optimizer=optax.sgd(0.3),
    )
    state = work.init_on(mesh, jax.random.key(0))
    step = work.jit_train_step(mesh)
    losses = []
    for number in range(5):
        state, metrics = step(state, work.put_batch(mesh, work.example_batch(number)))
        losses.append(float(metrics["loss"]))
    table = state.params["embed"]["embedding"]
    return {
        "losses": losses,
        "norm": float(optax.tree.norm(state.params)),
        "held": sum(shard.data.size for shard in table.addressable_shards) / table.size,
    }


def main():
    num_hosts, host_id, address = sys.argv[1:]
    with MultiHostConfig(int(num_hosts), int(host_id), address, timeout_s=120):
        answer = train(int(num_hosts))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
