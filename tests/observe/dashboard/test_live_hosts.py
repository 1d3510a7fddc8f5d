"""Monitors of other hosts, scraped for real, are read like a run."""

import time

import pytest

from tpukit.errors import TPUValidationError
from tpukit.observe.dashboard.live_hosts import NAME, LiveHosts
from tpukit.observe.exporters.prometheus import Labels, PrometheusExporter
from tpukit.observe.readings import Reading, Sample
from tpukit.observe.runs import Run, find_runs


def serve(host, step=None, *, duty=0.9):
    """A monitor's endpoint, with two chips and maybe a trainer."""
    exporter = PrometheusExporter(0, labels=Labels(model="tpu-v6e-slice"))
    tell(exporter, host, step, duty=duty)
    return exporter


def tell(exporter, host, step, *, duty=0.9):
    chips = tuple(Sample("duty_cycle", duty, chip) for chip in range(2))
    readings = [Reading(time.time(), host, 0, "libtpu grpc", chips)]
    if step is not None:
        run = (Sample("step", step), Sample("loss", 3.0 - step / 10), Sample("mfu", 0.4))
        readings.append(Reading(time.time(), host, 0, "trainer", run))
    exporter.export(readings)


def until(test):
    deadline = time.monotonic() + 30
    while not (found := test()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def test_steps_and_chips_of_two_hosts_arrive(tmp_path):
    first, second = serve("a", 1), serve("b", duty=0.4)
    live = LiveHosts([f"127.0.0.1:{one.port}" for one in (first, second)], tmp_path, every_s=0.05)
    try:
        (run,) = find_runs(tmp_path)
        assert run.name == NAME
        for step in (2, 3):
            until(lambda seen=step - 1: Run(live.path).summary().step == seen)
            tell(first, "a", step)
        until(lambda: Run(live.path).summary().step == 3)
        losses = Run(live.path).series("loss")
        assert list(losses.y) == pytest.approx([2.9, 2.8, 2.7])
        found = Run(live.path).readings()
        assert {process: one.host for (process, _), one in found.items()} == {0: "a", 1: "b"}
        second.close()  # gone: its host says why, and the others go on
        tell(first, "a", 4)
        until(lambda: Run(live.path).summary().step == 4)
    finally:
        live.close()
        first.close()


def test_a_run_that_begins_anew_leaves_no_later_steps(tmp_path):
    live = LiveHosts(["127.0.0.1:9"], tmp_path, every_s=60, scrape_all=lambda hosts: [])
    try:
        for step in (7, 8, 3):
            live.keep([Reading(time.time(), "a", 0, "prometheus", (Sample("step", step),))])
    finally:
        live.close()
    assert Run(live.path).summary().step == 3


def test_an_address_that_is_none(tmp_path):
    with pytest.raises(TPUValidationError, match="no host address"):
        LiveHosts(["not a host:x"], tmp_path)
