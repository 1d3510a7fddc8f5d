"""libtpu's metrics service: our messages against Google's generated ones, on a real connection."""

import time

import pytest
from libtpu_server import DCN, DUTY_CYCLE, MEMORY_USED, Chips, LibtpuServer, generated, ours
from tpu_info import device as tpu_device
from tpu_info import metrics as tpu_info

from tpukit.observe.sources.libtpu_grpc import (
    MESSAGES,
    SERVED,
    Buckets,
    LibtpuSource,
)

V6E, V3 = tpu_device.TpuChip.V6E, tpu_device.TpuChip.V3


@pytest.fixture(params=[generated, ours], ids=["server of tpu-info's classes", "server of ours"])
def server(request):
    served = LibtpuServer(build=request.param)
    yield served
    served.stop()


@pytest.fixture
def source(server):
    opened = LibtpuSource(server.address)
    yield opened
    opened.close()


def by_chip(reading, metric):
    return {one.chip: one.value for one in reading.samples if one.metric == metric}


def test_every_field_is_the_generated_one():
    for name, kind in MESSAGES.items():
        theirs = generated(name).DESCRIPTOR
        for field in kind.DESCRIPTOR.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type) == (other.number, other.type), (name, field.name)
            assert field.is_repeated == other.is_repeated
            assert (field.containing_oneof is None) == (other.containing_oneof is None)


def test_tpu_infos_client_reads_the_server_as_we_do(server, source):
    reading = source.read()
    usage = tpu_info.get_chip_usage(V6E, addr=server.address)
    assert by_chip(reading, "memory_used") == {one.device_id: one.memory_usage for one in usage}
    assert by_chip(reading, "memory_total") == {one.device_id: one.total_memory for one in usage}
    assert by_chip(reading, "duty_cycle") == pytest.approx(
        {one.device_id: one.duty_cycle_pct / 100 for one in usage}
    )
    assert by_chip(reading, "hlo_queue_size") == {
        one.device_id: one.queue_size for one in tpu_info.get_hlo_queue_size(V6E, server.address)
    }
    assert by_chip(reading, "memory_bandwidth_utilization") == pytest.approx(
        {
            chip: percent / 100
            for chip, percent in tpu_info.get_runtime_hbm_utilization(server.address)
        }
    )
    assert by_chip(reading, "idle_seconds") == dict(
        tpu_info.get_tensorcore_idle_duration(server.address)
    )


def test_quantiles_are_tpu_infos(server, source):
    found = {
        one.labels["quantile"]: one.value * 1e6
        for one in source.read().samples
        if one.metric == "dcn_latency_seconds"
    }
    (theirs,) = tpu_info.get_transfer_latency("buffer_transfer_latency", addr=server.address)
    assert found == pytest.approx(
        {"0.5": theirs.p50, "0.9": theirs.p90, "0.95": theirs.p95, "0.999": theirs.p999}
    )
    labels = [one.labels for one in source.read().samples if one.metric == "dcn_latency_seconds"]
    assert {label["buffer_size"] for label in labels} == {theirs.transfer_size}


def test_program_timings_are_tpu_infos(server, source):
    theirs = tpu_info.get_hlo_exec_timing(V6E, addr=server.address)
    found = [one for one in source.read().samples if one.metric == "hlo_execution_seconds"]
    for timing in theirs:
        mine = {
            one.labels["quantile"]: one.value * 1e6 for one in found if one.chip == timing.device_id
        }
        assert mine == pytest.approx(
            {"0.5": timing.p50, "0.9": timing.p90, "0.95": timing.p95, "0.999": timing.p999}
        )
    assert len(found) == 4 * len(theirs)


def test_memory_of_two_cores_is_one_chips():
    chips = Chips(used=[1, 2, 3, 4], total=[10, 10, 10, 10], duty=[50.0, 60.0])
    chips.supported = chips.supported[:3]
    server = LibtpuServer(chips)
    try:
        reading = LibtpuSource(server.address).read()
        cores = tpu_info.get_chip_usage(V3, addr=server.address)
    finally:
        server.stop()
    assert by_chip(reading, "memory_used") == {0: 3, 1: 7}
    assert sum(one.memory_usage for one in cores) == 10
    assert by_chip(reading, "memory_total") == {0: 20, 1: 20}
    assert by_chip(reading, "duty_cycle") == {0: 0.5, 1: 0.6}


