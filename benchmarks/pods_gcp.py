"""How fast provider gcp is on the emulated Cloud TPU, and how soon each error is clear.

    python benchmarks/pods_gcp.py [--pods 1000]

Prints calls of Google's client over TLS, a pod from its request to its first line, every error
with the time it took, and what listing many pods costs.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tpukit.errors import TPUError
from tpukit.job.sections import LaunchSettings
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.gcp.provider import CloudTPUProvider
from tpukit.pods.providers.protocol import Command, Line
from tpukit_emulators.holding import Pace, Zone
from tpukit_emulators.identity import Authority
from tpukit_emulators.rehearsal import CloudTPURehearsal
from tpukit_emulators.tpu_api.server import TPUAPI
from tpukit_emulators.world import World

ZONE = "us-east5-b"
CONFIG = PodConfig(tpu_type="v6e-16", zones=(ZONE,)).with_preemptible()
PACE = Pace(decide_s=0.0, start_s=0.0, release_s=0.0, notice_s=1.0)


def spread(seconds):
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"p50 {1e3 * statistics.median(ordered):.1f} ms, p99 {1e3 * p99:.1f} ms"


def timed(call, times):
    seconds = []
    for number in range(times):
        begun = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - begun)
    return seconds


def until_ready(provider, name):
    while not (pod := provider.get(name, zone=ZONE)).is_ready:
        time.sleep(0.002)
    return pod


def measure_life(provider):
    ready, first_line = [], []
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
        provider.delete(name, zone=ZONE)
    print(f"request → ready (4 hosts, no waiting of its own):   {spread(ready)}")
    print(f"start → a line of every one of 4 hosts over ssh:    {spread(first_line)}")


def measure_calls(provider):
    provider.create("calls-a1", CONFIG)
    until_ready(provider, "calls-a1")
    print("get of a ready pod (2 calls):                       ", end="")
    print(spread(timed(lambda _: provider.get("calls-a1", zone=ZONE), 200)))
    print("get of a pod that is not there (1 call):            ", end="")
    print(spread(timed(lambda _: provider.get("nobody-a1", zone=ZONE), 200)))
    provider.delete("calls-a1", zone=ZONE)


def measure_errors(cloud, launch, folder):
    key = json.loads(cloud.api.owner.key_file.read_text())
    other = json.loads(cloud.api.accounts.add("other").key_file.read_text())
    wrong = folder / "wrong.json"
    wrong.write_text(json.dumps({**key, "private_key": other["private_key"]}))
    reader = cloud.api.accounts.add("reader", may=("tpu.*.get", "tpu.*.list"))
    silent = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"localhost:{closed.getsockname()[1]}"
    cases = {
        "wrong key": ({"credentials_file": str(wrong)}, CONFIG),
        "no such key file": ({"credentials_file": str(folder / "none")}, CONFIG),
        "too few permissions": ({"credentials_file": str(reader.key_file)}, CONFIG),
        "quota": ({}, replace(CONFIG, tpu_type="v6e-256")),
        "bad zone": ({}, CONFIG.in_zone("us-east5-bb")),
        "type not offered": ({}, replace(CONFIG, tpu_type="v5p-8")),
        "TPU7x": ({}, replace(CONFIG, tpu_type="tpu7x-2x2x1")),
        "nobody listens": ({"endpoint": nobody}, CONFIG),
        "nobody answers": ({"endpoint": f"localhost:{silent.getsockname()[1]}"}, CONFIG),
        "no such host": ({"endpoint": "tpu.invalid:443"}, CONFIG),
    }
    for title, (update, config) in cases.items():
        provider = CloudTPUProvider(launch.model_copy(update=update))
        begun = time.perf_counter()
        try:
            provider.create("never-a1", config)
        except TPUError as error:
            took = time.perf_counter() - begun
            print(f"  {title:20} {took:5.2f} s  {type(error).__name__}: {str(error)[:90]}…")
        else:
            raise AssertionError(f"{title}: no error")
    silent.close()
    assert not cloud.world.holdings(), "something was created"
    print("  nothing was created")


def measure_many(folder, authority, count):
    """Without machines: what is measured is the API, and our reading of it."""
    world = World({ZONE: Zone({"v6e": 8 * count})}, pace=PACE)
    api = TPUAPI(folder, authority=authority, world=world)
    launch = LaunchSettings(
        project=api.project,
        endpoint=api.endpoint,
        credentials_file=str(api.owner.key_file),
    )
    provider = CloudTPUProvider(launch)
    config = PodConfig(tpu_type="v6e-8", zones=(ZONE,), labels={"owner": "me"})
    begun = time.perf_counter()
    for number in range(count):
        provider.create(f"many-a{number}", config)
    print(f"{count} pods created one after another in {time.perf_counter() - begun:.1f} s")
    seconds = timed(lambda _: provider.list(owner="me"), 3)
    assert sum(pod.is_ready for pod in provider.list(owner="me")) == count
    print(f"{count} pods listed, with their hosts: {spread(seconds)}")
    begun = time.perf_counter()
    for number in range(count):
        provider.delete(f"many-a{number}", zone=ZONE)
    print(f"{count} pods deleted one after another in {time.perf_counter() - begun:.1f} s")
    api.close()
    world.clock.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1000)
    pods = parser.parse_args().pods
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["TPUKIT_STATE_DIR"] = str(folder / "state")
        authority = Authority(folder / "authority")
        world = World({ZONE: Zone({"v6e": 1024}, spot_quota={"v6e": 128})}, pace=PACE)
        with CloudTPURehearsal(folder / "cloud", world=world, authority=authority) as cloud:
            os.environ.update(cloud.environment)
            launch = LaunchSettings(**cloud.settings)
            provider = CloudTPUProvider(launch)
            measure_life(provider)
            measure_calls(provider)
            while cloud.world.holdings():
                time.sleep(0.01)
            print("errors:")
            measure_errors(cloud, launch, folder)
        measure_many(folder / "many", authority, pods)


if __name__ == "__main__":
    main()
