"""How provider gce does on the emulated Compute Engine: speed, errors, many pods, bad luck.

    python benchmarks/pods_gce.py [--pods 1000] [--runs 100] [--seconds 30]

Prints calls of Google's client over HTTP, a pod from its request to its first line, every error
with the time it took, what listing many pods costs, and then lets everything go wrong at random
while a reconciler keeps pods for many runs: in the end nothing may be left, and no run may have
held two slices at once.
"""

import argparse
import json
import os
import random
import re
import socket
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from pods_gcp import spread, timed

from tpukit.errors import TPUError
from tpukit.job.sections import LaunchSettings
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.gce.provider import ComputeEngineProvider
from tpukit.pods.providers.protocol import Command, Line
from tpukit.pods.reconciler import Reconciler
from tpukit.pods.store import ProviderRecord, Store
from tpukit_emulators.compute_api.rehearsal import ComputeEngineRehearsal
from tpukit_emulators.compute_api.server import ComputeAPI
from tpukit_emulators.faults import Fault, Mishap
from tpukit_emulators.holding import Pace, Stage, Zone
from tpukit_emulators.world import World

ZONE, OTHER = "us-central1-c", "us-east5-a"
CONFIG = PodConfig(tpu_type="tpu7x-2x2x4", zones=(ZONE,)).with_preemptible()
PACE = Pace(decide_s=0.0, start_s=0.0, release_s=0.0, notice_s=1.0)
_GROUP = re.compile(r"/(?P<run>[a-z0-9-]+)-a\d+-s(?P<slice>\d+)$")


def until_ready(provider, name):
    while not (pod := provider.get(name, zone=ZONE)).is_ready:
        time.sleep(0.002)
    return pod


def measure_life(provider):
    ready, first_line, gone = [], [], []
    for number in range(5):
        name, begun = f"life-a{number}", time.perf_counter()
        provider.create(name, CONFIG)
        pod = until_ready(provider, name)
        ready.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        command = Command(argv=("python3", "-c", "print('here')"))
        gang = provider.start(pod, command, attempt=1)
        hosts = set()
        while len(hosts) < len(pod.hosts):
            hosts |= {event.host for event in gang.wait(1) if isinstance(event, Line)}
        first_line.append(time.perf_counter() - begun)
        gang.close()
        begun = time.perf_counter()
        provider.delete(name, zone=ZONE)
        gone.append(time.perf_counter() - begun)
    print(f"request → ready (4 hosts, no waiting of its own):   {spread(ready)}")
    print(f"start → a line of every one of 4 hosts over ssh:    {spread(first_line)}")
    print(f"delete → group, policy and template are gone:       {spread(gone)}")


def measure_calls(provider):
    provider.create("calls-a1", CONFIG)
    until_ready(provider, "calls-a1")
    print("get of a ready pod (3 calls):                       ", end="")
    print(spread(timed(lambda _: provider.get("calls-a1", zone=ZONE), 200)))
    print("get of a pod that is not there (1 call):            ", end="")
    print(spread(timed(lambda _: provider.get("nobody-a1", zone=ZONE), 200)))
    provider.delete("calls-a1", zone=ZONE)


def measure_errors(cloud, launch, folder):
    key = json.loads(cloud.api.owner.key_file.read_text())
    other = json.loads(cloud.api.accounts.add("other").key_file.read_text())
    wrong = folder / "wrong.json"
    wrong.write_text(json.dumps({**key, "private_key": other["private_key"]}))
    reader = cloud.api.accounts.add("reader", may=("compute.*.get", "compute.*.list"))
    silent = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    quiet = f"http://127.0.0.1:{silent.getsockname()[1]}"
    cases = {
        "wrong key": ({"credentials_file": str(wrong)}, CONFIG),
        "no such key file": ({"credentials_file": str(folder / "none")}, CONFIG),
        "too few permissions": ({"credentials_file": str(reader.key_file)}, CONFIG),
        "quota": ({}, replace(CONFIG, tpu_type="tpu7x-4x4x8")),
        "bad zone": ({}, CONFIG.in_zone("us-central1-cc")),
        "type not offered": ({}, replace(CONFIG, tpu_type="v5p-16")),
        "older generation": ({}, replace(CONFIG, tpu_type="v4-16")),
        "nobody listens": ({"endpoint": nobody}, CONFIG),
        "nobody answers": ({"endpoint": quiet}, CONFIG),
        "no such host": ({"endpoint": "http://compute.invalid"}, CONFIG),
    }
    for title, (update, config) in cases.items():
        provider = ComputeEngineProvider(launch.model_copy(update=update))
        begun = time.perf_counter()
        try:
            provider.create("never-a1", config)
        except TPUError as error:
            took = time.perf_counter() - begun
            print(f"  {title:20} {took:5.2f} s  {type(error).__name__}: {str(error)[:90]}…")
        else:
            raise AssertionError(f"{title}: no error")
    silent.close()
    assert not cloud.api.cloud.everything(), "something was created"
    print("  nothing was created")


def connected(api):
    return LaunchSettings(
        project=api.project,
        endpoint=api.endpoint,
        credentials_file=str(api.owner.key_file),
    )


