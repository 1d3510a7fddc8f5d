"""One of several processes that save and restore together.

`pod_process.py NUM_HOSTS HOST_ID ADDRESS DIRECTORY`; each writes what it saw to DIRECTORY.
"""

import json
import logging
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import TPUCheckpointError
from tpukit.runtime.multihost import MultiHostConfig
from tpukit.training.checkpoint import TPUCheckpointer


def refusal(call):
    try:
        call()
    except TPUCheckpointError as error:
        return str(error)
    return None


def sharded(value):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    full = np.arange(64, dtype=np.float32).reshape(16, 4) + value
    sharding = NamedSharding(mesh, P("fsdp"))
    return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])


def work(directory, host):
    seen = {}
    folder = directory / "checkpoints"
    with TPUCheckpointer(folder, max_to_keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(
                step,
                params={"w": sharded(step)},
                step_scalar=jnp.int32(step),
                data={"host": host, "index": 10 * step + host},
            )
        checkpointer.wait()
        jax.experimental.multihost_utils.sync_global_devices("saved")
        seen["steps"] = checkpointer.steps()
    with TPUCheckpointer(folder) as again:
        seen["refusal"] = refusal(lambda: again.save(4, params={"w": sharded(4)}))
        like = {"params": {"w": sharded(0)}, "step_scalar": np.int32(0)}
        restored = again.restore(like=like)
        seen["restored"] = [restored.step, int(restored.step_scalar), restored.data]
        own = restored.params["w"].addressable_shards[0]
        expected = np.arange(64, dtype=np.float32).reshape(16, 4)[own.index] + 3
        seen["same"] = np.array_equal(own.data, expected)
        jax.experimental.multihost_utils.sync_global_devices("restored")
        if host == 0:  # damage that only one process's share of the files will show
            (record,) = (folder / "3" / "tpukit").glob("process-00001-*.json")
            name = max(
                json.loads(record.read_text())["record"]["files"].items(),
                key=lambda item: item[1]["size_bytes"],
            )[0]
            content = bytearray((folder / "3" / name).read_bytes())
            content[-1] ^= 1
            (folder / "3" / name).write_bytes(content)
        jax.experimental.multihost_utils.sync_global_devices("damaged")
        restored = again.restore(like=like)
        seen["fell_back"] = [restored.step, sorted(restored.skipped)]
    return seen


def main():
    num_hosts, host, address, directory = sys.argv[1:]
    config = MultiHostConfig(int(num_hosts), int(host), address, shutdown_timeout_s=20)
    with config:
        seen = work(Path(directory), int(host))
        Path(directory, f"seen-{host}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
