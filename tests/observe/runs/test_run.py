"""One run directory from its beginning to its end, as somebody who watches sees it."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from recorded_run import chips_reading, write_run
from rich.console import Console

from tpukit.errors import TPUValidationError
from tpukit.observe import Run
from tpukit.observe.runs.series import RecordsTable
from tpukit.records.events import EventsFile


@pytest.fixture
def empty(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"steps": 70}}))
    return tmp_path


def start(folder, **about):
    file = EventsFile(folder / "events.jsonl")
    file.write("attempt started", step=0, attempt=0, **about)
    file.close()


def test_a_run_that_has_not_begun_says_what_is_missing(empty):
    summary = Run(empty).summary()
    assert (summary.state, summary.step, summary.total_steps) == ("silent", 0, 70)
    assert summary.last_seen is None
    assert f"{summary.loss:.3f}" == "–"
    said = summary.to_dict()
    assert said["loss"] is None
    assert said["missing"]["loss"] == "no step has completed yet"
    assert said["missing"]["goodput"] == "no attempt is recorded"
    assert said["missing"]["checkpoint_age_s"] == "none was saved"
    assert Run(empty).metrics() == []


def test_a_long_compile_is_no_silence_and_a_long_pause_is(empty):
    start(empty, no_prediction="the job names no slice")
    now = time.time()
    run = Run(empty)
    assert run.summary(now=now + 1800).state == "running"
    assert run.summary(now=now + 7200).state == "silent"
    assert run.summary().to_dict()["missing"]["predicted_step_s"] == "the job names no slice"
    with (empty / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 1, "loss": 1.0, "step_time_s": 2.0, "time": now}) + "\n")
    line = {"time": now, "step": 1, "step_time_s": 2.0}
    (empty / "hosts" / "0").mkdir(parents=True)
    (empty / "hosts" / "0" / "steps.jsonl").write_text(json.dumps(line) + "\n")
    assert run.summary(now=now + 50).state == "running"
    assert run.summary(now=now + 1800).state == "silent"
    assert "silent since" in str(run.summary(now=now + 1800))


def test_steps_of_seconds_may_take_a_minute_and_more(empty):
    start(empty)
    now = time.time()
    with (empty / "metrics.jsonl").open("w") as file:
        for step in (1, 2, 3):
            line = {"step": step, "loss": 1.0, "step_time_s": 40.0, "time": now}
            file.write(json.dumps(line) + "\n")
    line = {"time": now, "step": 3, "step_time_s": 40.0}
    (empty / "hosts" / "0").mkdir(parents=True)
    (empty / "hosts" / "0" / "steps.jsonl").write_text(json.dumps(line) + "\n")
    assert Run(empty).summary(now=now + 300).state == "running"
    assert Run(empty).summary(now=now + 500).state == "silent"


def test_the_figures_of_a_summary_are_those_of_the_newest_steps(tmp_path):
    now = time.time()
    run = Run(write_run(tmp_path / "run", 2, now=now))
    summary = run.summary(now=now + 2)
    assert (summary.state, summary.step, summary.total_steps) == ("running", 300, 1000)
    assert summary.loss == pytest.approx(10 / 300)
    assert (summary.step_time_p50_s, summary.step_time_p99_s) == (1.0, 1.0)
    assert summary.checkpoint_age_s == pytest.approx(62)
    assert summary.goodput == pytest.approx(260 / 400)
    assert (summary.slice, summary.chips, summary.attempts) == ("v6e-8", 8, 1)
    console = Console(width=120, record=True)
    console.print(summary)
    assert "predicted 0.8 s" in console.export_text()


def test_a_loss_that_is_not_finite_is_named(tmp_path):
    run = write_run(tmp_path / "run", 1)
    with (run / "metrics.jsonl").open("a") as file:
        line = {"step": 301, "loss": None, "step_time_s": 1.0, "not_finite": {"loss": "nan"}}
        file.write(json.dumps({**line, "time": time.time()}) + "\n")
    assert Run(run).summary().to_dict()["missing"]["loss"] == "it is nan"


def test_chips_have_series_over_time_and_over_steps(tmp_path):
    now = time.time()
    run = Run(write_run(tmp_path / "run", 2, now=now))
    assert "duty_cycle" in run.metrics()
    by_time = run.series("duty_cycle", by="time", process=1, chip=3)
    assert by_time.total == 20
    assert by_time.x[0] == pytest.approx(now - 20)
    assert by_time.y.tolist() == pytest.approx([0.931] * 20)
    by_step = run.series("duty_cycle", process=1)
    assert by_step.x[0] == pytest.approx(280)
    latency = run.series("dcn_latency_seconds", by="time")
    assert latency.y.tolist() == [0.002] * 20  # the median, not the rare ones
    assert run.series("step_time_seconds").y.tolist() == [1.0] * 300
    with pytest.raises(TPUValidationError, match="no metric 'duty_cycle'"):
        run.series("duty_cycle", process=9)


def test_new_readings_come_in_and_another_file_is_read_anew(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    path = run.readings_file(0)
    assert run.series("duty_cycle", by="time").total == 20
    with path.open("a") as file:
        file.write(json.dumps(chips_reading(time.time(), "host-0", 0, duty=0.5).to_dict()) + "\n")
    assert run.series("duty_cycle", by="time").y[-1] == 0.5
    assert run.readings()[0, "libtpu grpc"].values("duty_cycle") == [0.5] * 4
    path.write_text(json.dumps(chips_reading(5.0, "host-0", 0, duty=0.1).to_dict()) + "\n")
    assert run.series("duty_cycle", by="time").y.tolist() == pytest.approx([0.1])


def test_readings_that_make_no_sense_are_passed_over(tmp_path):
    run = Run(write_run(tmp_path / "run", 1))
    good = chips_reading(time.time(), "host-0", 0).to_dict()
    odd = [
        {**good, "time": "noon"},
        {**good, "samples": [{"metric": 3, "value": 1.0}]},
        {**good, "samples": [{"metric": "duty_cycle", "value": "much"}]},
        {**good, "samples": 7},
        {"time": 1.0},
        [],
    ]
    run.readings_file(0).write_text("".join(json.dumps(one) + "\n" for one in [*odd, good]))
    assert list(run.readings()) == [(0, "libtpu grpc")]
    assert run.series("duty_cycle", by="time").total == 1


def test_what_the_disk_refuses_is_said_and_what_was_read_stays(tmp_path):
    folder = write_run(tmp_path / "run", 1)
    run = Run(folder)
    before = run.series("loss").y
    os.unlink(folder / "metrics.jsonl")
    (folder / "metrics.jsonl").mkdir()  # opening it fails, for root as well
    np.testing.assert_array_equal(run.series("loss").y, before)
    assert "metrics.jsonl cannot be read" in run.summary().problem


def test_folders_that_are_no_processes_are_passed_over(tmp_path):
    folder = write_run(tmp_path / "run", 2)
    for name in ("notes", "-1", "2.5", "²"):
        (folder / "hosts" / name).mkdir()
    assert Run(folder).processes() == [0, 1]


def test_threads_may_share_a_run_that_is_written(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", 1, steps=50)
    run, add = Run(folder), RecordsTable.add

    def add_slowly(table, piece):
        time.sleep(0.002)  # so that the others come in between
        add(table, piece)

    monkeypatch.setattr(RecordsTable, "add", add_slowly)
    written = threading.Event()

    def look():
        while not written.is_set():
            run.series("loss")

    with ThreadPoolExecutor(6) as pool:
        looking = [pool.submit(look) for _ in range(6)]
        with (folder / "metrics.jsonl").open("a") as file:
            for step in range(51, 251):
                line = {"step": step, "loss": 1.0, "step_time_s": 1.0, "time": time.time()}
                file.write(json.dumps(line) + "\n")
                file.flush()
                time.sleep(0.0005)
        written.set()
        assert [one.result() for one in looking] == [None] * 6
    assert run.series("loss").x.tolist() == list(range(1, 251))


def test_events_are_read_as_they_come(tmp_path):
    folder = write_run(tmp_path / "run", 1)
    run = Run(folder)
    count = len(run.events())
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 5.0, "event": "note", "te')
        file.flush()
        assert len(run.events()) == count
        file.write('xt": "x"}\nnonsense\n{"event": "no time"}\n')
    assert run.events()[-1].data == {"text": "x"}
    assert len(run.events()) == count + 1
    (folder / "events.jsonl").unlink()
    assert run.events() == ()
