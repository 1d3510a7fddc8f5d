"""The Prometheus exporter: names and labels of GKE, read by Prometheus itself."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from free_ports import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tpukit.errors import TPUValidationError
from tpukit.hardware.detect import Accelerators
from tpukit.observe.exporters.prometheus import (
    UP,
    Labels,
    PrometheusExporter,
    detect_labels,
    load_dashboard,
    prometheus_name,
    write_dashboard,
    write_text,
)
from tpukit.observe.readings import METRICS, Reading, Sample

LABELS = Labels(model="tpu-v6e-slice", tpu_topology="2x4", others={"pod": "worker-0"})
# What GKE's device plugin writes of one chip, by its documentation and Ray's reader of it.
GKE_LABELS = {"make", "model", "accelerator_id", "tpu_topology"}


def reading(*samples, source="libtpu grpc", host="host-0", process=0, missing=None):
    return Reading(1.0, host, process, source, samples, missing or {})


def parse(text):
    """Every series of the text, by prometheus_client's parser: (name, labels) -> value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gke_names_units_and_labels():
    text = write_text(
        [reading(Sample("duty_cycle", 0.975, 3), Sample("memory_used", 4e9, 3))], LABELS
    )
    series = {name: (dict(labels), value) for (name, labels), value in parse(text).items()}
    labels, value = series["duty_cycle"]
    assert value == 97.5, "GKE says percent"
    assert labels["make"] == "cloud-tpu"
    assert labels["model"] == "tpu-v6e-slice"
    assert labels["tpu_topology"] == "2x4"
    assert labels["accelerator_id"] == "host-0-3"
    assert labels["pod"] == "worker-0"
    assert set(labels) >= GKE_LABELS
    assert series["memory_used"][1] == 4e9


def test_names_beyond_gke_have_base_units():
    assert prometheus_name("mfu") == "tpukit_mfu_ratio"
    assert prometheus_name("host_memory_used") == "tpukit_host_memory_used_bytes"
    assert prometheus_name("step_time_seconds") == "tpukit_step_time_seconds"
    assert prometheus_name("power_watts") == "tpukit_power_watts"
    assert prometheus_name("jax_orbax_write_gbytes") == "jax_orbax_write_gbytes"
    text = write_text([reading(Sample("mfu", 0.4))], LABELS)
    assert 'tpukit_mfu_ratio{host="host-0",process="0"} 0.4' in text


def test_a_missing_metric_has_no_series_and_its_source_is_down():
    gone = reading(missing={"duty_cycle": "gone"})
    there = reading(Sample("host_memory_used", 1.0), source="psutil")
    series = parse(write_text([gone, there], LABELS))
    up = {dict(labels)["source"]: value for (name, labels), value in series.items() if name == UP}
    assert up == {"libtpu grpc": 0, "psutil": 1}
    assert not [name for name, _ in series if name == "duty_cycle"]


def test_two_sources_of_one_metric_give_one_series():
    """Prometheus refuses a scrape that holds a series twice."""
    twice = [
        reading(Sample("memory_used", 1.0, 0)),
        reading(Sample("memory_used", 2.0, 0), source="jax"),
    ]
    lines = [line for line in write_text(twice, LABELS).splitlines() if line[0] != "#"]
    assert len({line.rsplit(" ", 1)[0] for line in lines}) == len(lines)
    assert next(line for line in lines if line.startswith("memory_used")).endswith(" 1.0")


ODD = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            Sample,
            st.sampled_from(sorted(METRICS)),
            st.floats(allow_nan=False, allow_infinity=False),
            st.none() | st.integers(0, 3),
            st.dictionaries(st.sampled_from(["quantile", "link"]), ODD, max_size=2),
        ),
        max_size=8,
    ),
    ODD,
)
def test_whatever_is_read_prometheus_client_reads_back(samples, host):
    text = write_text([reading(*samples, host=host)], LABELS)
    found = parse(text)
    for sample in samples:
        known = METRICS[sample.metric]
        percent = known.gke_name and known.unit == "share" and sample.chip is not None
        name = prometheus_name(sample.metric)
        if not percent:
            values = [value for (other, _), value in found.items() if other == name]
            assert any(value == other.value for value in values for other in samples), (
                f"{name} of {samples}"
            )
        assert [1 for (other, labels) in found if other == name and ("host", host) in labels]


