"""What the monitor costs a training loop, and how long a scrape of a pod's series takes.

- monitor: CPU seconds of every thread that the monitor starts (its own, gRPC's, Prometheus's), by
  the kernel's count, over the wall time of a training loop it watches at 1 Hz: that is the most of
  a step it can take. It reads all there is: libtpu's metrics of 8 chips (a loopback server in
  another process, where tpu-info is installed), jax, psutil, the trainer's records, a check's
  report; it writes readings.jsonl, holds two alert rules, and is scraped every 15 seconds. What
  it takes to start (importing gRPC) is counted apart.
- scrape: HTTP requests for 5,120 series of 512 chips on 128 hosts, each after new readings, so that
  none is answered from what was written before. Wall time means something on a machine that does
  nothing else; CPU time of the server is what a busy one does not change.

On a machine with NVIDIA GPUs the first line shows what NVML says of them.

Usage: JAX_PLATFORMS=cpu python benchmarks/observe_monitor.py [--seconds 30] [--scrapes 200]
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import jax
from claims import Claim, report

from tpukit.hardware import detect_accelerators
from tpukit.observe import TPUMonitor
from tpukit.observe.exporters.prometheus import PrometheusExporter
from tpukit.observe.exporters.prometheus_text import Labels
from tpukit.observe.monitor.collector import default_sources
from tpukit.observe.readings import Reading, Sample
from tpukit.observe.sources.libtpu_grpc import LibtpuSource
from tpukit.observe.sources.nvml import NvmlSource

WIDTH, BATCH = 512, 256
SCRAPED_EVERY_S = 15.0
CHIP_METRICS = (
    *("duty_cycle", "tensorcore_utilization", "memory_bandwidth_utilization", "memory_used"),
    *("memory_total", "memory_peak", "hlo_queue_size", "idle_seconds", "throttle_score"),
    "temperature_celsius",
)


def serve_libtpu(pipe):
    """A process that serves the metrics of eight chips."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from libtpu_server import Chips, LibtpuServer

    eight = [0.5] * 8
    chips = Chips(
        used=[4e9] * 8,
        total=[32e9] * 8,
        duty=[97.0] * 8,
        bandwidth=eight,
        idle=eight,
        queue=[2] * 8,
    )
    pipe.send(LibtpuServer(chips).port)
    pipe.recv()


class ThreadClock:
    """CPU seconds of the threads that were started since it was made."""

    def __init__(self):
        self._others = set(self._threads())

    def seconds(self):
        """What they used so far, by the kernel's count in nanoseconds."""
        mine = set(self._threads()) - self._others
        return sum(self._nanoseconds(thread) for thread in mine) / 1e9

    def _threads(self):
        return [path.name for path in Path("/proc/self/task").iterdir()]

    def _nanoseconds(self, thread):
        try:
            return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
        except OSError:
            return 0  # it has ended


def training_step():
    @jax.jit
    def step(weights, batch):
        def loss(weights):
            x = batch
            for layer in weights:
                x = jax.nn.silu(x @ layer)
            return (x**2).mean()

        value, slopes = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda one, slope: one - 1e-3 * slope, weights, slopes), value

    keys = jax.random.split(jax.random.key(0), 9)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[:8]]
    return step, weights, jax.random.normal(keys[8], (BATCH, WIDTH))


