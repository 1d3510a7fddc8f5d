"""A cluster to rehearse on: the API, TPU nodes, and what a launch needs to know of them."""

from pathlib import Path
from typing import Any

from .emulator import KubernetesEmulator, tpu_pool

ZONE = "us-central1-a"
# By name of the pool: one slice each, as GKE makes pools of several hosts.
POOLS = {
    "single": "v6e-4",
    "pair": "v6e-8",
    "first": "v6e-16",
    "second": "v6e-16",
    "newest": "tpu7x-2x2x2",
}
SPOT_POOLS = {"spot": "v6e-16"}


class KubernetesRehearsal:
    """An emulated cluster with a few slices, whose Pods run real processes on this machine.

    Args:
        folder: Where its kubeconfig and the files of its processes are kept.
    """

    def __init__(self, folder: Path) -> None:
        pools = [tpu_pool(one, name=name, zone=ZONE) for name, one in POOLS.items()]
        spot = [tpu_pool(one, name=name, zone=ZONE, spot=True) for name, one in SPOT_POOLS.items()]
        self.emulator = KubernetesEmulator([*pools, *spot], folder=folder)

    @property
    def settings(self) -> dict[str, Any]:
        """What a job's `launch:` section says to launch here."""
        # Processes run with this machine's own Python, whatever the image is called.
        return {"provider": "gke", "namespace": "default", "image": "rehearsal/any:1"}

    @property
    def environment(self) -> dict[str, str]:
        """Where kubectl and clients find the cluster, and how they prove who they are."""
        return {"KUBECONFIG": str(self.emulator.kubeconfig)}

    def close(self) -> None:
        """End the API and all processes."""
        self.emulator.close()
