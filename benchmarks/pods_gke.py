"""Many jobs on an emulated GKE cluster, with evictions of every kind: does each end as it should?

A job is a light deterministic program on two hosts that saves after every step. It is supervised as
`tpukit launch` does it, while its Pods and nodes are taken away at random. At the end its result
must be that of a run that nobody disturbed, and nothing may be left in the cluster.

    python benchmarks/pods_gke.py --jobs 100 --seed 0
"""

import argparse
import hashlib
import os
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.providers.gke.provider import GKEProvider
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.supervisor import Supervisor
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.kubernetes_api.emulator import KubernetesEmulator, Pace, tpu_pool
from tpukit_emulators.kubernetes_api.kinds import CONFIG_MAP, JOB, JOBSET, POD, SECRET
from tpukit_emulators.kubernetes_api.refusal import Refusal

STEPS = 30
ON = "7x:2x2x2"  # two hosts
WORKER = """
import hashlib, json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
path = os.path.join(sys.argv[1], os.environ["TPUKIT_HOST_ID"])
step, state = 0, "start"
if os.path.exists(path):
    step, state = json.load(open(path))
while step < int(sys.argv[2]):
    state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    step += 1
    with open(path + ".new", "w") as file:
        json.dump([step, state], file)
    os.replace(path + ".new", path)
    print('@tpukit ' + json.dumps({"step": step}), flush=True)
    time.sleep(0.05)
"""
ON_NODE = ("shut_down", "remove", "drain", "taint")
ON_POD = ("evict", "preempt_by_scheduler", "starve", "preempt_for_critical", "kill", "vanish")


def expected():
    state = "start"
    for step in range(STEPS):
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    return f'[{STEPS}, "{state}"]'


class Disturber:
    """Takes Pods and nodes of running jobs away, now and then."""

    def __init__(self, emulator, seed):
        self.emulator, self.luck = emulator, random.Random(seed)
        self.done = {}
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stopping.wait(self.luck.uniform(0.2, 1.0)):
            store, mishaps = self.emulator.cluster.store, self.emulator.mishaps
            pods = [pod for pod in store.items(POD) if pod["status"].get("phase") == "Running"]
            if not pods:
                continue
            pod, what = self.luck.choice(pods), self.luck.choice((*ON_NODE, *ON_POD, "fault"))
            node = pod["spec"]["nodeName"]
            with suppress(Refusal):  # the node went away meanwhile
                if what == "fault":
                    mishap = self.luck.choice((Mishap.OUTAGE, Mishap.LOST_REPLY))
                    self.emulator.faults.add(Fault(mishap, times=2, share=0.5))
                elif what == "remove":
                    mishaps.remove(node, back_after_s=0.5)
                elif what in ON_NODE:
                    getattr(mishaps, what)(node)
                    threading.Timer(1.0, self.undo, (node,)).start()
                else:
                    getattr(mishaps, what)(pod)
                self.done[what] = self.done.get(what, 0) + 1

    def undo(self, node):
        with suppress(Refusal):
            self.emulator.mishaps.uncordon(node)
            self.emulator.mishaps.untaint(node)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    pools = [tpu_pool(ON, name=f"p{number}") for number in range(asked.together)]
    folder = Path(tempfile.mkdtemp(prefix="pods-gke-"))
    launch = LaunchSettings(image="emulated", max_restarts=20)
    began = time.monotonic()
    with KubernetesEmulator(pools, pace=Pace(shutdown_grace_s=0.5, node_gone_s=0.5)) as emulator:
        os.environ["KUBECONFIG"] = str(emulator.kubeconfig)
        disturber = Disturber(emulator, asked.seed)

        def run(number):
            own = folder / str(number)
            own.mkdir()
            command = Command(
                argv=("python3", "-S", "-c", WORKER, str(own), str(STEPS)), first_step_s=60
            )
            supervisor = Supervisor(
                f"job{number}",
                PodConfig(tpu_type=ON),
                command,
                GKEProvider(launch),
                policy=Policy.of(launch),
            )
            outcome = supervisor.run()
            results = {path.read_text() for path in own.iterdir() if path.suffix != ".new"}
            return outcome, results == {expected()}

        with ThreadPoolExecutor(asked.together) as pool:
            results = list(pool.map(run, range(asked.jobs)))
        disturber.stopping.set()
        disturber.thread.join()
        emulator.faults.clear()
        provider = GKEProvider(launch)
        orphans = provider.list()  # as a reconciler does, whenever it passes
        for pod in orphans:
            provider.delete(pod.name, zone=pod.zone)
        time.sleep(2)
        store = emulator.cluster.store
        left = {
            kind.name: len(store.items(kind)) for kind in (JOBSET, JOB, POD, SECRET, CONFIG_MAP)
        }
        processes = emulator.cluster.kubelet.processes.running
    outcomes = [outcome for outcome, _ in results]
    right = sum(is_right for outcome, is_right in results if outcome.is_done)
    losses = [loss for outcome in outcomes for loss in outcome.losses]
    downtimes = sorted(loss.downtime_s for loss in losses if loss.downtime_s is not None)
    causes = {}
    for loss in losses:
        causes[loss.ending.cause.value] = causes.get(loss.ending.cause.value, 0) + 1
    print(f"{asked.jobs} jobs in {time.monotonic() - began:.0f} s, {asked.together} at a time")
    print(f"done: {sum(one.is_done for one in outcomes)}, with the undisturbed result: {right}")
    for outcome in outcomes:
        if not outcome.is_done:
            print(f"  not done: {outcome.__rich__()}")
    print(f"disturbed: {dict(sorted(disturber.done.items()))}")
    print(f"interruptions: {len(losses)}, {len(downtimes)} with steps after them; causes: {causes}")
    if downtimes:
        p99 = downtimes[min(len(downtimes) - 1, int(0.99 * len(downtimes)))]
        print(f"recovery p50 {statistics.median(downtimes):.1f} s, p99 {p99:.1f} s")
    print(f"orphans that the last pass removed: {len(orphans)}")
    print(f"left in the cluster: {left}, processes: {processes}")


if __name__ == "__main__":
    main()
