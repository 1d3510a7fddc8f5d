"""Run directories with anything in them: FIFOs, links, odd numbers, and still an answer."""

import json
import os
import threading

import pytest
from sample_runs import make_run, write_lines

from tpukit.observe.dashboard.answers import Query
from tpukit.observe.dashboard.app import RUN_VIEWS, answer_about, look
from tpukit.observe.dashboard.library import Library
from tpukit.observe.runs import Run, growing_file
from tpukit.observe.runs.growing_file import sample_records
from tpukit.observe.top.feed import Feed
from tpukit.records.events import read_events
from tpukit.runtime.plain_files import open_plain, read_plain

FILES = ("metrics.jsonl", "events.jsonl", "hosts/0/steps.jsonl", "hosts/0/readings.jsonl")
ASKED = {"series": {"metrics": "loss,mfu,goodput,memory_used"}, "curve": {"metric": "loss"}}
ODD_NUMBERS = ('"x"', "Infinity", "-Infinity", "NaN", "1e999", "null", "true", "[]", "{}", "-1",
               "1e300", "9" * 400)  # fmt: skip


def fifo(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)


def all_answers(folder):
    """Everything that dashboard and top show, from a thread that must come back."""
    found = {}

    def read():
        library = Library([folder])
        found["runs"] = {name: json.loads(one) for name, one in look(library).items()}
        for name, one in library.runs().items():
            for what in RUN_VIEWS:
                found[name, what] = json.loads(answer_about(one, what, Query(ASKED.get(what, {}))))
            feed = Feed(one.path, at_once=True, hosts=[str(one.path)])
            found[name, "top"] = json.dumps(feed.read().to_dict())
            feed.close()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for a file"
    assert "runs" in found, "it ended in an error"
    return found


@pytest.mark.parametrize("name", [*FILES, "run.json", "train.log"])
def test_a_fifo_is_not_waited_for(tmp_path, name):
    run = make_run(tmp_path / "odd", steps=20, hosts=1, chips=1)
    make_run(tmp_path / "good", steps=20, hosts=1, chips=1)
    fifo(run, name)
    found = all_answers(tmp_path)
    assert found["runs"]["good"]["figures"]["step"]["value"] == 20
    if name in FILES[:2]:
        assert "no regular file" in found["runs"]["odd"]["problem"]


@pytest.mark.parametrize("number", ODD_NUMBERS)
@pytest.mark.parametrize("file", FILES)
def test_numbers_that_are_none_take_nothing_down(tmp_path, file, number):
    run = make_run(tmp_path / "odd", steps=20, hosts=1, chips=1)
    make_run(tmp_path / "good", steps=20, hosts=1, chips=1)
    last = json.loads((run / file).read_text().splitlines()[-1])
    for key in last:
        line = ", ".join(
            f"{json.dumps(name)}: {number if name == key else json.dumps(value)}"
            for name, value in last.items()
        )
        with (run / file).open("a") as lines:
            lines.write(f"{{{line}}}\n")
    found = all_answers(tmp_path)
    assert found["runs"]["good"]["figures"]["step"]["value"] == 20
    assert "unexpected" not in found["runs"]["odd"]["problem"]
    assert found["runs"]["odd"]["figures"]["step"]["value"] is not None


def test_an_error_that_no_one_foresaw_stays_with_its_run(tmp_path, monkeypatch, caplog):
    for name in ("odd", "good"):
        make_run(tmp_path / name, steps=20, hosts=1, chips=1)
    right = Run.summary

    def summary(run, **options):
        if run.path.name == "odd":
            raise KeyError("broken")
        return right(run, **options)

    monkeypatch.setattr(Run, "summary", summary)
    library = Library([tmp_path])
    for _ in range(3):
        found = {name: json.loads(one) for name, one in look(library).items()}
    assert found["good"]["figures"]["step"]["value"] == 20
    assert found["odd"]["problem"] == "it cannot be summarised: unexpected KeyError"
    assert found["odd"].keys() == found["good"].keys()
    assert found["odd"]["figures"].keys() == found["good"]["figures"].keys()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", [*FILES, "train.log", "run.json", "hosts", "hosts/0"])
def test_links_out_of_a_run_are_not_followed(tmp_path, name):
    outside = make_run(tmp_path / "outside", steps=20, hosts=1, chips=1, total_steps=987654321)
    (outside / "train.log").write_text("a secret line\n")
    write_lines(outside / "metrics.jsonl", [{"step": 987654321, "step_time_s": 1, "loss": 1.0}])
    for file in (outside / "hosts" / "0").iterdir():
        file.write_text(file.read_text().replace("host-0", "a secret line"))
    run = make_run(tmp_path / "runs" / "linked", steps=10, hosts=1, chips=1, slice_name="v6e-1")
    (run / "train.log").write_text("its own line\n")
    os.rename(run / name, tmp_path / "moved")
    (run / name).symlink_to(outside / name)
    text = json.dumps(str(all_answers(tmp_path / "runs")))
    assert "987654321" not in text
    assert "a secret line" not in text


def test_links_within_a_run_and_to_a_run_are_followed(tmp_path):
    run = make_run(tmp_path / "real", steps=20, hosts=1, chips=1)
    os.rename(run / "metrics.jsonl", run / "old.jsonl")
    (run / "metrics.jsonl").symlink_to("old.jsonl")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(run)
    assert Run(tmp_path / "runs" / "latest").series("loss").total == 20


def test_only_regular_files_are_opened(tmp_path):
    for odd in (tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="no regular file"):
            open_plain(odd)
    os.mkfifo(tmp_path / "events.jsonl")
    assert read_events(tmp_path / "events.jsonl") == []
    (tmp_path / "large").write_bytes(bytes(10))
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_plain(tmp_path / "large", at_most=9)


def test_a_line_without_an_end_is_not_read_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(growing_file, "CHUNK", 1 << 10)
    monkeypatch.setattr(growing_file, "LONGEST_LINE", 4 << 10)
    run = make_run(tmp_path / "odd", steps=20, hosts=1, chips=1)
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(1 << 40)  # sparse: a terabyte of zeros
    found = Run(run)
    found.metrics()
    assert "a line has more than" in found.summary().problem


@pytest.mark.parametrize("steps", [0, 1, 47, 48, 49, 500, 5000])
def test_samples_are_from_all_over_a_file(tmp_path, steps):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, ({"step": step, "loss": 1.0} for step in range(1, steps + 1)))
    found = [record["step"] for record in sample_records(file, 48)]
    assert found == sorted(set(found))
    assert len(found) == min(48, steps)
    if steps:
        assert found[-1] == steps
        assert found[0] <= 2
