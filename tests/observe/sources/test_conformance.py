"""One contract for every source: gone is missing with a reason, back is seen, nothing raises."""

import ast
import http.server
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import psutil
import pytest
from libtpu_server import LibtpuServer

from tpukit.observe.readings import METRICS, Reading, Source
from tpukit.observe.sources import libtpu_sdk as libtpu_sdk_module
from tpukit.observe.sources import machine
from tpukit.observe.sources.libtpu_grpc import LibtpuSource
from tpukit.observe.sources.libtpu_sdk import LibtpuSdkSource
from tpukit.observe.sources.machine import HostSource, JaxSource, NvmlSource
from tpukit.observe.sources.prometheus import PrometheusSource
from tpukit.observe.sources.replay import ReplaySource
from tpukit.observe.sources.training import OverheadSource, ProgramSource, TrainerSource

GiB = 2**30


@dataclass
class Rig:
    """A source with what it reads: how to take that away, and how to bring it back."""

    source: Source
    metric: str
    value: float | None  # None: whatever it is now
    take_away: Callable[[], None]
    bring_back: Callable[[], None]
    settle: Callable[[], None] = lambda: None  # wait for what is read in the background


def libtpu_grpc(tmp_path, monkeypatch, after):
    server = LibtpuServer()
    after.append(server.stop)
    source = LibtpuSource(server.address, timeout_s=1.0)
    return Rig(source, "duty_cycle", 0.975, server.stop, server.start)


def libtpu_sdk(tmp_path, monkeypatch, after):
    """A stand-in for the SDK, with the rows its documentation shows: the real one needs a TPU."""
    package = tmp_path / "site" / "libtpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sdk.py").write_text(
        "class _Metric:\n"
        "    def __init__(self, rows): self._rows = rows\n"
        "    def data(self): return self._rows\n"
        "class tpumonitoring:\n"
        "    @staticmethod\n"
        "    def get_metric(name):\n"
        "        if name == 'tpu_throttle_score': raise RuntimeError('no such metric')\n"
        "        rows = {'tensorcore_util': ['14.5', '20.0'],\n"
        "                'ici_link_health': ['tray1.chip3.ici0.int: 10']}\n"
        "        return _Metric(rows[name])\n"
    )
    bus = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:00:04.0"
    bus.mkdir(parents=True)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{before}")

    def plug_in():
        (bus / "vendor").write_text("0x1ae0\n")
        (bus / "device").write_text("0x006f\n")

    plug_in()
    monkeypatch.setattr(libtpu_sdk_module, "jax_state", lambda: "initialised")
    source = LibtpuSdkSource(root=tmp_path, every_s=0.0, timeout_s=60.0)

    def settle():
        source.read()
        source.wait()

    gone = (bus / "device").unlink
    return Rig(source, "tensorcore_utilization", 0.145, gone, plug_in, settle)


