"""Costs of watching: monitor, profiler and `tpukit top`.

python benchmarks/observe.py monitor
python benchmarks/observe.py profile
python benchmarks/observe.py top
"""

import json
import multiprocessing
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from harness import (
    HELD_TO_TARGET,
    MEASURED,
    Result,
    Subcommand,
    read_command_line,
    report,
    run_command,
)

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "monitor",
        "CPU time of the monitor and of a Prometheus scrape",
        options={
            "--seconds": {"type": float, "default": 30.0},
            "--scrapes": {"type": int, "default": 200},
        },
    ),
    Subcommand(
        "profile",
        "verdicts and cost of the profiler",
        options={
            "--details": {"action": "store_true", "help": "print what the files hold"},
        },
    ),
    Subcommand(
        "top",
        "seconds of `tpukit top`, and of reading long metrics files",
        options={
            "--lines": {"type": int, "default": 10_000_000},
            "--runs": {"type": int, "default": 7},
        },
    ),
)

import jax
from bound_programs import compute_step, programs
from recorded_run import write_run

from tpukit.hardware import detect_accelerators
from tpukit.observe import Run, TPUMonitor, TPUProfiler
from tpukit.observe.exporters.prometheus import Labels, PrometheusExporter
from tpukit.observe.monitor.collector import default_sources
from tpukit.observe.profiling.judging import KINDS
from tpukit.observe.profiling.profile import Profile
from tpukit.observe.readings import Reading, Sample
from tpukit.observe.sources.libtpu_grpc import LibtpuSource
from tpukit.observe.sources.machine import NvmlSource
from tpukit.records.attempts import AttemptRecorder
from tpukit.records.ledger import Ledger

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


def run_monitor(options):
    """What the monitor costs a training loop, and how long a scrape of a pod's series takes.

    - monitor: CPU seconds of every thread that the monitor starts (its own, gRPC's, Prometheus's)
      over the wall time of a training loop that it watches at 1 Hz. It reads libtpu's metrics of 8
      chips (a loopback server, where tpu-info is installed), jax, psutil, the trainer's records
      and a check's report; it writes readings.jsonl, holds two alert rules, and is scraped every
      15 seconds. Its start (importing gRPC) is counted apart.
    - scrape: HTTP requests for 5,120 series of 512 chips on 128 hosts, each after new readings.
      Wall time is meaningful on an idle machine only; CPU time of the server on any.

    On a machine with NVIDIA GPUs the first line shows what NVML says of them.
    """
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
        Result(
            "monitor at 1 Hz with every source, CPU time over a training loop's time",
            used / wall * 100,
            "%",
            at_most=0.5,
            key="monitor",
            form=".2f",
            **HELD_TO_TARGET,
        ),
        Result("start of the monitor, CPU time", started * 1e3, "ms"),
        Result("readings.jsonl, bytes a second", kept / wall, "B/s"),
        Result("scrape of 512 chips' series, median", statistics.median(walls) * 1e3, "ms"),
        Result("scrape of 512 chips' series, p99", worst * 1e3, "ms", at_most=20.0),
        Result("CPU time of the server per scrape, median", statistics.median(cpus) * 1e3, "ms"),
        Result(
            "Prometheus scrape of 512 chips' 5,120 series, CPU time of the server, p99",
            worst_cpu * 1e3,
            "ms",
            at_most=20.0,
            key="scrape_p99",
            form=".1f",
            **HELD_TO_TARGET,
        ),
        Result("size of a scrape's answer", size / 1e3, "kB"),
    )
    assert rounds >= options.seconds - 2, "the monitor lost rounds"


STEPS = 5
TIMED_STEPS, ROUNDS = 20, 7


def record(
    step: Callable[[], object], folder: Path, name: str, *, python_calls: bool
) -> tuple[float, float]:
    """Record a few steps; returns wall and CPU seconds a step."""
    profiler = TPUProfiler(folder, capture_memory=False, python_calls=python_calls)
    with profiler.profile(name):
        return timed(step)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds a step, waiting for each."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(TIMED_STEPS):
        jax.block_until_ready(step())
    ended, cpu_ended = time.perf_counter(), time.process_time()
    return (ended - began) / TIMED_STEPS, (cpu_ended - cpu) / TIMED_STEPS


def show(kind: str, profile: Profile, *, details: bool) -> bool:
    """Print what was found; returns whether it is what the program was made for."""
    analysis = profile.analysis
    found = ", ".join(f"{one} {analysis.shares[one]:.1%}" for one in KINDS)
    verdict = "right" if analysis.largest == kind else "WRONG"
    print(f"{kind:<14} {verdict}: {found}")
    intensity = analysis.judged_by_intensity
    unknown = [op for op in analysis.ops if not op.opcode]
    print(
        f"{'':<14} {analysis.where}, {1e3 * analysis.duration_s:.1f} ms; by intensity "
        f"{'–' if intensity is None else f'{intensity:.0%}'}; against {analysis.roof}; "
        f"{len(unknown)} of {len(analysis.ops)} ops in no recorded program"
    )
    for op in analysis.ops[:3]:
        print(
            f"{'':<14} {op.name[:50]:<50} {op.kind:<13} by {op.by:<9} "
            f"{1e6 * op.seconds:10.1f} us in {op.times:3d}  {op.where}"
        )
    if details:
        show_lines(profile)
    return analysis.largest == kind


