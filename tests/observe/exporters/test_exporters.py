"""Exporters to a file, to TensorBoard and to Cloud Monitoring."""

import json
import struct
from pathlib import Path

import pytest
from google.cloud import monitoring_v3
from monitoring_server import Monitoring

from tpukit.errors import ConfigError, ProviderError, TPUValidationError
from tpukit.observe.exporters.cloud_monitoring import CloudMonitoringExporter
from tpukit.observe.exporters.files import JsonlExporter, TensorBoardExporter
from tpukit.observe.readings import Exporter, Reading, Sample
from tpukit.observe.sources.replay import read_readings


def reading(value=0.5, *, at=1_700_000_000.0, source="jax", samples=None, missing=None):
    found = (Sample("memory_used", value, 0),) if samples is None else tuple(samples)
    return Reading(at, "host-3", 3, source, found, missing or {})


class TestJsonl:
    def test_lines_read_back_as_they_were(self, tmp_path):
        exporter = JsonlExporter(tmp_path, process=3, every_s=0)
        first = reading(1.0, missing={"memory_peak": "not counted"})
        second = reading(2.0)
        exporter.export([first])
        exporter.export([second])
        exporter.close()
        file = tmp_path / "hosts" / "3" / "readings.jsonl"
        assert read_readings(file) == [first, second]

    def test_a_line_is_there_as_soon_as_it_is_written(self, tmp_path):
        exporter = JsonlExporter(tmp_path)
        exporter.export([reading()])
        assert len(read_readings(exporter.path)) == 1
        exporter.close()

    def test_the_same_reason_is_repeated_once_a_minute(self, tmp_path):
        now = [0.0]
        exporter = JsonlExporter(tmp_path, every_s=0, clock=lambda: now[0])
        gone = {"duty_cycle": "no server"}
        for second in range(121):
            now[0] = float(second)
            exporter.export([reading(samples=[], missing=gone, at=1e9 + second)])
        assert [one.time - 1e9 for one in read_readings(exporter.path)] == [0, 60, 120]
        exporter.export([reading(1.0)])
        assert len(read_readings(exporter.path)) == 4
        exporter.close()

    def test_rounds_are_kept_every_so_often(self, tmp_path):
        now = [0.0]
        exporter = JsonlExporter(tmp_path, every_s=10, clock=lambda: now[0])
        for second in range(25):
            now[0] = float(second)
            exporter.export([reading(float(second)), reading(-float(second), source="nvml")])
        exporter.close()
        kept = read_readings(exporter.path)
        assert [one.values("memory_used")[0] for one in kept] == [
            *(0, 0, 10, -10, 20, -20),
            *(24, -24),  # the last round, when it is closed
        ]

    def test_a_full_disk_is_an_error_each_time_and_over_when_there_is_room(self, tmp_path):
        exporter = JsonlExporter(tmp_path)
        exporter.path.parent.mkdir(parents=True)
        exporter.path.symlink_to("/dev/full")  # the kernel's own disk that is always full
        for value in (1.0, 2.0):
            with pytest.raises(OSError, match="No space left"):
                exporter.export([reading(value)])
        exporter.path.unlink()
        exporter.path.write_text('{"time": 1, "host"')  # what a full disk leaves of a line
        exporter.export([reading(3.0)])
        exporter.close()
        assert [one.values("memory_used") for one in read_readings(exporter.path)] == [[3.0]]

    def test_closing_twice_is_no_error(self, tmp_path):
        exporter = JsonlExporter(tmp_path)
        exporter.close()
        exporter.close()


class TestTensorBoard:
    def scalars(self, folder: Path):
        """(tag, step) -> value of an event file; each event lies between two checksums."""
        from tensorboardX.proto.event_pb2 import Event

        (file,) = folder.glob("events*")
        data, found = file.read_bytes(), {}
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found[value.tag, event.step] = (value.simple_value, event.wall_time)
        return found

    def test_numbers_are_scalars_over_seconds(self, tmp_path):
        exporter = TensorBoardExporter(tmp_path)
        link = Sample("ici_link_health", 10.0, 1, {"link": "ici0"})
        exporter.export([reading(5.0, at=100.0), reading(samples=[link], at=100.0)])
        exporter.export([reading(7.0, at=110.0)])
        exporter.close()
        assert self.scalars(tmp_path) == {
            ("monitor/memory_used/chip_0", 0): (5.0, 100.0),
            ("monitor/ici_link_health/ici0/chip_1", 0): (10.0, 100.0),
            ("monitor/memory_used/chip_0", 10): (7.0, 110.0),
        }


