"""`TPUMonitor`: what it says, that it survives what happens to it, and that it ends."""

import io
import json
import logging
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.hardware.detect import Accelerators
from tpukit.hardware.missing import Missing
from tpukit.job import Job
from tpukit.observe import MonitorHook, TPUMonitor
from tpukit.observe.monitor.collector import NO_CHIPS, NO_POWER, MetricsCollector
from tpukit.observe.monitor.current import KEYS, CurrentMetrics, summarize
from tpukit.observe.readings import METRICS, Reading, Sample
from tpukit.observe.sources.replay import read_readings
from tpukit.records.hooks import make_hooks


class Scripted:
    """A source that says what it is told to, and can be waited for."""

    name = "scripted"

    def __init__(self, **values):
        self.values, self.error, self.closed = values, None, 0
        self.reads = 0
        self._read = threading.Condition()

    def read(self):
        with self._read:
            self.reads += 1
            self._read.notify_all()
        if self.error is not None:
            raise self.error
        samples = [Sample(metric, value, None) for metric, value in self.values.items()]
        return Reading(time.time(), "h", 0, self.name, tuple(samples), {})

    def close(self):
        self.closed += 1

    def wait_for_another(self, rounds=2):
        """Wait until rounds that began after now are over (the last but one is, for sure)."""
        with self._read:
            wanted = self.reads + rounds
            assert self._read.wait_for(lambda: self.reads >= wanted, timeout=30)


def monitor_of(source, **settings):
    return TPUMonitor(update_frequency_seconds=0.01, sources=[source], **settings)


class TestCurrentMetrics:
    def test_chips_are_combined_by_what_matters(self):
        samples = [Sample("duty_cycle", value, chip) for chip, value in enumerate((0.9, 0.5))]
        samples += [Sample("memory_used", value, chip) for chip, value in enumerate((2e9, 28e9))]
        samples += [Sample("power_watts", 100.0, 0), Sample("power_watts", 150.0, 1)]
        samples += [Sample("hlo_queue_size", 3.0, 0), Sample("hlo_queue_size", 0.0, 1)]
        found = summarize([Reading(1.0, "h", 0, "libtpu grpc", tuple(samples))])
        assert found["utilization"] == found["duty_cycle"] == pytest.approx(0.7)
        assert found["memory_usage_gb"] == pytest.approx(28.0), "the fullest chip"
        assert found["power_watts"] == 250.0
        assert found["hlo_queue_size"] == 0.0
        assert found.origins["utilization"] == "libtpu grpc"

    def test_the_first_source_that_knows_counts(self):
        first = Reading(1.0, "h", 0, "jax", (Sample("memory_used", 1e9, 0),))
        second = Reading(1.0, "h", 0, "nvml", (Sample("memory_used", 60e9, 0),))
        assert summarize([first, second])["memory_usage_gb"] == pytest.approx(1.0)
        assert summarize([second, first])["memory_usage_gb"] == pytest.approx(60.0)

    def test_latencies_are_medians(self):
        samples = tuple(
            Sample("dcn_latency_seconds", value, None, {"quantile": quantile})
            for quantile, value in (("0.5", 0.01), ("0.999", 5.0))
        )
        assert summarize([Reading(1.0, "h", 0, "x", samples)])["dcn_latency_s"] == 0.01

    def test_what_is_missing_has_every_sources_reason(self):
        readings = [
            Reading(1.0, "h", 0, "a", (), {"memory_used": "no server"}),
            Reading(1.0, "h", 0, "b", (), {"memory_used": "no driver"}),
        ]
        found = summarize(readings)
        assert found["memory_usage_gb"].reason == "no server; no driver"
        assert f"{found['memory_usage_gb']:.1f}GB" == "–GB"
        assert found.missing["memory_usage_gb"] == "no server; no driver"

    def test_every_key_is_always_there_and_of_the_glossary(self):
        found = summarize([])
        assert set(found) == set(KEYS)
        assert all(isinstance(value, Missing) and value.reason for value in found.values())
        assert {key.metric for key in KEYS.values()} <= set(METRICS)

    def test_orbax_and_grain_keep_their_names(self):
        sample = Sample("jax_orbax_write_gbytes", 2.0)
        assert summarize([Reading(1.0, "h", 0, "x", (sample,))])["jax_orbax_write_gbytes"] == 2.0

    def test_keys_are_attributes_too(self):
        found = CurrentMetrics({"power_watts": 3.0})
        assert found.power_watts == 3.0
        with pytest.raises(AttributeError, match="Did you mean 'power_watts'"):
            found.power_wats  # noqa: B018

    def test_it_is_plain_data(self):
        found = summarize([Reading(1.0, "h", 0, "a", (Sample("loss", 2.0),), {})])
        data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert data["loss"] == 2.0
        assert data["utilization"] is None
        assert data["missing"]["utilization"]

    def test_it_prints_itself(self):
        from rich.console import Console

        console = Console(width=120, record=True, file=io.StringIO())
        console.print(summarize([Reading(1.0, "h", 0, "a", (Sample("loss", 2.0),), {})]))
        text = console.export_text()
        assert "loss" in text
        assert "–" in text