def test_the_labels_of_this_machine_come_from_its_slice():
    here = Accelerators(kind="tpu", count=4, generation="v6e", slice_name="v6e-16")
    labels = detect_labels(here)
    assert (labels.make, labels.model, labels.tpu_topology) == ("cloud-tpu", "tpu-v6e-slice", "4x4")
    assert detect_labels(Accelerators(kind="gpu", count=1)).make == "nvidia"


def test_labels_of_a_pod_come_from_its_environment(monkeypatch):
    monkeypatch.setenv("POD_NAME", "train-0")
    assert detect_labels(Accelerators(kind="tpu", count=4)).others == {"pod": "train-0"}


@pytest.fixture
def exporter():
    made = PrometheusExporter(0, labels=LABELS)
    yield made
    made.close()


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class TestServer:
    def test_it_serves_the_newest_readings(self, exporter):
        for value in (0.25, 0.5):
            exporter.export([reading(Sample("duty_cycle", value, 0))])
            assert f"}} {value * 100}" in get(exporter.url)

    def test_a_source_that_is_gone_takes_its_series_along(self, exporter):
        exporter.export([reading(Sample("duty_cycle", 0.5, 0))])
        exporter.export([reading(missing={"duty_cycle": "gone"})])
        assert "duty_cycle{" not in get(exporter.url)

    def test_readings_of_several_hosts_stand_beside_each_other(self, exporter):
        for process in range(3):
            one = reading(Sample("duty_cycle", 0.5, 0), host=f"h{process}", process=process)
            exporter.export([one])
        assert get(exporter.url).count("\nduty_cycle{") == 3

    def test_it_listens_on_loopback_alone(self, exporter):
        assert exporter.address == "127.0.0.1"
        import psutil

        (mine,) = [
            one.laddr
            for one in psutil.Process().net_connections()
            if one.status == "LISTEN" and one.laddr.port == exporter.port
        ]
        assert mine.ip == "127.0.0.1"

    def test_a_name_that_a_web_page_points_here_is_refused(self, exporter):
        exporter.export([reading(Sample("duty_cycle", 0.5, 0))])
        for host in ("evil.example", f"evil.example:{exporter.port}", "127.0.0.1.evil.example", ""):
            asked = urllib.request.Request(exporter.url, headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError, match="421") as refused:
                urllib.request.urlopen(asked, timeout=10)
            assert b"duty_cycle" not in refused.value.read()
        for host in ("localhost", "LOCALHOST:1", "[::1]:9090", "127.0.0.1"):
            asked = urllib.request.Request(exporter.url, headers={"Host": host})
            with urllib.request.urlopen(asked, timeout=10) as answer:
                assert b"duty_cycle" in answer.read()

    def test_on_an_address_of_a_network_any_name_is_answered(self, monkeypatch):
        monkeypatch.setattr("tpukit.observe.exporters.prometheus.is_loopback", lambda _: False)
        made = PrometheusExporter(0, labels=LABELS)
        try:
            url = f"http://127.0.0.1:{made.port}/metrics"
            asked = urllib.request.Request(url, headers={"Host": "train-0.pods.cluster:9090"})
            with urllib.request.urlopen(asked, timeout=10) as answer:
                assert answer.status == 200
        finally:
            made.close()

    def test_anything_else_is_not_found(self, exporter):
        for path in ("/etc/passwd", "/../metrics", "/metrics/x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(f"http://127.0.0.1:{exporter.port}{path}")

    def test_a_port_that_is_taken_is_an_error_that_says_so(self, exporter):
        with pytest.raises(TPUValidationError, match=f"port {exporter.port} of 127.0.0.1"):
            PrometheusExporter(exporter.port, labels=LABELS)

    def test_it_can_be_closed_and_opened_on_its_port_again(self):
        first = PrometheusExporter(0, labels=LABELS)
        first.close()
        second = PrometheusExporter(first.port, labels=LABELS)
        assert get(second.url) == ""
        second.close()


def everything():
    """A reading that has every metric of the glossary, so that each of its series exists."""
    samples = []
    for name, metric in METRICS.items():
        labels = {}
        if name.endswith("latency_seconds") or name == "hlo_execution_seconds":
            labels = {"quantile": "0.5", "buffer_size": "8MB+"}
        if name == "ici_link_health":
            labels = {"link": "tray1.chip0.ici0.int"}
        chips = range(2) if metric.scope == "chip" else [None]
        samples += [Sample(name, 0.5, chip, labels) for chip in chips]
    return reading(*samples)


def metric_names(expression):
    """Names of series in a query: words before a brace, those inside label_values included."""
    return set(re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*\{", expression)) | set(
        re.findall(r"label_values\((\w+),", expression)
    )


def panel_queries():
    board = load_dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return queries, [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]


class TestGrafana:
    def test_every_metric_it_uses_is_exported(self):
        exported = {name for name, _ in parse(write_text([everything()], LABELS))}
        queries, variables = panel_queries()
        used = {name for query in [*queries, *variables] for name in metric_names(query)}
        assert len(used) >= 18
        assert used <= exported, f"not exported: {sorted(used - exported)}"

    def test_the_check_can_fail(self):
        assert metric_names('max(duty_cycel{host="a"}) / b{c="d"}') == {"duty_cycel", "b"}

    def test_panels_do_not_overlap_and_have_names(self):
        taken = set()
        for panel in load_dashboard()["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells
            assert panel["title"]
            assert at["x"] + at["w"] <= 24

    def test_it_is_written_for_import(self, tmp_path):
        path = write_dashboard(tmp_path / "board.json")
        assert json.loads(path.read_text()) == load_dashboard()


PROMETHEUS = shutil.which("prometheus")


@pytest.fixture
def prometheus(tmp_path, exporter):
    """Debian's Prometheus, scraping the exporter every second."""
    if PROMETHEUS is None:
        pytest.skip("no Prometheus server here (apt-get install prometheus)")
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {
                "job_name": "tpukit",
                "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}],
            }
        ],
    }
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={file}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        server.kill()
        server.wait()


def ask(api, query, deadline_s=60):
    """The answer of the server to a query, once it has one."""
    url = f"{api}/query?{urllib.parse.urlencode({'query': query})}"
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            answer = json.loads(get(url))
            assert answer["status"] == "success"
            if answer["data"]["result"]:
                return answer["data"]["result"]
        except (urllib.error.URLError, ConnectionError):
            pass  # still starting
        assert time.monotonic() < deadline, f"no answer to {query}"
        time.sleep(0.2)


def test_a_real_prometheus_scrapes_it_and_answers_every_query_of_the_dashboard(
    prometheus, exporter
):
    exporter.export([everything()])
    (found,) = ask(prometheus, 'duty_cycle{accelerator_id="host-0-1"}')
    assert float(found["value"][1]) == 50.0
    assert found["metric"]["model"] == "tpu-v6e-slice"
    assert set(found["metric"]) >= GKE_LABELS
    (up,) = ask(prometheus, 'up{job="tpukit"}')
    assert up["value"][1] == "1"
    for query in panel_queries()[0]:
        assert ask(prometheus, query.replace("$host", ".*"), deadline_s=10), query
    exporter.export([reading(missing={"duty_cycle": "gone"})])
    ask(prometheus, "absent(duty_cycle)")  # what is missing is absent there, and never 0