def show_lines(profile: Profile) -> None:
    """Print rows, kernels and properties of the file, for whoever meets a new device."""
    for host in profile.recording.hosts:
        print(f"  programs {sorted({str(name) for name in host.programs})}")
        print(f"  host: {Counter(event.name for event in host.host.transfers).most_common(4)}")
        for track in host.devices:
            print(f"  {track.name} {dict(track.properties)}")
            lines = Counter(op.line for op in track.ops)
            for line, count in lines.items():
                names = Counter((op.kernel[:60], op.name) for op in track.ops if op.line == line)
                print(f"    {line}: {count} ops, {names.most_common(4)}")


def overhead() -> dict[str, float]:
    """How much longer a recorded step takes, and what one recording costs beside its steps."""
    step = compute_step()
    jax.block_until_ready(step())
    taken: dict[str, list[tuple[float, float]]] = {"bare": [], "calls": [], "no calls": []}
    beside: list[float] = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            taken["bare"].append(timed(step))
            for name, python_calls in (("calls", True), ("no calls", False)):
                cpu = time.process_time()
                into = Path(folder) / f"{name} {number}"
                taken[name].append(record(step, into, name, python_calls=python_calls))
                steps = TIMED_STEPS * taken[name][-1][1]
                beside.append(time.process_time() - cpu - steps)
    medians = {
        (name, at): statistics.median(one[at] for one in found)
        for name, found in taken.items()
        for at in (0, 1)
    }
    return {
        "a recorded step longer, wall": medians["calls", 0] / medians["bare", 0] - 1,
        "a recorded step longer, CPU": medians["calls", 1] / medians["bare", 1] - 1,
        "the same without Python calls, wall": medians["no calls", 0] / medians["bare", 0] - 1,
        "the same without Python calls, CPU": medians["no calls", 1] / medians["bare", 1] - 1,
        "beside": statistics.median(beside),
    }


def run_profile(options):
    """Four programs, each bound by one thing: what the profiler says of them, and what it costs.

    The programs run on whatever device is here (CPU, GPU, TPU). For each: the shares, how much of
    the ops' time was judged by FLOPs and bytes of the recorded program, how much of it belongs to
    no recorded op, and the largest ops. Then the cost of recording, on the program of products:
    seconds a step without a trace, with one, and with one that leaves out Python calls, turn by
    turn, medians of rounds; on a busy machine the CPU seconds of the process say more. Last, what
    a recording costs once: starting, waiting, writing. On a CPU, communication takes virtual
    devices (`XLA_FLAGS=--xla_force_host_platform_device_count=8`).
    """
    details = options.details
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    right = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, step in programs().items():
            profiler = TPUProfiler(Path(folder) / kind)
            with profiler.profile(kind):
                for _ in range(STEPS):
                    step()
            began = time.perf_counter()
            profile = profiler.profiles()[-1]
            right.append(show(kind, profile, details=details))
            page = profiler.generate_report()
            seconds = time.perf_counter() - began
            size = page.stat().st_size / 1e3
            print(f"{'':<14} read, analyzed and written in {seconds:.2f} s, page of {size:.0f} kB")
    if jax.device_count() == 1:
        print("communication  not run: there is one device")
    costs = overhead()
    beside = costs.pop("beside")
    report(
        Result(
            "programs bound by compute, memory, communication or input, judged as such",
            (sum(right), len(right)),
            at_least=len(right),
            key="judged",
            form=".0f",
            joint=" of ",
            **HELD_TO_TARGET,
        ),
        *(Result(what, 100 * share, "%", form=".1f", **MEASURED) for what, share in costs.items()),
        Result(
            "CPU time of one recording beside its steps: starting, waiting, writing",
            beside,
            "s",
            key="recording",
            form=".2f",
            **MEASURED,
        ),
    )
    return len(right) - sum(right)


TOP_S = 1.0
TOP_STEPS = 200_000


def screen(folder: Path, *words: str, runs: int) -> tuple[float, float]:
    """Return (median wall, median CPU) seconds of one screen in a fresh process."""
    command = [sys.executable, "-m", "tpukit", "top", "--once", *words]
    walls, cpus = [], []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(walls), statistics.median(cpus)


