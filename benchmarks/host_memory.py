"""Host memory of a save, a restore and an export: predicted beside what processes take.

Each is done in a process of its own on models of several sizes in float32, and the growth of its
resident memory at the highest moment (VmHWM, reset before) is read from Linux. On a CPU a device's
memory is the host's. So a save is made to copy what it writes, as it must from any other device,
and a restore leaves the state itself beside what is under way.

Targets: a host that is said to hold a job must hold it, so predicted is at least 95 % of measured;
and at most 115 % of it. What a restore has under way is a limit that is set, and how much of it is
used depends on how fast the machine reads: there the second target is not to be had.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from claims import Claim, report

MODELS = {  # layers, width, vocabulary
    "200M": (8, 1024, 32_000),
    "370M": (20, 1024, 16_000),
    "600M": (8, 2048, 16_000),
}
DEVICES = (1, 8)
AT_ONCE_BYTES = (4 * 10**9, 600 * 10**6)  # the default, and a few arrays at a time
FILE_BYTES = (5 * 10**9, 500 * 10**6)  # the default, and several files
WITHIN, LEAST = 1.15, 0.95


def config_of(name: str) -> Any:
    """A reference transformer of that size."""
    from tpukit.models import TransformerConfig

    layers, width, vocabulary = MODELS[name]
    return TransformerConfig(
        n_layers=layers,
        d_model=width,
        n_heads=width // 64,
        n_kv_heads=width // 64,
        d_ff=4 * width,
        vocab_size=vocabulary,
        max_seq_len=1024,
    )


def placed(config: Any) -> dict[str, Any]:
    """Shapes of the parameters, sharded over all devices; moments would be more of the same."""
    import jax

    from tpukit import create_mesh
    from tpukit.step import Workload

    mesh = create_mesh(mesh_shape=(jax.device_count(),), axis_names=("fsdp",))
    state, _ = Workload(config, batch_size=8, sequence_length=128).abstract_args(mesh)
    return {"params": state.params}


def share_of(state: Any) -> Any:
    """The same state as the prediction sees it."""
    import jax

    from tpukit.step.host_memory import HostShare, StoredArray

    def stored(leaf: Any, *, is_parameter: bool) -> StoredArray:
        pieces = len({str(at) for at in leaf.sharding.devices_indices_map(leaf.shape).values()})
        n_bytes = leaf.size * leaf.dtype.itemsize
        return StoredArray(n_bytes, jax.device_count() // pieces, is_parameter)

    arrays = [
        stored(leaf, is_parameter=name == "params")
        for name, tree in state.items()
        for leaf in jax.tree.leaves(tree)
    ]
    return HostShare(tuple(arrays), jax.device_count(), 1)


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def growth(action: Callable[[], object]) -> int:
    """By how much resident memory grows while an action runs, at its highest."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    kept = action()
    highest = memory("VmHWM")
    del kept
    return highest - before


def work(mode: str, name: str, folder: str, limit: int) -> dict[str, int]:
    """Do one of the three in this process: bytes predicted and measured."""
    import jax
    import numpy as np

    from tpukit.models.huggingface.weights import export_huggingface
    from tpukit.step.host_memory import HELD_WHILE_READ
    from tpukit.training.checkpoint import TPUCheckpointer, orbax_arrays

    handler = orbax_arrays.ocp.PyTreeCheckpointHandler
    # As on a GPU. A TPU's arrays are copied to the host too, a CPU's would be used as they are.
    orbax_arrays.ocp.PyTreeCheckpointHandler = partial(handler, enable_pinned_host_transfer=True)
    config = config_of(name)
    state = placed(config)
    share = share_of(state)
    small = {"w": np.ones(4, np.float32)}
    with tempfile.TemporaryDirectory() as warm, TPUCheckpointer(warm) as first:
        first.save(1, params=small)
        first.restore(like={"params": small})
    at_once = limit if mode == "restore" else AT_ONCE_BYTES[0]
    with TPUCheckpointer(folder, read_at_once_bytes=at_once) as checkpointer:
        if mode == "save":
            filled = jax.block_until_ready(jax.tree.map(random_like, state))
            predicted = share.saved_bytes
            measured = growth(lambda: (checkpointer.save(1, **filled), checkpointer.wait()))
        elif mode == "restore":
            # Beside it the state itself, which elsewhere is in the memory of the devices.
            predicted = share.restored_bytes + HELD_WHILE_READ * share.under_way_bytes(at_once)
            measured = growth(lambda: checkpointer.restore(like=state))
        else:
            predicted = share.exporting_bytes(limit)
            saved = checkpointer.open().arrays
            with tempfile.TemporaryDirectory() as out:
                measured = growth(
                    lambda: export_huggingface(saved, config, out, max_shard_bytes=limit)
                )
    return {"predicted": predicted, "measured": measured}


def random_like(leaf: Any) -> Any:
    """Values that take memory, where zeros might not."""
    import jax
    import numpy as np

    values = np.random.default_rng(0).random(leaf.shape, np.float32).astype(leaf.dtype)
    return jax.device_put(values, leaf.sharding)


def run(mode: str, name: str, folder: str, *, devices: int = 1, limit: int = 0) -> float:
    """One process; prints its line and returns predicted over measured."""
    command = [sys.executable, __file__, "--work", mode, name, folder, str(limit)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    ratio = found["predicted"] / found["measured"]
    what = f"{mode} {name}, {devices} devices" + (f", limit {limit / 1e9:g} GB" if limit else "")
    gigabytes = " : ".join(f"{found[key] / 1e9:.3f}" for key in ("predicted", "measured"))
    print(f"{what:42} predicted : measured  {gigabytes} GB  {ratio:.3f}", flush=True)
    return ratio


def main() -> None:
    """Every model, then the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    asked = parser.parse_args()
    if asked.work:
        mode, name, folder, limit = asked.work
        print(json.dumps(work(mode, name, folder, int(limit))))
        return
    ratios: dict[str, list[float]] = {"save": [], "restore": [], "export": []}
    for name in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            ratios["save"].append(run("save", name, folder))
            ratios["restore"] += [
                run("restore", name, folder, devices=devices, limit=limit)
                for devices, limit in itertools.product(DEVICES, AT_ONCE_BYTES)
            ]
            ratios["export"] += [run("export", name, folder, limit=limit) for limit in FILE_BYTES]
    for mode, found in ratios.items():
        most = None if mode == "restore" else WITHIN
        report(
            Claim(f"{mode}: predicted over measured, median", statistics.median(found), ""),
            Claim(f"{mode}: predicted over measured, largest", max(found), "", at_most=most),
            Claim(f"{mode}: predicted over measured, least", min(found), "", at_least=LEAST),
        )


if __name__ == "__main__":
    main()
