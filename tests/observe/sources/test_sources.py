"""What each source does beyond the common contract."""

import json
import os
import time
from types import SimpleNamespace

import jax
import psutil
import pytest
from child_processes import children_running

from tpukit.observe import TPUProfiler
from tpukit.observe.sources import libtpu_sdk, machine
from tpukit.observe.sources.libtpu_sdk import LibtpuSdkSource, read_answer
from tpukit.observe.sources.machine import HostSource, JaxSource, NvmlSource
from tpukit.observe.sources.replay import ReplaySource, replay
from tpukit.observe.sources.training import OverheadSource, TrainerSource, _predicted_share


def write_run(folder, *records, batch_size=None, flops_per_step=None):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": time.time(), **record}) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if batch_size is not None:
        (folder / "run.json").write_text(json.dumps({"identity": {"batch_size": batch_size}}))
    if flops_per_step is not None:
        started = {"time": 2.0, "event": "attempt started", "flops_per_step": flops_per_step}
        (folder / "events.jsonl").write_text(
            json.dumps({"time": 1.0, "event": "attempt started", "flops_per_step": 1.0})
            + "\n"
            + json.dumps(started)
            + "\n"
            + json.dumps({"event": "saved"})
            + "\n"
        )


def values(reading):
    return {sample.metric: sample.value for sample in reading.samples}


STEP = {"step": 3, "loss": 2.0, "step_time_s": 0.5, "input_stall_s": 0.1, "mfu": 0.3}