class TestSources:
    @pytest.mark.parametrize(
        ("kind", "first"), [("tpu", "libtpu grpc"), ("gpu", "jax"), ("cpu", "jax")]
    )
    def test_they_suit_the_machine(self, kind, first):
        collector = MetricsCollector(here=Accelerators(kind=kind, count=1))
        names = [source.name for source in collector.sources]
        assert names[0] == first
        assert ("nvml" in names) == (kind == "gpu")
        assert ("libtpu sdk" in names) == (kind == "tpu")
        assert names[-3:] == ["psutil", "trainer", "profile"]

    def test_served_ports_are_scraped(self, monkeypatch):
        monkeypatch.setenv("ORBAX_PROMETHEUS_PORT", "9431")
        monkeypatch.setenv("PYGRAIN_PROMETHEUS_PORT", "9431")
        collector = MetricsCollector(here=Accelerators(kind="cpu", count=1))
        assert [one.url for one in collector.sources if one.name == "prometheus"] == [
            "http://localhost:9431/metrics"
        ]

    def test_reasons_name_the_machine(self):
        on_cpu = MetricsCollector(here=Accelerators(kind="cpu", count=1))
        assert on_cpu.summarize(())["utilization"].reason == NO_CHIPS
        on_tpu = MetricsCollector(here=Accelerators(kind="tpu", count=1))
        assert on_tpu.summarize(())["power_watts"].reason == NO_POWER