def watch_training(seconds, folder, sources):
    """(CPU seconds of the monitor, wall seconds, CPU seconds of its start, rounds of readings)."""
    step, weights, batch = training_step()
    weights, value = step(weights, batch)
    value.block_until_ready()
    metrics = (folder / "metrics.jsonl").open("w", buffering=1)
    clock = ThreadClock()
    monitor = TPUMonitor(
        1.0, enable_prometheus=True, prometheus_port=0, run_dir=folder, sources=sources
    )
    monitor.set_alert("utilization", "<", 0.1, "log", for_s=60)
    monitor.set_alert("memory_usage_gb", ">", 30, "log", for_s=60)
    with monitor:
        url, next_scrape, steps = monitor.prometheus_url, 0.0, 0
        while len(monitor.get_history()) < 2:
            time.sleep(0.05)
        started, before = clock.seconds(), len(monitor.get_history())
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            weights, value = step(weights, batch)
            loss = float(value)
            steps += 1
            record = {"step": steps, "loss": loss, "step_time_s": passed / steps}
            metrics.write(json.dumps({**record, "mfu": 0.4, "time": time.time()}) + "\n")
            if passed >= next_scrape:
                next_scrape += SCRAPED_EVERY_S
                # In a thread of the loop's: the cost of asking is Prometheus's, not the monitor's.
                urllib.request.urlopen(url, timeout=10).read()
        used, wall = clock.seconds() - started, time.perf_counter() - began
        rounds = len(monitor.get_history()) - before
        print(
            f"{steps} steps of {wall / steps * 1e3:.1f} ms, {rounds} rounds of readings, "
            f"{used / rounds * 1e3:.2f} ms CPU a round"
        )
    metrics.close()
    return used, wall, started, rounds


def pod_readings(moment):
    """Readings of 128 hosts with 4 chips each, other numbers every time."""
    return [
        Reading(
            moment,
            f"host-{host}",
            host,
            "libtpu grpc",
            tuple(
                Sample(metric, (moment * 1e-6 + chip * host) % 1, chip)
                for metric in CHIP_METRICS
                for chip in range(4)
            ),
        )
        for host in range(128)
    ]


def time_scrapes(count):
    """(wall seconds of each scrape, CPU seconds of the server a scrape, bytes)."""
    exporter = PrometheusExporter(0, labels=Labels(model="tpu-v6e-slice", tpu_topology="16x32"))
    walls, cpus, size = [], [], 0
    for _ in range(count):
        exporter.export(pod_readings(time.time()))
        before = time.process_time() - time.thread_time()  # the client is this thread
        began = time.perf_counter()
        with urllib.request.urlopen(exporter.url, timeout=60) as answer:
            size = len(answer.read())
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - time.thread_time() - before)
    exporter.close()
    return walls, cpus, size


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--scrapes", type=int, default=200)
    options = parser.parse_args()
    here = detect_accelerators()
    if here.kind == "gpu":
        print(json.dumps(NvmlSource().read().to_dict()))
    asked, answers = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=serve_libtpu, args=(answers,), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = default_sources(here, run_dir=folder)
        if asked.poll(60):
            sources = (LibtpuSource(f"localhost:{asked.recv()}"), *sources)
        print("sources:", ", ".join(source.name for source in sources))
        used, wall, started, rounds = watch_training(options.seconds, folder, sources)
        kept = (folder / "hosts" / "0" / "readings.jsonl").stat().st_size
    server.kill()
    walls, cpus, size = time_scrapes(options.scrapes)
    assert threading.active_count() < 20
    worst, worst_cpu = (statistics.quantiles(times, n=100)[98] for times in (walls, cpus))
    report(
        Claim("monitor at 1 Hz, CPU time over the loop's wall time", used / wall * 100, "%", 0.5),
        Claim("its start, CPU time", started * 1e3, "ms"),
        Claim("readings.jsonl, bytes a second", kept / wall, "B/s"),
        Claim("scrape of 512 chips' series, median", statistics.median(walls) * 1e3, "ms"),
        Claim("scrape of 512 chips' series, p99", worst * 1e3, "ms", at_most=20.0),
        Claim("  CPU time of the server a scrape, median", statistics.median(cpus) * 1e3, "ms"),
        Claim("  CPU time of the server a scrape, p99", worst_cpu * 1e3, "ms", at_most=20.0),
        Claim("  size of the answer", size / 1e3, "kB"),
    )
    assert rounds >= options.seconds - 2, "the monitor lost rounds"


if __name__ == "__main__":
    main()
