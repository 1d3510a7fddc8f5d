"""Readings survive JSON, hold only finite numbers, and say why a wanted metric is not there."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.observe.readings import METRICS, Reading, ReadingBuilder, Sample
from tpukit.observe.sources.replay import read_readings

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.builds(
    Sample,
    st.sampled_from(sorted(METRICS)),
    FINITE,
    st.none() | st.integers(0, 511),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)


@given(st.lists(SAMPLES, max_size=5), st.dictionaries(st.text(), st.text(), max_size=3), FINITE)
def test_a_reading_survives_json(samples, missing, at):
    reading = Reading(at, "host-3", 3, "jax", tuple(samples), missing)
    line = json.dumps(reading.to_dict(), allow_nan=False)
    assert Reading.from_dict(json.loads(line)) == reading


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_missing(value):
    found = ReadingBuilder("trainer", ["loss"])
    found.add("loss", value)
    reading = found.build()
    assert reading.samples == ()
    assert reading.missing == {"loss": f"the source reported {value}"}


def test_wanted_metrics_have_a_number_or_a_reason():
    found = ReadingBuilder("libtpu grpc", ["duty_cycle", "memory_used", "idle_seconds"])
    found.add("duty_cycle", 0.5, chip=1)
    found.lack("duty_cycle", "one chip did not answer")  # another did: it is not missing
    found.lack("memory_used", "refused")
    reading = found.build(otherwise="nothing on port 8431")
    assert reading.values("duty_cycle") == [0.5]
    assert reading.missing == {"memory_used": "refused", "idle_seconds": "nothing on port 8431"}


def test_the_glossary_is_well_made():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.meaning.endswith(".")
        assert name.islower()
        if metric.scope == "run":
            assert not metric.libtpu_name
    libtpu = [metric.libtpu_name for metric in METRICS.values() if metric.libtpu_name]
    assert len(libtpu) == len(set(libtpu))


def test_gke_names_are_those_of_gke():
    assert {metric.gke_name for metric in METRICS.values()} - {""} == {
        "duty_cycle",
        "memory_bandwidth_utilization",
        "memory_total",
        "memory_used",
        "tensorcore_utilization",
    }


@pytest.mark.parametrize(
    "change", [{"host": 3}, {"process": "0"}, {"process": [0]}, {"source": None}, {"chip": [1]}]
)
def test_a_damaged_line_is_no_reading(tmp_path, change):
    whole = {"time": 1.0, "host": "a", "process": 0, "source": "jax"}
    sample = {"metric": "duty_cycle", "value": 0.5, "chip": 0}
    lines = [
        {**whole, "samples": [sample]},
        {**whole, **change, "samples": [{**sample, **change}]},
    ]
    file = tmp_path / "readings.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [one.host for one in read_readings(file)] == ["a"]
