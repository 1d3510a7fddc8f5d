"""Many jobs on an emulated cloud that preempts them: does each end with the right result?

python benchmarks/pods_soak.py tpu
python benchmarks/pods_soak.py gke
"""

import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from harness import HELD_TO_TARGET, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "tpu",
        "jobs on the emulated Cloud TPU",
        options={
            "--jobs": {"type": int, "default": 200},
            "--supervisors": {"type": int, "default": 4},
            "--at-once": {"type": int, "default": 4},
            "--seed": {"type": int, "default": 0},
            "--jax": {"action": "store_true", "help": "real training runs"},
            "--share": {"type": int, "help": "of a supervisor that this benchmark starts"},
            "--folder": {"type": Path, "help": "of a supervisor that this benchmark starts"},
        },
    ),
    Subcommand(
        "gke",
        "jobs on the emulated GKE cluster",
        options={
            "--jobs": {"type": int, "default": 100},
            "--together": {"type": int, "default": 6},
            "--seed": {"type": int, "default": 0},
        },
    ),
)

import numpy as np
import psutil

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Command, PodConfig
from tpukit.pods.causes import Kind
from tpukit.pods.providers.gcp.provider import CloudTPUProvider
from tpukit.pods.providers.gke.provider import GKEProvider
from tpukit.pods.store import Store
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.supervisor import Supervisor
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.holding import Pace as CloudPace
from tpukit_emulators.holding import Stage, Zone
from tpukit_emulators.hosts import MARK
from tpukit_emulators.kubernetes_api.emulator import KubernetesEmulator, Pace, tpu_pool
from tpukit_emulators.kubernetes_api.kinds import CONFIG_MAP, JOB, JOBSET, POD, SECRET
from tpukit_emulators.kubernetes_api.refusal import Refusal
from tpukit_emulators.rehearsal import CloudTPURehearsal
from tpukit_emulators.world import World

STEPS, STEP_S, SAVE_EVERY = 30, 0.05, 5
ZONES = ("us-east5-b", "us-east1-d")
PROGRAM = f"""
import json, os, signal, sys, time
saved, told = sys.argv[1], []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
def save():
    with open(saved + ".part", "w") as file:
        json.dump([step, total], file)
    os.replace(saved + ".part", saved)
step, total = json.load(open(saved)) if os.path.exists(saved) else (0, 0.0)
while step < {STEPS}:
    if told:
        save()
        print("@tpukit", json.dumps({{"step": step, "stopped": "preempted"}}), flush=True)
        sys.exit(0)
    step += 1
    total = total * 0.9 + step
    time.sleep({STEP_S})
    if step % {SAVE_EVERY} == 0:
        save()
    print("@tpukit", json.dumps({{"step": step, "loss": total}}), flush=True)
save()
"""


class Light:
    """A program that starts at once and counts."""

    spot_life_s = 6.0

    def __init__(self, folder):
        self.folder = folder

    def command(self, job):
        return Command(argv=("python3", "-c", PROGRAM, str(self.folder / "saved" / job)))

    def prepare(self):
        """Nothing is needed."""

    def is_exact(self, job):
        saved, total = self.folder / "saved" / job, 0.0
        for step in range(1, STEPS + 1):
            total = total * 0.9 + step
        return saved.exists() and json.loads(saved.read_text()) == [STEPS, total]


class Jax(Light):
    """`tpukit train` of the smallest preset."""

    spot_life_s = 40.0

    def command(self, job):
        argv = ("train", "tiny", "--data", str(self.folder / "tokens.npy"), "--steps", str(STEPS))
        argv += ("--batch", "4", "--sequence", "16", "--checkpoint-every", str(SAVE_EVERY))
        argv += ("--set", "train.schedule=constant", "--run-dir", str(self.folder / "saved" / job))
        cache = {"TPUKIT_CACHE_DIR": str(self.folder / "cache")}
        return Command(argv=(sys.executable, "-m", "tpukit", *argv), environment=cache)

    def prepare(self):
        """Write the data, and train once in peace."""
        tokens = np.random.default_rng(0).integers(0, 200, 100_000, np.int32)
        np.save(self.folder / "tokens.npy", tokens)
        whole = self.command("peace")
        alone = {**os.environ, **whole.environment, "JAX_PLATFORMS": "cpu"}
        subprocess.run(whole.argv, env=alone, check=True, capture_output=True)

    def is_exact(self, job):
        return self._losses(job) == self._losses("peace")

    def _losses(self, job):
        path = self.folder / "saved" / job / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {one["step"]: one["loss"] for one in map(json.loads, lines) if "loss" in one}