class TestTrainer:
    def test_the_newest_step_with_what_follows_from_it(self, tmp_path):
        write_run(tmp_path, STEP, batch_size=64, flops_per_step=4e12)
        found = values(TrainerSource(tmp_path).read())
        assert found["samples_per_second"] == 128
        assert found["tflops"] == 8.0
        assert found["step"] == 3
        assert found["input_stall_seconds"] == 0.1

    def test_rates_that_nobody_recorded_are_missing(self, tmp_path):
        write_run(tmp_path, STEP)
        reading = TrainerSource(tmp_path).read()
        assert "FLOPs" in reading.missing["tflops"]
        assert reading.missing["samples_per_second"]
        assert reading.missing["tokens_per_second_per_chip"]

    def test_an_evaluation_is_no_step(self, tmp_path):
        write_run(tmp_path, STEP, {"step": 3, "eval_loss": 1.0})
        assert values(TrainerSource(tmp_path).read())["loss"] == 2.0

    def test_a_line_half_written_waits(self, tmp_path):
        write_run(tmp_path, STEP)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "loss": 9.0, "step_time_s": 0.5')
            file.flush()
            source = TrainerSource(tmp_path)
            assert values(source.read())["step"] == 3
            file.write("}\n")
            file.flush()
            assert values(source.read())["step"] == 4

    def test_a_loss_that_is_not_finite_is_named(self, tmp_path):
        write_run(tmp_path, {**STEP, "loss": None, "not_finite": {"loss": "nan"}})
        assert TrainerSource(tmp_path).read().missing["loss"] == "it is nan at step 3"

    def test_a_long_file_is_read_from_its_end(self, tmp_path):
        write_run(tmp_path, *({**STEP, "step": step} for step in range(5000)))
        assert values(TrainerSource(tmp_path).read())["step"] == 4999

    def test_a_run_that_stopped_is_not_running(self, tmp_path):
        write_run(tmp_path, STEP)
        now = [1000.0]
        source = TrainerSource(tmp_path, clock=lambda: now[0])
        assert source.read().samples
        now[0] += 100
        assert "has written nothing for 100 s" in source.read().missing["step_time_seconds"]
        write_run(tmp_path, STEP, {**STEP, "step": 4})
        assert values(source.read())["step"] == 4

    def test_a_run_of_long_ago_is_not_running_either(self, tmp_path):
        write_run(tmp_path, STEP)
        os.utime(tmp_path / "metrics.jsonl", (time.time() - 7200,) * 2)
        assert "has written nothing for 7200 s" in TrainerSource(tmp_path).read().missing["step"]

    def test_a_file_from_the_future_counts_as_just_written(self, tmp_path):
        write_run(tmp_path, STEP)
        os.utime(tmp_path / "metrics.jsonl", (time.time() + 7200,) * 2)
        assert TrainerSource(tmp_path).read().samples

    def test_a_wall_clock_that_jumps_changes_nothing(self, tmp_path, monkeypatch):
        write_run(tmp_path, STEP)
        source = TrainerSource(tmp_path)
        assert source.read().samples
        real = time.time
        for jump in (86400.0, -86400.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            assert source.read().samples

    def test_slow_steps_may_take_their_time(self, tmp_path):
        write_run(tmp_path, {**STEP, "step_time_s": 100.0})
        now = [0.0]
        source = TrainerSource(tmp_path, clock=lambda: now[0])
        source.read()
        now[0] = 300.0
        assert source.read().samples

    def test_the_newest_run_is_found(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        source = TrainerSource()
        assert "no run under runs/" in source.read().missing["step"]
        write_run(tmp_path / "runs" / "old", STEP)
        os.utime(tmp_path / "runs" / "old" / "metrics.jsonl", (1, 1))
        write_run(tmp_path / "runs" / "new", {**STEP, "step": 9})
        assert values(source.read())["step"] == 9

    def test_the_reading_has_the_time_of_the_step(self, tmp_path):
        write_run(tmp_path, {**STEP, "time": 12.5})
        assert TrainerSource(tmp_path).read().time == 12.5


class TestSdk:
    ROWS = {  # noqa: RUF012
        "tensorcore_util": {"rows": ["14.50", "99.9"]},
        "ici_link_health": {"rows": ["tray1.chip3.ici0.int: 0", "tray1.chip3.ici1.int: 10"]},
        "tpu_throttle_score": {"error": "not on this chip"},
    }

    def test_rows_of_text_are_read(self):
        reading = read_answer(self.ROWS)
        assert reading.values("tensorcore_utilization") == pytest.approx([0.145, 0.999])
        links = [one for one in reading.samples if one.metric == "ici_link_health"]
        assert [(one.chip, one.value) for one in links] == [(3, 0), (3, 10)]
        assert links[1].labels == {"link": "tray1.chip3.ici1.int"}
        assert reading.missing == {"throttle_score": "libtpu's SDK: not on this chip"}

    def test_rows_without_numbers_are_missing(self):
        said = {"tensorcore_util": {"rows": ["n/a"]}, "ici_link_health": {"rows": []}}
        reading = read_answer(said)
        assert reading.samples == ()
        assert "'n/a'" in reading.missing["tensorcore_utilization"]
        assert "no program runs" in reading.missing["ici_link_health"]

    @pytest.fixture
    def plugged(self, tmp_path, monkeypatch):
        """A host with a TPU on its bus and an SDK that blocks, as the real one does without."""
        package = tmp_path / "site" / "libtpu"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "sdk.py").write_text(
            "import time\n"
            "class tpumonitoring:\n"
            "    @staticmethod\n"
            "    def get_metric(name): time.sleep(600)\n"
        )
        before = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{before}")
        device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0")
        (device / "device").write_text("0x006f")
        monkeypatch.setattr(libtpu_sdk, "jax_state", lambda: "initialised")
        return tmp_path

    def test_it_keeps_away_while_jax_may_be_opening_the_chips(self, plugged, monkeypatch):
        source = LibtpuSdkSource(root=plugged, timeout_s=0.2)
        monkeypatch.setattr(libtpu_sdk, "jax_state", lambda: "imported")
        assert "once jax has opened its devices" in source.read().missing["throttle_score"]
        assert not source.is_asking
        monkeypatch.setattr(libtpu_sdk, "jax_state", lambda: "absent")
        source.read()
        assert source.is_asking
        source.wait()

    def test_a_child_that_blocks_is_killed_and_delays_nobody(self, plugged):
        source = LibtpuSdkSource(root=plugged, timeout_s=1.0)
        assert "for the first time" in source.read().missing["tensorcore_utilization"]
        assert source.is_asking  # so the reading did not wait for the child
        source.wait()
        assert "did not answer within 1 s" in source.read().missing["tensorcore_utilization"]
        assert not children_running("sources.libtpu_sdk")

    def test_it_asks_seldom(self, plugged):
        now = [0.0]
        source = LibtpuSdkSource(root=plugged, timeout_s=0.2, every_s=60.0, clock=lambda: now[0])
        source.read()
        source.wait()
        first = source.read()
        assert not source.is_asking
        now[0] = 61.0
        source.read()
        assert source.is_asking
        source.wait()
        assert source.read() is not first


class TestNvml:
    def test_what_a_gpu_does_not_tell_is_missing_alone(self, monkeypatch):
        import pynvml

        def refuse(*_):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        memory = SimpleNamespace(used=1, total=2)
        for name, answer in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetPowerUsage": refuse,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=50, memory=1),
            "nvmlDeviceGetMemoryInfo": lambda _: memory,
            "nvmlDeviceGetTemperature": lambda *_: 40,
        }.items():
            monkeypatch.setattr(pynvml, name, answer)
        reading = NvmlSource().read()
        assert reading.missing == {"power_watts": "this GPU does not report it"}
        assert reading.values("duty_cycle") == [0.5, 0.5]
        # NVML's own "memory utilization" is no share of bandwidth and must not pass for it.
        assert reading.values("memory_bandwidth_utilization") == []