def test_what_changes_slowly_is_asked_for_now_and_then(server):
    now = [0.0]
    source = LibtpuSource(server.address, seldom_s=10.0, clock=lambda: now[0])
    for second in range(21):
        now[0] = float(second)
        reading = source.read()
        assert by_chip(reading, "memory_total")
        assert reading.values("dcn_latency_seconds")
    source.close()
    assert server.asked.count(DUTY_CYCLE) == 21
    assert server.asked.count(MEMORY_USED) == 5
    assert server.asked.count(DCN) == 3


def test_what_is_kept_does_not_outlive_its_server(server):
    source = LibtpuSource(server.address)
    assert by_chip(source.read(), "memory_total")
    server.stop()
    reading = source.read()
    source.close()
    server.start()
    assert reading.samples == ()
    assert "no libtpu serves metrics" in reading.missing["memory_total"]


def test_devices_are_numbered_from_0_on_each_host(server, source):
    server.chips.first_device = 8
    assert set(by_chip(source.read(), "memory_used")) == {0, 1}


def test_a_metric_this_libtpu_has_not_is_missing_with_its_words(server):
    now = [0.0]
    source = LibtpuSource(server.address, seldom_s=10.0, clock=lambda: now[0])
    server.chips.supported = tuple(one for one in server.chips.supported if one != DUTY_CYCLE)
    for second in range(15):
        now[0] = float(second)
        reading = source.read()
        assert f"refused: no metric {DUTY_CYCLE}" in reading.missing["duty_cycle"]
        assert reading.values("duty_cycle") == []
        assert reading.values("memory_used")
    source.close()
    assert server.asked.count(DUTY_CYCLE) == 2, "what is refused is not asked for each time"


def test_a_metric_without_values_is_missing(server, source):
    server.chips.idle = []
    assert "has no values now" in source.read().missing["idle_seconds"]


def test_no_latency_is_made_up_where_nothing_was_transferred(server, source):
    server.chips.latencies = {"8MB+": [0, 0, 0]}
    reading = source.read()
    assert reading.values("dcn_latency_seconds") == []
    assert reading.missing["dcn_latency_seconds"] == "no such event has happened yet"
    # tpu-info itself says 1 µs here, which nobody measured.
    (theirs,) = tpu_info.get_transfer_latency("buffer_transfer_latency", addr=server.address)
    assert theirs.p50 == 1.0


class Hanging(Chips):
    """Answers to what is in `quick`, and hangs at the rest."""

    quick = ()

    def answer(self, name, build):
        if name not in self.quick:
            time.sleep(1.0)
        return super().answer(name, build)


def test_a_metric_that_hangs_takes_those_after_it_along_and_no_others():
    chips = Hanging()
    chips.quick = (DUTY_CYCLE,)
    server = LibtpuServer(chips)
    source = LibtpuSource(server.address, timeout_s=0.3)
    try:
        reading = source.read()
    finally:
        source.close()
        server.stop()
    assert reading.values("duty_cycle")
    assert "did not answer within 0.3 s" in reading.missing["memory_used"]


def test_a_server_that_hangs_is_given_up():
    server = LibtpuServer(Hanging(supported=(DUTY_CYCLE, DCN)))
    source = LibtpuSource(server.address, timeout_s=0.3)
    try:
        reading = source.read()
    finally:
        source.close()
        server.stop()
    assert reading.samples == ()
    assert "did not answer within 0.3 s" in reading.missing["duty_cycle"]


def test_one_connection_serves_all_readings(server, source):
    for _ in range(3):
        source.read()
    assert source.read().values("duty_cycle")
    assert server.asked.count(DUTY_CYCLE) == 4


def test_quantiles_of_a_known_distribution():
    buckets = Buckets((0, 50, 0, 50), scale=10.0, growth=2.0)  # 10..20 and 40..80
    assert buckets.quantile(0.25) == 15.0
    assert buckets.quantile(0.75) == 60.0
    assert (buckets + Buckets((100,), 10.0, 2.0)).quantile(0.25) == 5.0
    with pytest.raises(ValueError, match="without values"):
        Buckets((0, 0), 1.0, 2.0).quantile(0.5)


def test_only_metrics_with_the_runtimes_names_are_asked_for():
    assert all(name.startswith(("tpu.runtime.", "megascale.", "hlo.")) for name in SERVED)
    names = {one.value for one in tpu_info.MetricName}
    assert set(SERVED) <= names