def supervise(folder, work, first, every, jobs, at_once):
    """What one supervising process does: its share of the jobs, some at once."""
    launch = LaunchSettings(**json.loads((folder / "launch.json").read_text()))
    provider, store = CloudTPUProvider(launch), Store(folder / "store")

    def run(number):
        job = f"job{number}"
        config = PodConfig(
            tpu_type="v6e-1",
            zones=ZONES if number % 2 else ZONES[::-1],
            queue_timeout_s=5,
            labels={"owner": "soak"},
        ).with_preemptible()
        policy = Policy(poll_s=0.5, grace_s=3.0, max_restarts=100, max_stalls=100)
        outcome = Supervisor(job, config, work.command(job), provider, store, policy=policy).run()
        (folder / "outcomes" / job).write_text(str(outcome.ending.cause))

    done = {path.name for path in (folder / "outcomes").iterdir()}
    mine = [number for number in range(first, jobs, every) if f"job{number}" not in done]
    with ThreadPoolExecutor(at_once) as pool:
        for running in [pool.submit(run, number) for number in mine]:
            running.result()


class Doubles:
    """Jobs that had two pods running at the same time."""

    def __init__(self, world):
        self.running, self.found, self.most = {}, [], 0
        self.stages = Counter()
        world.watch(self.see)

    def see(self, held):
        pod = held.name.rsplit("/", 1)[1]
        job = pod.rsplit("-a", 1)[0]
        mine = self.running.setdefault(job, set())
        self.stages[held.stage] += 1
        (mine.add if held.stage in (Stage.STARTING, Stage.RUNNING) else mine.discard)(pod)
        if len(mine) > 1:
            self.found.append(sorted(mine))


def trouble(cloud, seed, over, work):
    """Preempt without notice, sell out, until all is over."""
    luck = random.Random(seed)
    while not over.wait(luck.uniform(0.2, 1.0)):
        running = [held for held in cloud.world.holdings() if held.stage is Stage.RUNNING]
        if running and luck.random() < 3 / work.spot_life_s:
            cloud.world.preempt(luck.choice(running).name, notice_s=luck.choice((0.0, 0.2, 3.0)))
        if luck.random() < 0.1:
            cloud.world.sell_out(luck.choice(ZONES), "v6e", for_s=luck.uniform(1, 4))


def start(arguments, folder, number, environment):
    options = [f"--jobs={arguments.jobs}", f"--supervisors={arguments.supervisors}"]
    options += [f"--at-once={arguments.at_once}", f"--share={number}", f"--folder={folder}"]
    options += ["--jax"] if arguments.jax else []
    return subprocess.Popen([sys.executable, __file__, "tpu", *options], env=environment)


def look_after(arguments, folder, environment, life_s):
    """Run the supervisors, kill one now and then, and start it again."""
    luck = random.Random(arguments.seed + 1)
    numbers = range(arguments.supervisors)
    running = {number: start(arguments, folder, number, environment) for number in numbers}
    kills, next_kill = 0, time.monotonic() + 5
    while running:
        time.sleep(0.1)
        for number, process in list(running.items()):
            code = process.poll()
            if code == 0:
                del running[number]
            elif code is not None:
                running[number] = start(arguments, folder, number, environment)
        if running and time.monotonic() > next_kill:
            running[luck.choice(list(running))].send_signal(signal.SIGKILL)
            kills, next_kill = kills + 1, time.monotonic() + luck.uniform(1, 3) * life_s
    return kills


def report_recoveries(folder, work, jobs):
    store = Store(folder / "store")
    causes, recoveries, exact, failed = Counter(), [], 0, []
    for number in range(jobs):
        attempts = store.attempts(f"job{number}")
        causes.update(one.ending.cause.value for one in attempts if one.ending is not None)
        for before, after in itertools.pairwise(attempts):
            seen = before.ended_at is not None and after.first_step_at is not None
            if seen and before.ending.cause.kind is not Kind.CAPACITY:
                recoveries.append(after.first_step_at - before.ended_at)
        good = work.is_exact(f"job{number}")
        exact += good
        if not good:
            failed.append((number, [str(one.ending) for one in attempts]))
    print(f"attempts ended by: {dict(causes.most_common())}")
    print(f"jobs done with the exact result: {exact} of {jobs}")
    if recoveries:
        ordered = sorted(recoveries)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        kind = "training runs" if isinstance(work, Jax) else "light jobs"
        report_percentiles(kind.replace(" ", "_"), f"{jobs:,} {kind}", ordered, p99)
    for one in failed[:5]:
        print("  not exact:", one)


def report_percentiles(key, jobs, ordered, p99):
    """Report the time from the end of an attempt to the first step of the next one."""
    what = f"recovery of {jobs}, {len(ordered)} interruptions"
    median = statistics.median(ordered)
    report(
        Result(f"{what}, p50", median, "s", key=f"{key}_p50", form=".1f", **HELD_TO_TARGET),
        Result(f"{what}, p99", p99, "s", key=f"{key}_p99", form=".1f", **HELD_TO_TARGET),
    )