class TestHost:
    def test_the_first_reading_has_no_load(self):
        source = HostSource()
        assert "two readings" in source.read().missing["host_cpu_utilization"]

    def test_load_is_what_the_kernel_counted_in_between(self, monkeypatch):
        times = [
            SimpleNamespace(idle=100.0, iowait=0.0, user=50.0),
            SimpleNamespace(idle=101.0, iowait=0.0, user=53.0),
        ]
        as_tuples = [type("T", (tuple,), vars(one))(vars(one).values()) for one in times]
        answers = iter(as_tuples)
        monkeypatch.setattr(psutil, "cpu_times", lambda: next(answers))
        source = HostSource()
        source.read()
        assert source.read().values("host_cpu_utilization") == [0.75]

    def test_two_readings_at_once_do_not_make_a_load_up(self, monkeypatch):
        frozen = psutil.cpu_times()
        monkeypatch.setattr(psutil, "cpu_times", lambda: frozen)
        source = HostSource()
        source.read()
        assert "too little time" in source.read().missing["host_cpu_utilization"]


class TestJax:
    def test_devices_are_never_opened_by_a_reading(self, monkeypatch):
        monkeypatch.setattr(machine, "jax_state", lambda: "imported")
        assert "has not opened" in JaxSource().read().missing["memory_used"]

    def test_a_runtime_that_counts_nothing_says_so(self, monkeypatch):
        import jax

        monkeypatch.setattr(machine, "jax_state", lambda: "initialised")
        device = SimpleNamespace(device_kind="cpu", memory_stats=lambda: None)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        reading = JaxSource().read()
        assert set(reading.missing) == {"memory_used", "memory_total", "memory_peak"}
        assert reading.missing["memory_used"] == "the runtime of cpu reports no memory"


class TestReplay:
    @pytest.fixture
    def recording(self, tmp_path):
        lines = [
            {
                "time": 100.0 + second,
                "host": "a",
                "process": 0,
                "source": source,
                "samples": [{"metric": "memory_used", "value": float(second), "chip": 0}],
                "missing": {},
            }
            for second in range(10)
            for source in ("jax", "nvml")
        ]
        file = tmp_path / "readings.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not json\n{}\n")
        return file

    def test_readings_come_in_their_time(self, recording):
        now = [50.0]
        source = ReplaySource(recording, source="nvml", speed=2.0, clock=lambda: now[0])
        seen = []
        for now[0] in (50.0, 50.4, 50.5, 52.0, 99.0):
            reading = source.read()
            seen.append((reading.time, reading.source))
        assert seen == [(100.0 + second, "nvml") for second in (0, 0, 1, 4, 9)]

    def test_at_once_gives_the_last(self, recording):
        assert ReplaySource(recording, speed=float("inf")).read().values("memory_used") == [9.0]

    def test_each_source_of_a_recording(self, recording):
        assert [one.read().source for one in replay(recording)] == ["jax", "nvml"]

    def test_a_source_it_does_not_hold(self, recording):
        reading = ReplaySource(recording, source="psutil").read()
        assert "no reading of 'psutil'" in next(iter(reading.missing.values()))


class TestOverhead:
    def test_measured_comes_before_predicted(self, tmp_path):
        predicted = {"step_time_s": 2.0, "seconds_by_cause": {"ici": 0.2, "dcn": 0.0}}
        (tmp_path / "check.json").write_text(json.dumps({"prediction": predicted}))
        source = OverheadSource(tmp_path)
        (sample,) = source.read().samples
        assert (sample.value, sample.labels) == (0.1, {"origin": "model"})
        report = tmp_path / "profile" / "train_step" / "report.json"
        report.parent.mkdir(parents=True)
        report.write_text(json.dumps({"analysis": {"communication_bound": 0.3}}))
        (sample,) = source.read().samples
        assert (sample.value, sample.labels) == (0.3, {"origin": "measured"})

    def test_a_check_that_predicted_nothing_has_a_reason(self, tmp_path):
        (tmp_path / "check.json").write_text(json.dumps({"prediction": None}))
        reading = OverheadSource(tmp_path).read()
        assert (
            "check.json is no report that can be read" in reading.missing["communication_overhead"]
        )

    def test_nothing_there_says_what_to_do(self, tmp_path):
        missing = OverheadSource(tmp_path).read().missing["communication_overhead"]
        assert "profile a few steps" in missing

    def test_a_real_check_is_read(self):
        from sample_report import sample_report

        report = sample_report()
        share = _predicted_share(report)
        assert 0 <= share < 1

    def test_what_the_profiler_writes_is_read(self, tmp_path):
        profiler = TPUProfiler(output_dir=str(tmp_path / "profile"))
        square = jax.jit(lambda x: x @ x)
        x = jax.numpy.ones((64, 64))
        square(x).block_until_ready()
        with profiler.profile("train_step"):
            square(x).block_until_ready()
        profiler.generate_report()
        (sample,) = OverheadSource(tmp_path).read().samples
        assert sample.labels == {"origin": "measured"}
        assert sample.value == pytest.approx(profiler.analyze_bottlenecks()["communication_bound"])