class TestRunning:
    def test_it_reads_again_and_again(self):
        source = Scripted(duty_cycle=0.5)
        with monitor_of(source) as monitor:
            source.wait_for_another()
            assert monitor.get_current_metrics()["utilization"] == 0.5
            source.values = {"duty_cycle": 0.75}
            source.wait_for_another()
            assert monitor.get_current_metrics()["utilization"] == 0.75
            assert len(monitor.get_history()) >= 3
        assert not monitor.is_running
        assert source.closed == 1

    def test_a_job_says_how_often_how_long_and_what_is_remembered(self, tmp_path):
        job = Job.from_dict(
            {
                "model": "tiny",
                "observe.monitoring_interval_seconds": 0.01,
                "observe.monitoring_duration_seconds": 0.005,
                "observe.allocation_history_retention_seconds": 0.05,
            }
        )
        source = Scripted(duty_cycle=0.5)
        hook = MonitorHook.as_set(job.observe, sources=[source])
        hook.on_start(tmp_path, {})
        monitor = hook.monitor
        while not monitor.get_history():
            time.sleep(0.01)
        time.sleep(0.1)
        assert source.reads == 1, "a second round would be after its duration"
        hook.on_end(None)
        monitor.get_current_metrics()
        assert (source.reads, len(monitor.get_history())) == (2, 1), "the first is forgotten"

    def test_before_the_first_reading_everything_is_missing(self):
        held = threading.Event()

        class Slow(Scripted):
            def read(self):
                held.wait(30)
                return super().read()

        monitor = monitor_of(Slow(loss=1.0)).start()
        metrics = monitor.get_current_metrics()
        assert metrics["loss"].reason == "no reading has been taken yet"
        held.set()
        monitor.stop()

    def test_without_start_it_reads_when_asked(self):
        source = Scripted(loss=1.5)
        monitor = monitor_of(source)
        assert monitor.get_current_metrics()["loss"] == 1.5
        assert source.reads == 1

    def test_start_and_stop_twice_and_again(self):
        source = Scripted(loss=1.0)
        monitor = monitor_of(source)
        for _ in range(2):
            assert monitor.start() is monitor.start()
            source.wait_for_another()
            monitor.stop()
            monitor.stop()
        before = source.reads
        time.sleep(0.1)
        assert source.reads == before, "it still reads"
        assert "tpukit monitor" not in {thread.name for thread in threading.enumerate()}

    def test_a_source_that_fails_is_logged_once_and_asked_again(self, caplog):
        source = Scripted(loss=1.0)
        source.error = ZeroDivisionError("boom")
        with caplog.at_level(logging.WARNING), monitor_of(source) as monitor:
            source.wait_for_another(5)
            assert isinstance(monitor.get_current_metrics()["loss"], Missing)
            source.error = None
            source.wait_for_another()
            assert monitor.get_current_metrics()["loss"] == 1.0
        assert len([one for one in caplog.messages if "boom" in one]) == 1

    def test_wall_clock_jumps_change_neither_rhythm_nor_alerts(self, monkeypatch):
        source, fired = Scripted(loss=9.0), threading.Event()
        monitor = monitor_of(source)
        monitor.set_alert("loss", ">", 1.0, fired.set, for_s=0.05)
        real = time.time
        with monitor:
            for jump in (1e6, -1e6, 5e5):
                monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
                source.wait_for_another()
            assert fired.wait(30)

    def test_the_program_ends_without_stop(self):
        """A thread that is left running, with its server, must not keep the interpreter alive."""
        code = (
            "from tpukit.observe import MonitorHook, TPUMonitor\n"
            "TPUMonitor(0.01, enable_prometheus=True, prometheus_port=0).start()\n"
            "print('done')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert done.stderr == ""

    @pytest.mark.parametrize("seconds", [0, -1, float("nan")])
    def test_an_interval_that_is_none_is_refused(self, seconds):
        with pytest.raises(TPUValidationError, match="is no interval"):
            TPUMonitor(update_frequency_seconds=seconds)


class TestOwnLoop:
    def test_steps_that_are_recorded_are_the_surest(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monitor = TPUMonitor(sources=[Scripted(loss=99.0)])
        assert monitor.get_current_metrics()["loss"] == 99.0
        monitor.record_step(loss=3.0, flops=1e12, samples=4)
        first = monitor.get_current_metrics()
        assert (first["step"], first["loss"]) == (1, 3.0)
        assert "a second step is needed" in first["step_time_s"].reason
        monitor.record_step(loss=2.0, flops=1e12, samples=4)
        second = monitor.get_current_metrics()
        assert (second["step"], second["loss"]) == (2, 2.0)
        rate = second["current_tflops"] * second["step_time_s"]
        assert rate == pytest.approx(1.0)
        assert second["samples_per_s"] * second["step_time_s"] == pytest.approx(4.0)
        monitor.record_step(40)
        monitor.record_step()
        assert monitor.get_current_metrics()["step"] == 41
        assert "does not record it" in monitor.get_current_metrics()["current_tflops"].reason


class TestExports:
    def test_readings_are_kept_beside_the_run(self, tmp_path):
        source = Scripted(loss=1.0)
        with monitor_of(source, run_dir=tmp_path, process=2):
            source.wait_for_another()
        kept = read_readings(tmp_path / "hosts" / "2" / "readings.jsonl")
        assert kept[0].values("loss") == [1.0]

    def test_a_full_disk_is_logged_once_and_the_rest_goes_on(self, tmp_path, caplog):
        file = tmp_path / "hosts" / "0" / "readings.jsonl"
        file.parent.mkdir(parents=True)
        file.symlink_to("/dev/full")
        source = Scripted(loss=1.0)
        with caplog.at_level(logging.WARNING):
            with monitor_of(source, run_dir=tmp_path) as monitor:
                source.wait_for_another(6)
                assert monitor.get_current_metrics()["loss"] == 1.0
                file.unlink()  # room again
                source.wait_for_another(3)
            full = [one for one in caplog.messages if "No space left on device" in one]
            again = [one for one in caplog.messages if "works again" in one]
        assert len(full) == 1
        assert len(again) == 1
        assert read_readings(file)[-1].values("loss") == [1.0]

    def test_an_exporter_that_fails_stops_none_of_the_others(self, tmp_path):
        class Broken:
            name = "broken"

            def export(self, readings):
                raise RuntimeError("no")

            def close(self):
                raise RuntimeError("no")

        source = Scripted(loss=1.0)
        with monitor_of(source, exporters=[Broken()], run_dir=tmp_path):
            source.wait_for_another()
        assert read_readings(tmp_path / "hosts" / "0" / "readings.jsonl")

    def test_prometheus_serves_while_it_runs(self):
        source = Scripted(loss=1.25)
        monitor = monitor_of(source, enable_prometheus=True, prometheus_port=0)
        assert monitor.prometheus_url is None
        with monitor:
            source.wait_for_another()
            url = monitor.prometheus_url
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert "tpukit_loss" in answer.read().decode()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(url, timeout=10)


class TestAlerts:
    def test_a_metric_that_is_none_is_refused_with_the_nearest(self):
        with pytest.raises(TPUValidationError, match="Did you mean 'utilization'"):
            TPUMonitor(sources=[]).set_alert("utilisation", "<", 0.7)

    def test_orbax_names_are_taken_before_they_are_seen(self):
        TPUMonitor(sources=[]).set_alert("jax_orbax_write_gbytes", ">", 1.0)

    def test_an_alert_explains_with_the_other_metrics(self):
        source, seen = Scripted(step_time_seconds=2.0, input_stall_seconds=1.0, mfu=0.1), []
        monitor = monitor_of(source)
        monitor.set_alert("mfu", "<", 0.3, seen.append)
        monitor.get_current_metrics()
        monitor._alerts.close()
        (alert,) = seen
        assert "mfu on" in alert.explanation
        assert "is 10.0%, below 30.0%" in alert.explanation
        assert "1 s of a step of 2 s are spent waiting for the batch" in alert.explanation
        assert [rule.name for rule in monitor.get_alerts()] == ["mfu < 0.3"]

    def test_an_action_that_hangs_does_not_hold_up_the_readings(self):
        source, free = Scripted(loss=9.0), threading.Event()
        monitor = monitor_of(source)
        monitor.set_alert("loss", ">", 1.0, lambda: free.wait(60), cool_down_s=0)
        with monitor:
            source.wait_for_another(5)
            free.set()


class TestHook:
    class Quiet:
        def on_start(self, run_dir, identity): ...
        def on_record(self, record): ...
        def on_end(self, result): ...

    def test_it_watches_from_start_to_end_on_every_process(self, tmp_path):
        source, quiet = Scripted(loss=1.0), self.Quiet()
        hook = MonitorHook(0.01, sources=[source])
        assert make_hooks([hook, quiet, "profile"], process=3) == [hook]
        assert make_hooks([hook, quiet], process=0) == [hook, quiet]
        hook.on_start(tmp_path, {})
        assert hook.monitor.is_running
        source.wait_for_another()
        hook.on_record({"step": 1})
        hook.on_end(None)
        hook.on_end(None)
        assert hook.monitor is None
        assert read_readings(tmp_path / "hosts" / "0" / "readings.jsonl")

    def test_an_unknown_name_is_refused_on_every_process(self):
        with pytest.raises(ConfigError, match="no hook is called 'tensorbord'"):
            make_hooks(["tensorbord"], process=1)


def test_importing_the_monitor_imports_none_of_what_it_may_need():
    heavy = ("jax", "grpc", "google.cloud", "google.auth", "pynvml", "prometheus_client", "libtpu")
    code = (
        "import sys, tpukit\n"
        "from tpukit import TPUMonitor, TpuMonitor\n"
        "from tpukit.observe import PrometheusExporter, CloudMonitoringExporter, MonitorHook\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
