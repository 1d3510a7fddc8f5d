"""Whatever stands in the files that sources read, the next round has a reading."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpukit.observe.alerts.actions import AlertBook
from tpukit.observe.alerts.rule import AlertRule
from tpukit.observe.exporters.prometheus import Labels, write_text
from tpukit.observe.monitor.current import KEYS, summarize
from tpukit.observe.sources.replay import ReplaySource
from tpukit.observe.sources.training import OverheadSource, TrainerSource

WORDS = st.sampled_from(
    [
        *("step", "step_time_s", "loss", "mfu", "time", "not_finite", "event", "flops_per_step"),
        *("attempt started", "identity", "batch_size", "analysis", "communication_bound"),
        *("prediction", "seconds_by_cause", "ici", "dcn", "samples", "metric", "value", "chip"),
        *("labels", "missing", "source", "host", "process", "memory_used"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=10)
DEEP = "[" * 100_000
FILES = {
    "trainer": ("metrics.jsonl", "events.jsonl", "run.json"),
    "overhead": ("check.json", "profile/report.json"),
    "replay": ("readings.jsonl",),
}
MADE = {
    "trainer": TrainerSource,
    "overhead": OverheadSource,
    "replay": lambda folder: ReplaySource(folder / "readings.jsonl"),
}


def check(source):
    """A reading, and everything that is made of it."""
    reading = source.read()
    json.dumps(reading.to_dict(), allow_nan=False)
    metrics = summarize([reading])
    assert set(KEYS) <= set(metrics)
    write_text([reading], Labels()).encode(errors="replace")
    book = AlertBook("h")
    book.add(AlertRule(metric="loss", condition=">", threshold=0), lambda: None)
    book.observe(metrics, 0.0)
    book.close()
    return reading


@pytest.mark.parametrize("kind", FILES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(OBJECTS, min_size=1, max_size=3))
def test_objects_of_the_wrong_shape(kind, lines, tmp_path):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in FILES[kind]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if name.endswith("jsonl") else json.dumps(lines[0]))
    check(MADE[kind](tmp_path))


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\xff\xfe\x00", DEEP.encode(), b"[1]\n", b"7\n"]
)
def test_bytes_that_are_no_records(kind, content, tmp_path):
    for name in FILES[kind]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    reading = check(MADE[kind](tmp_path))
    assert reading.samples == ()
    assert reading.missing


@pytest.mark.parametrize("kind", FILES)
def test_folders_where_files_should_be(kind, tmp_path):
    for name in FILES[kind]:
        (tmp_path / name).mkdir(parents=True)
    reading = check(MADE[kind](tmp_path))
    assert reading.samples == ()
    assert reading.missing


def test_the_fuzz_reaches_good_records_too(tmp_path):
    record = {"step": 1, "step_time_s": 0.5, "loss": 2.0, "time": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert check(TrainerSource(tmp_path)).values("loss") == [2.0]