def jax_devices(tmp_path, monkeypatch, after):
    statistics = {"bytes_in_use": 3 * GiB, "bytes_limit": 30 * GiB, "peak_bytes_in_use": 9 * GiB}
    answers: list[object] = [statistics]

    def memory_stats():
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    device = SimpleNamespace(device_kind="TPU v6 lite", memory_stats=memory_stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(machine, "jax_state", lambda: "initialised")
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: device lost")
    return Rig(
        JaxSource(),
        "memory_used",
        3 * GiB,
        lambda: answers.append(lost),
        lambda: answers.append(statistics),
    )


def nvml(tmp_path, monkeypatch, after):
    """The names that NVML's binding has, over a GPU that can be lost; no driver is here."""
    import pynvml

    there = [True]

    def ask(value):
        def answer(*_):
            if not there[0]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return value

        return answer

    for name, value in {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetPowerUsage": 312_500,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=83, memory=20),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 * GiB, total=139 * GiB),
        "nvmlDeviceGetTemperature": 61,
    }.items():
        monkeypatch.setattr(pynvml, name, ask(value))
    return Rig(
        NvmlSource(),
        "power_watts",
        312.5,
        lambda: there.__setitem__(0, False),
        lambda: there.__setitem__(0, True),
    )


def host(tmp_path, monkeypatch, after):
    real = psutil.virtual_memory

    def unmounted():
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    return Rig(
        HostSource(),
        "host_memory_total",
        real().total,
        lambda: monkeypatch.setattr(psutil, "virtual_memory", unmounted),
        lambda: monkeypatch.setattr(psutil, "virtual_memory", real),
    )


def trainer(tmp_path, monkeypatch, after):
    file = tmp_path / "metrics.jsonl"

    def write():
        record = {"step": 7, "loss": 2.5, "step_time_s": 0.25, "mfu": 0.4, "time": time.time()}
        file.write_text(json.dumps(record) + "\n")

    write()
    return Rig(TrainerSource(tmp_path), "step_time_seconds", 0.25, file.unlink, write)


def scraped(tmp_path, monkeypatch, after):
    text = (
        "# HELP jax_orbax_write_gbytes written\n# TYPE jax_orbax_write_gbytes gauge\n"
        "jax_orbax_write_gbytes 12.5\n"
        "# TYPE grain_python_dataset_next_duration_ns histogram\n"
        'grain_python_dataset_next_duration_ns_bucket{le="+Inf"} 2\n'
        "grain_python_dataset_next_duration_ns_sum 40\n"
        "grain_python_dataset_next_duration_ns_count 2\n"
        "# TYPE python_info gauge\npython_info 1\n"
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    servers: list[http.server.HTTPServer] = []

    def start():
        port = servers[0].server_address[1] if servers else 0
        server = http.server.HTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)

    def stop():
        servers[-1].shutdown()
        servers[-1].server_close()

    start()
    after.append(stop)
    port = servers[0].server_address[1]
    source = PrometheusSource(f"http://127.0.0.1:{port}/metrics")
    return Rig(source, "jax_orbax_write_gbytes", 12.5, stop, start)


def replayed(tmp_path, monkeypatch, after):
    file = tmp_path / "readings.jsonl"
    reading = {
        "time": 1.0,
        "host": "a",
        "process": 0,
        "source": "jax",
        "samples": [{"metric": "memory_used", "value": 5.0, "chip": 0}],
        "missing": {},
    }

    def write():
        file.write_text(json.dumps(reading) + "\n" + '{"time": 2.0, "host"')  # half a line

    write()
    return Rig(ReplaySource(file), "memory_used", 5.0, file.unlink, write)


def overhead(tmp_path, monkeypatch, after):
    file = tmp_path / "profile" / "report.json"
    file.parent.mkdir()

    def write():
        file.write_text(json.dumps({"analysis": {"communication_bound": 0.25}}))

    write()
    return Rig(OverheadSource(tmp_path), "communication_overhead", 0.25, file.unlink, write)


def program(tmp_path, monkeypatch, after):
    """A loop of one's own: gone when it no longer tells of its steps."""
    now = [0.0]
    source = ProgramSource(clock=lambda: now[0])

    def steps():
        for _ in range(2):
            now[0] += 0.5
            source.record(loss=1.0, flops=4e12, samples=8)

    def silence():
        now[0] += 1000.0

    steps()
    return Rig(source, "tflops", 8.0, silence, steps)


RIGS = [
    *(libtpu_grpc, libtpu_sdk, jax_devices, nvml, host, trainer, scraped, replayed),
    *(overhead, program),
]


@pytest.fixture(params=RIGS, ids=lambda make: make.__name__)
def rig(request, tmp_path, monkeypatch):
    after: list[Callable[[], object]] = []
    made = request.param(tmp_path, monkeypatch, after)
    yield made
    made.source.close()
    made.source.close()  # twice is no error
    for undo in after:
        undo()


def check(reading: Reading) -> None:
    """What holds of any reading: finite numbers of known metrics, and reasons for the others."""
    assert reading.host
    json.dumps(reading.to_dict(), allow_nan=False)
    for sample in reading.samples:
        assert sample.metric in METRICS or sample.metric.startswith(("jax_", "grain_"))
        assert sample.metric not in reading.missing
        if sample.metric in METRICS and METRICS[sample.metric].unit == "share":
            assert 0 <= sample.value <= 1
    assert all(reason.strip() for reason in reading.missing.values())


def read(rig: Rig) -> Reading:
    rig.settle()
    reading = rig.source.read()
    check(reading)
    return reading


def test_it_is_a_source(rig):
    assert isinstance(rig.source, Source)
    assert rig.source.name


def test_it_reads_what_is_there(rig):
    values = read(rig).values(rig.metric)
    assert values
    assert rig.value is None or values[0] == pytest.approx(rig.value)


def test_gone_is_missing_with_a_reason_and_back_is_seen(rig):
    assert read(rig).values(rig.metric)
    for _ in range(2):
        rig.take_away()
        for _ in range(2):
            reading = read(rig)
            assert reading.values(rig.metric) == []
            assert len(reading.missing[rig.metric]) > 10
        rig.bring_back()
        deadline = time.monotonic() + 30
        while not read(rig).values(rig.metric):
            assert time.monotonic() < deadline, "what came back was not seen"
            time.sleep(0.1)


def test_never_there_at_all_is_missing_too(rig):
    rig.take_away()
    reading = read(rig)
    assert reading.values(rig.metric) == []
    assert reading.samples == () or rig.metric not in {one.metric for one in reading.samples}
    if not isinstance(rig.source, PrometheusSource | ReplaySource):  # they cannot know the names
        assert reading.missing[rig.metric]
    assert reading.missing
    rig.bring_back()


@pytest.mark.parametrize("name", ["duty_cycle", "power_watts"])
def test_on_this_machine_without_chips_there_are_reasons_and_no_zeros(name):
    from tpukit.hardware import detect_accelerators

    if detect_accelerators().kind != "cpu":
        pytest.skip("this machine has accelerators")
    source = {"duty_cycle": LibtpuSource("localhost:1"), "power_watts": NvmlSource()}[name]
    reading = source.read()
    source.close()
    assert reading.samples == ()
    assert len(reading.missing[name]) > 10


def test_this_file_covers_every_source():
    folder = Path(machine.__file__).parent
    nodes = [node for path in folder.glob("*.py") for node in ast.parse(path.read_text()).body]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    sources = {name for name in classes if name.endswith("Source")}
    covered = {make.__name__ for make in RIGS}
    assert len(sources) == len(covered), (sources, covered)