@pytest.fixture
def service():
    made = Monitoring()
    yield made
    made.stop()


@pytest.fixture
def exporter(service):
    made = CloudMonitoringExporter("my-project", endpoint=service.endpoint, job="llama")
    yield made
    made.close()


class TestCloudMonitoring:
    def test_the_real_client_writes_gauges(self, service, exporter):
        assert exporter.write([reading(4e9)]) == 1
        (call,) = service.calls
        assert call.name == "projects/my-project"
        (series,) = call.time_series
        assert series.metric.type == "custom.googleapis.com/tpukit/memory_used"
        assert dict(series.metric.labels) == {"chip": "0"}
        assert series.resource.type == "generic_task"
        assert dict(series.resource.labels) == {
            "project_id": "my-project",
            "location": "global",
            "namespace": "host-3",
            "job": "llama",
            "task_id": "3",
        }
        assert series.points[0].value.double_value == 4e9
        assert series.points[0].interval.end_time.timestamp() == 1_700_000_000
        assert series.unit == "By"
        kind = monitoring_v3.TimeSeries.pb(series).metric_kind
        assert kind == 1  # GAUGE

    def test_many_series_go_in_calls_of_200(self, service, exporter):
        samples = [Sample("duty_cycle", 0.5, chip) for chip in range(450)]
        assert exporter.write([reading(samples=samples)]) == 450
        assert [len(call.time_series) for call in service.calls] == [200, 200, 50]

    def test_a_metric_of_two_sources_is_written_once(self, service, exporter):
        exporter.write([reading(1.0), reading(2.0, source="libtpu grpc")])
        (call,) = service.calls
        assert [one.points[0].value.double_value for one in call.time_series] == [1.0]

    def test_it_writes_no_more_often_than_asked(self, service):
        now = [0.0]
        exporter = CloudMonitoringExporter(
            "p", endpoint=service.endpoint, every_s=10.0, clock=lambda: now[0]
        )
        for second in range(21):
            now[0] = float(second)
            exporter.export([reading(at=1e9 + second)])
        exporter.close()
        assert len(service.calls) == 3

    def test_a_refusal_is_an_error_with_the_services_words(self, service, exporter):
        other = CloudMonitoringExporter("my-project", endpoint=service.endpoint, job="llama")
        other.write([reading(at=2e9)])
        other.close()
        with pytest.raises(ProviderError, match="points must be written in order"):
            exporter.write([reading(at=1e9)])

    def test_a_step_that_was_written_is_not_written_again(self, service, exporter):
        assert exporter.write([reading(at=1e9)]) == 1
        assert exporter.write([reading(at=1e9)]) == 0
        assert exporter.write([reading(at=1e9 + 5)]) == 1
        assert len(service.calls) == 2

    def test_a_service_that_is_gone_is_an_error(self, service, exporter, monkeypatch):
        import tpukit.observe.exporters.cloud_monitoring as module

        monkeypatch.setattr(module, "TIMEOUT_S", 0.5)
        service.stop()
        with pytest.raises(ProviderError, match="refused the metrics"):
            exporter.write([reading()])

    def test_what_cannot_work_is_refused(self, service, monkeypatch, tmp_path):
        with pytest.raises(TPUValidationError, match="unencrypted"):
            CloudMonitoringExporter("p", endpoint="http://monitoring.example.com")
        with pytest.raises(TPUValidationError, match="give 5 or more"):
            CloudMonitoringExporter("p", endpoint=service.endpoint, every_s=1.0)
        with pytest.raises(ConfigError, match="project"):
            CloudMonitoringExporter(endpoint=service.endpoint)
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        with pytest.raises(ProviderError, match="no Google Cloud credentials"):
            CloudMonitoringExporter("p")


def test_all_are_exporters(tmp_path, exporter):
    board = TensorBoardExporter(tmp_path)
    lines = JsonlExporter(tmp_path)
    assert all(isinstance(one, Exporter) for one in (exporter, board, lines))
    board.close()
    assert json.dumps(reading().to_dict())