def run_tpu(options):
    """Many jobs on the emulated Cloud TPU at once, with everything going wrong that can.

    Each job is a light program whose result shows a step that was lost or done twice, or with
    --jax a `tpukit train` whose every loss is compared with those of a run left in peace. Pods
    live a few seconds before they are taken away, with and without a notice; zones run out of
    capacity; replies get lost, calls fail; supervisors are killed with SIGKILL and started again.
    In the end every job must be done with the exact result, and nothing may be left: no pod, no
    process.
    """
    kind = Jax if options.jax else Light
    if options.share is not None:
        share = (options.share, options.supervisors, options.jobs, options.at_once)
        supervise(options.folder, kind(options.folder), *share)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("saved", "outcomes"):
            (folder / name).mkdir()
        work = kind(folder)
        work.prepare()
        life_s = work.spot_life_s
        pace = CloudPace(
            decide_s=0.05, start_s=0.3, start_spread=0.8, notice_s=1.0, spot_life_s=life_s
        )
        world = World({zone: Zone({"v6e": 256}) for zone in ZONES}, pace=pace, seed=options.seed)
        doubles, over, begun = Doubles(world), threading.Event(), time.monotonic()
        with CloudTPURehearsal(folder / "cloud", world=world) as cloud:
            (folder / "launch.json").write_text(json.dumps(cloud.settings))
            cloud.api.faults.add(Fault(Mishap.LOST_REPLY, "*", times=None, share=0.03))
            cloud.api.faults.add(Fault(Mishap.OUTAGE, "*", times=None, share=0.03))
            threading.Thread(target=trouble, args=(cloud, options.seed, over, work)).start()
            environment = {
                **os.environ,
                **cloud.environment,
                "TPUKIT_STATE_DIR": str(folder / "state"),
            }
            kills = look_after(options, folder, environment, life_s)
            over.set()
            cloud.api.faults.clear()
            time.sleep(1)
            left = [held.name.rsplit("/", 1)[1] for held in world.holdings()]
            processes = [one for one in psutil.process_iter() if _is_ours(one, cloud)]
            took = time.monotonic() - begun
        print(f"{options.jobs} jobs in {took:.0f} s; {kills} supervisors killed")
        print(f"pods by stage that they came to: {dict(doubles.stages)}")
        report_recoveries(folder, work, options.jobs)
        print(f"two pods at once for one job: {len(doubles.found)} {doubles.found[:3]}")
        print(f"pods left: {len(left)} {left[:5]}; processes left on machines: {len(processes)}")


def _is_ours(process, cloud):
    try:
        return process.environ().get(MARK, "").startswith(f"{cloud.hosts.token}/")
    except psutil.Error:
        return False


GKE_STEPS = 30
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
    for step in range(GKE_STEPS):
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    return f'[{GKE_STEPS}, "{state}"]'


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


def run_gke(options):
    """Run jobs on an emulated GKE cluster with evictions of every kind, and check every result.

    A job is a light deterministic program on two hosts that saves after every step. It is
    supervised as `tpukit launch` does it, while its Pods and nodes are taken away at random. At
    the end its result must be that of a run that nobody disturbed, and nothing may be left in the
    cluster.
    """
    pools = [tpu_pool(ON, name=f"p{number}") for number in range(options.together)]
    folder = Path(tempfile.mkdtemp(prefix="pods-gke-"))
    launch = LaunchSettings(image="emulated", max_restarts=20)
    began = time.monotonic()
    with KubernetesEmulator(pools, pace=Pace(shutdown_grace_s=0.5, node_gone_s=0.5)) as emulator:
        os.environ["KUBECONFIG"] = str(emulator.kubeconfig)
        disturber = Disturber(emulator, options.seed)

        def run(number):
            own = folder / str(number)
            own.mkdir()
            command = Command(
                argv=("python3", "-S", "-c", WORKER, str(own), str(GKE_STEPS)), first_step_s=60
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

        with ThreadPoolExecutor(options.together) as pool:
            results = list(pool.map(run, range(options.jobs)))
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
    print(f"{options.jobs} jobs in {time.monotonic() - began:.0f} s, {options.together} at a time")
    print(f"done: {sum(one.is_done for one in outcomes)}, with the undisturbed result: {right}")
    for outcome in outcomes:
        if not outcome.is_done:
            print(f"  not done: {outcome.__rich__()}")
    print(f"disturbed: {dict(sorted(disturber.done.items()))}")
    print(f"interruptions: {len(losses)}, {len(downtimes)} with steps after them; causes: {causes}")
    if downtimes:
        p99 = downtimes[min(len(downtimes) - 1, int(0.99 * len(downtimes)))]
        report_percentiles("gke", f"{options.jobs:,} light jobs on Kubernetes", downtimes, p99)
    print(f"orphans that the last pass removed: {len(orphans)}")
    print(f"left in the cluster: {left}, processes: {processes}")


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        tpu=run_tpu,
        gke=run_gke,
    )
