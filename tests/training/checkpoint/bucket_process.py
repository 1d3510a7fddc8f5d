"""A run in a bucket, as one process sees it: `bucket_process.py ADDRESS`; reports in JSON.

`REMOVE` and `CHANGE` on standard output ask whoever runs the bucket for damage to step 3.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import TPUCheckpointError
from tpukit.training.checkpoint import TPUCheckpointer


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def refusal(call):
    try:
        call()
    except TPUCheckpointError as error:
        return str(error)
    return None


def main():
    address = sys.argv[1]
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = NamedSharding(mesh, P("fsdp"))
    with TPUCheckpointer(address, max_to_keep=2) as checkpointer:
        for step in (1, 2, 3):
            w = jax.device_put(jnp.full((64, 32), step, jnp.float32), sharding)
            checkpointer.save(step, params={"w": w}, data={"i": step}, rng=jax.random.key(step))
        checkpointer.wait()
        say(steps=checkpointer.steps(), verify=checkpointer.verify(3).to_dict())
    with TPUCheckpointer(address) as again:
        say(refusal=refusal(lambda: again.save(4, params=jnp.ones(2))))
        like = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P(None)))
        restored = again.restore(like={"params": {"w": like}})
        say(step=restored.step, sum=float(restored.params["w"].sum()), data=restored.data)
    for wish in ("CHANGE", "REMOVE"):
        say(wish=wish)
        sys.stdin.readline()
        with TPUCheckpointer(address) as damaged:
            restored = damaged.restore()
            say(step=restored.step, skipped=restored.skipped[3])
    for bucket in ("forbidden", "missing"):
        say(refusal=refusal(TPUCheckpointer(f"gs://{bucket}/run").restore))


if __name__ == "__main__":
    main()
