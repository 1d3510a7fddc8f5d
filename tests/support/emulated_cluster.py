"""JobSets for emulated clusters whose containers are small programs, and waiting for them."""

import time

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.manifests import build_manifest
from tpukit.pods.manifests.reading import at
from tpukit_emulators.kubernetes_api.kinds import JOBSET, POD

LAUNCH = LaunchSettings(image="registry/jax:1", max_restarts=1)


def small_jobset(name, *argv, on="v6e-16", launch=LAUNCH, **config):
    """A JobSet of ours whose containers run a program directly, without Python before it."""
    manifest = build_manifest(
        name, PodConfig(tpu_type=on, **config), launch, Command(argv=argv or ("sleep", "60"))
    )
    spec = pod_spec(manifest.jobset)
    spec["containers"][0]["command"] = []
    spec["terminationGracePeriodSeconds"] = 1
    return manifest.jobset


def pod_spec(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def until(test, timeout_s=90.0):
    """Wait until `test()` is true, and return what it returned."""
    ends_at = time.monotonic() + timeout_s
    while not (found := test()):
        assert time.monotonic() < ends_at, "it did not happen in time"
        time.sleep(0.02)
    return found


class Watched:
    """A JobSet in a cluster, as a test sees it."""

    def __init__(self, cluster, jobset):
        self.cluster, self.name = cluster, jobset["metadata"]["name"]
        with cluster.store.lock:
            cluster.store.create(JOBSET, cluster.admission.admit(JOBSET, jobset))

    @property
    def object(self):
        return self.cluster.store.get(JOBSET, "default", self.name)

    @property
    def status(self):
        return self.object.get("status", {})

    @property
    def pods(self):
        return [
            pod
            for pod in self.cluster.store.items(POD, "default")
            if pod["metadata"].get("labels", {}).get("jobset.sigs.k8s.io/jobset-name") == self.name
        ]

    def wait_running(self, hosts=4, attempt=0):
        def running():
            pods = self.cluster.mishaps.pods_of(self.name)
            label = "jobset.sigs.k8s.io/restart-attempt"
            own = [pod for pod in pods if pod["metadata"]["labels"][label] == str(attempt)]
            return own if len(own) == hosts else None

        return until(running)

    def wait_state(self, state):
        until(lambda: self.status.get("terminalState") == state)
        return next(one for one in self.status["conditions"] if one["type"] == state)

    def wait_restarts(self, restarts):
        until(lambda: self.status.get("restarts", 0) >= restarts)
        return self.status


def conditions(one):
    return {entry["type"]: entry["reason"] for entry in at(one, "status", "conditions") or []}