def measure_many(folder, count):
    """Without machines: what is measured is the API, and our reading of it."""
    world = World({ZONE: Zone({"7x": 8 * count})}, pace=PACE)
    api = ComputeAPI(folder, world=world)
    provider = ComputeEngineProvider(connected(api))
    config = PodConfig(tpu_type="tpu7x-2x2x2", zones=(ZONE,), labels={"owner": "me"})
    names = [f"many-a{number}" for number in range(count)]
    with ThreadPoolExecutor(16) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda name: provider.create(name, config), names))
        print(f"{count} pods created, 16 at a time, in {time.perf_counter() - begun:.1f} s")
        cpu = time.process_time()
        seconds = timed(lambda _: provider.list(owner="me"), 3)
        cpu = (time.process_time() - cpu) / 3
        assert sum(pod.is_ready for pod in provider.list(owner="me")) == count
        print(f"{count} pods listed, with their hosts: {spread(seconds)}; CPU {cpu:.2f} s of both")
        begun = time.perf_counter()
        list(pool.map(lambda name: provider.delete(name, zone=ZONE), names))
        print(f"{count} pods deleted, 16 at a time, in {time.perf_counter() - begun:.1f} s")
    assert not api.cloud.everything()
    api.close()
    world.clock.close()


class Watch:
    """Counts what happens in a world, and who holds two slices at once."""

    def __init__(self, world):
        self.stages, self.doubles, self._held = Counter(), 0, {}
        world.watch(self.see)

    def see(self, held):
        self.stages[held.stage.value] += 1
        found = _GROUP.search(held.name)
        mine = self._held.setdefault((found["run"], found["slice"]), set())
        if held.stage.has_capacity:
            mine.add(held.name)
            self.doubles += len(mine) > 1
        else:
            mine.discard(held.name)


def let_go_wrong(api, until, luck):
    """Take machines, sell zones out, break starts, until it is time to stop."""
    rules = (
        Fault(Mishap.LOST_REPLY, "*", times=None, share=0.05),
        Fault(Mishap.OUTAGE, "*", times=None, share=0.03),
        Fault(Mishap.SLOW, "*", times=None, share=0.02, pause_s=0.05),
    )
    for rule in rules:
        api.faults.add(rule)
    while time.monotonic() < until:
        time.sleep(0.05)
        held = luck.choice(api.world.holdings() or [None])
        if held is not None:
            match luck.randrange(4):
                case 0:
                    api.world.preempt(held.name, notice_s=0.0, reason="host error")
                case 1:
                    api.world.fail_start(held.name, "it would not start")
                case _:
                    api.cloud.preempt(held.name, worker=0, notice_s=0.1)
        if luck.random() < 0.2:
            zone, has = luck.choice([*api.world.zones.items()])
            api.world.sell_out(zone, luck.choice([*has.capacity]), for_s=0.5)
    api.faults.clear()


def soak(folder, runs, seconds, seed=1):
    zones = {
        ZONE: Zone({"7x": 8 * runs}, spot_quota={"7x": 6 * runs}),
        OTHER: Zone({"7x": 4 * runs, "v6e": 16 * runs}),
    }
    pace = Pace(decide_s=0.01, start_s=0.2, start_spread=0.9, release_s=0.05, spot_life_s=20.0)
    world = World(zones, pace=pace, seed=seed)
    watch = Watch(world)
    api = ComputeAPI(folder / "api", world=world)
    store = Store(folder / "store")
    reconciler = Reconciler(store)
    record = ProviderRecord.of("gce", connected(api))
    luck = random.Random(seed)
    for number in range(runs):
        name = luck.choice(["tpu7x-2x2x2", "tpu7x-2x2x2", "2xtpu7x-2x2x2"])
        config = PodConfig(tpu_type=name, zones=(ZONE, OTHER), queue_timeout_s=2.0)
        store.wanted.want(f"run{number}", config.with_preemptible(), record)
    chaos = threading.Thread(
        target=let_go_wrong, args=(api, time.monotonic() + seconds, random.Random(seed))
    )
    chaos.start()
    passes, errors = [], Counter()
    while chaos.is_alive():
        report = reconciler.run_pass()
        passes.append(report.seconds)
        errors.update(type(error).__name__ for error in report.errors.values())
    lost = watch.stages["lost"]
    for row in store.wanted.all():
        store.wanted.release(row.name)
    begun = time.monotonic()
    while store.wanted.all() or api.cloud.everything():
        reconciler.run_pass()
        assert time.monotonic() - begun < 300, [*api.cloud.everything()]
    print(
        f"{runs} runs for {seconds:g} s: {watch.stages['starting']} slices given, {lost} taken, "
        f"{watch.stages['refused']} failed to start, {len(passes)} passes ({spread(passes)}), "
        f"{api.calls} calls, errors reported and got over: {dict(errors)}"
    )
    print(f"  left: {len(world.holdings())} slices, {len(api.cloud.everything())} resources")
    print(f"  runs that held two slices in one's place: {watch.doubles}")
    assert not world.holdings()
    assert not watch.doubles
    assert watch.stages[Stage.GONE.value] > 0
    store.close()
    api.close()
    world.clock.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["TPUKIT_STATE_DIR"] = str(folder / "state")
        world = World({ZONE: Zone({"7x": 1024}, spot_quota={"7x": 64})}, pace=PACE)
        with ComputeEngineRehearsal(folder / "cloud", world=world) as cloud:
            launch = LaunchSettings(**cloud.settings)
            provider = ComputeEngineProvider(launch)
            measure_life(provider)
            measure_calls(provider)
            print("errors:")
            measure_errors(cloud, launch, folder)
        measure_many(folder / "many", asked.pods)
        soak(folder / "soak", asked.runs, asked.seconds)


if __name__ == "__main__":
    main()
