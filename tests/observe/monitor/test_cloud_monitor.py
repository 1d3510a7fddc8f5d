"""`TpuMonitor`: what it collects and reports; document 004's own block is in conformance."""

import json
import threading
import time
from datetime import timedelta

import pytest
from libtpu_server import LibtpuServer
from monitoring_server import Monitoring

from tpukit.errors import ConfigError, ProviderError
from tpukit.hardware.missing import Missing
from tpukit.observe import MetricsCollector, TpuMonitor
from tpukit.observe.sources.libtpu_grpc import LibtpuSource
from tpukit.observe.sources.training import OverheadSource, TrainerSource


@pytest.fixture
def service():
    made = Monitoring()
    yield made
    made.stop()


@pytest.fixture
def sources(tmp_path):
    server = LibtpuServer()
    record = {"step": 5, "loss": 2.0, "step_time_s": 0.5, "mfu": 0.4, "time": time.time()}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    prediction = {"step_time_s": 2.0, "seconds_by_cause": {"ici": 0.3, "dcn": 0.2, "hbm": 1.0}}
    (tmp_path / "check.json").write_text(json.dumps({"prediction": prediction}))
    yield (LibtpuSource(server.address), TrainerSource(tmp_path), OverheadSource(tmp_path))
    server.stop()


def test_a_report_without_await(service, sources):
    monitor = TpuMonitor(
        collection_interval=30,
        metrics_endpoint=service.endpoint,
        project="my-project",
        sources=sources,
    ).build()
    metrics = monitor.collect_metrics()
    assert monitor.report_to_cloud_monitoring(metrics) > 10
    monitor.stop()
    assert len(service.calls) == 1


def test_the_five_metrics_of_the_document(sources):
    metrics = TpuMonitor(sources=sources).build().collect_metrics()
    assert metrics.utilization == pytest.approx(0.6925)
    assert metrics.memory_usage_gb == pytest.approx(5 * 2**30 / 1e9)
    assert metrics.communication_overhead == pytest.approx(0.25)
    assert metrics.origins["communication_overhead"] == "profile (model)"
    assert metrics.computation_efficiency == 0.4
    assert isinstance(metrics.power_watts, Missing)
    assert metrics.power_watts.reason


def test_on_a_tpu_power_is_missing_because_tpus_publish_none(monkeypatch):
    from tpukit.hardware.detect import Accelerators

    collector = MetricsCollector(here=Accelerators(kind="tpu", count=4))
    power = collector.summarize(())["power_watts"]
    assert f"{power:.0f} W" == "– W"
    assert power.reason == "TPUs publish no power consumption"


def test_while_it_runs_it_reports_at_every_interval(service, sources):
    written = threading.Event()
    monitor = TpuMonitor(
        collection_interval=5.0,
        metrics_endpoint=service.endpoint,
        project="p",
        sources=sources,
    )
    taken = service.calls

    class Calls(list):
        def append(self, call):
            taken.append(call)
            written.set()

    service.calls = Calls()
    with monitor:
        assert written.wait(30)
    monitor.stop()
    assert taken[0].name == "projects/p"


def test_collecting_needs_no_credentials_and_reporting_says_which(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monitor = TpuMonitor(sources=[]).with_metrics_endpoint("https://monitoring.googleapis.com")
    metrics = monitor.build().collect_metrics()
    with pytest.raises(ProviderError, match="no Google Cloud credentials"):
        monitor.report_to_cloud_monitoring(metrics)


@pytest.mark.parametrize("interval", [0, -5, timedelta(0), float("inf")])
def test_an_interval_that_is_no_time_is_refused(interval):
    with pytest.raises(ConfigError, match="collection_interval"):
        TpuMonitor().with_collection_interval(interval).build()