def top_record(step: int, dice: random.Random) -> str:
    """Return a line as the trainer writes it."""
    values = {
        "step": step,
        "loss": 2 + dice.random(),
        "grad_norm": dice.random(),
        "learning_rate": 1e-4 * dice.random(),
        "step_time_s": dice.random(),
        "input_stall_s": 1e-4 * dice.random(),
        "tokens_per_s_per_chip": 1e4 * dice.random(),
        "mfu": dice.random(),
        "time": 1.7e9 + step * 0.5,
    }
    return json.dumps(values) + "\n"


def reading(folder: Path, lines: int) -> list[Result]:
    """Read a long file once, then poll it as a dashboard does."""
    (folder / "run.json").write_text("{}")
    dice = random.Random(0)
    block = [top_record(step, dice) for step in range(10_000)]
    with (folder / "metrics.jsonl").open("w") as file:
        for begin in range(0, lines, len(block)):
            file.writelines(
                line.replace('"step": ', f'"step": {begin // len(block) + 1}', 1)
                for line in block[: lines - begin]
            )
    run = Run(folder)
    cpu = time.process_time()
    series = run.series("loss")
    once = time.process_time() - cpu
    assert series.total == lines
    assert len(series) <= 1000
    polls, thinned = [], []
    for step in range(20):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(top_record(lines + step, dice))
        cpu = time.process_time()
        run.summary()
        polls.append(time.process_time() - cpu)
        cpu = time.process_time()
        assert run.series("mfu").total == lines + step + 1
        thinned.append(time.process_time() - cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = f"{lines:.0e}".replace("e+0", "e")
    return [
        Result(
            f"a metrics file of {size} lines read once, CPU time",
            once,
            "s",
            key="long_file",
            form=".0f",
            **MEASURED,
        ),
        Result("CPU time per line of that file", once / lines * 1e6, "µs"),
        Result(
            "summary of that run after a new line, CPU time",
            statistics.median(polls) * 1e3,
            "ms",
            key="long_summary",
            form=".0f",
            **MEASURED,
        ),
        Result(
            "a new line and a series of 1,000 points of that run, CPU time",
            statistics.median(thinned) * 1e3,
            "ms",
            key="long_series",
            form=".0f",
            **MEASURED,
        ),
        Result(
            "peak memory of that reader", peak, "GiB", key="long_memory", form=".1f", **MEASURED
        ),
    ]


def recording(folder: Path) -> Result:
    """Return what a step pays for its records."""
    ledger = Ledger()
    recorder = AttemptRecorder(folder, process=0, ledger=ledger)
    recorder.start(step=0)
    seconds = {"step_time_s": 0.5, "input_s": 0.001, "input_stall_s": 0.0}
    seconds |= {"checkpoint_s": 0.0, "dispatch_s": 0.0012}
    cpu = time.thread_time()
    for step in range(1, TOP_STEPS + 1):
        recorder.stepped(step, **seconds)
    cost = (time.thread_time() - cpu) / TOP_STEPS
    recorder.close()
    assert (folder / "hosts" / "0" / "steps.jsonl").read_bytes().count(b"\n") == TOP_STEPS
    # Of a step of a tenth of a second, which is short for a chip that is worth watching.
    return Result(
        "records of a training step (events and the host's own line), CPU time",
        cost * 1e6,
        "µs",
        at_most=0.1 * 0.001 * 1e6,
        key="records",
        form=".1f",
        **MEASURED,
    )


def run_top(options):
    """What watching costs: a screen of `tpukit top`, a metrics file of 10⁷ lines, records of steps.

    CPU seconds are counted beside wall time: they do not depend on who else uses the machine.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        claims = [recording(folder / "recorded")]
        (folder / "empty").mkdir()
        wall, cpu = screen(folder / "empty", runs=options.runs)
        claims += [
            Result(
                f"`tpukit top --once` where there is no run, median of {options.runs}",
                wall,
                "s",
                at_most=TOP_S,
                key="top_empty",
                form=".2f",
                **HELD_TO_TARGET,
            ),
            Result("`tpukit top --once` where there is no run, CPU", cpu, "s", at_most=TOP_S),
        ]
        for hosts in (2, 64):
            run = write_run(folder / f"run-{hosts}", hosts, now=time.time())
            words = (str(run), "--hosts", str(run))
            wall, cpu = screen(folder, *words, runs=options.runs)
            claims += [
                Result(
                    f"`tpukit top --once`, a run of {hosts} hosts",
                    wall,
                    "s",
                    at_most=TOP_S,
                    key=f"top_{hosts}_hosts",
                    form=".2f",
                    **HELD_TO_TARGET,
                ),
                Result(f"`tpukit top --once`, {hosts} hosts, CPU", cpu, "s", at_most=TOP_S),
            ]
        report(*claims)
        (folder / "long").mkdir()
        report(*reading(folder / "long", options.lines))


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        monitor=run_monitor,
        profile=run_profile,
        top=run_top,
    )
