"""One host of several pods, started by `test_processes.py`: trains to a step, or until it dies."""

import json
import os
import sys
import time

import numpy as np
import optax

from tpukit.errors import PodUnavailable
from tpukit.pods import MultiPodManager, PodConfig
from tpukit.runtime.multihost import MultiHostConfig

SIZE = 32


def gradient(host, step):
    """What a host would compute; integers, so that every order of adding gives the same."""
    return np.random.default_rng([host, step]).integers(-8, 8, SIZE).astype(np.float32)


def say(**values):
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main(pods, steps, folder, pause_s):
    me = MultiHostConfig.from_environment(
        timeout_s=120, heartbeat_timeout_s=10, shutdown_timeout_s=20
    )
    me.setup()
    together = (
        MultiPodManager()
        .with_allreduce_strategy("hierarchical")
        .with_pods([PodConfig(tpu_type="v6e-8", zones=(f"zone-{n}",)) for n in range(pods)])
        .with_optimizer(optax.sgd(0.5))
        .with_checkpoints(folder)
        .build()
    )
    together.distribute_model({"w": np.zeros(SIZE, np.float32)})
    try:
        while together.step < steps:
            mine = {"w": gradient(me.host_id, together.step)}
            result = together.step_synchronized(mine).with_timeout(60)
            say(step=result.step)
            time.sleep(pause_s)
    except PodUnavailable as error:
        say(lost=error.cause)
        os._exit(3)  # others that wait for this process are freed by its end
    shape = dict(together.mesh.shape)
    together.close()
    final = np.asarray(together.parameters["w"].addressable_shards[0].data).tolist()
    say(final=final, mesh=shape)
    me.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
