"""What is found in folders, under which names, while it comes, changes and goes."""

import json
import shutil

import pytest
from sample_report import sample_report
from sample_runs import make_run, metric, write_lines

from tpukit.observe.dashboard.library import POLL_S, Library, NotFound


class Clock:
    now = 0.0

    def __call__(self):
        self.now += POLL_S
        return self.now


def library(*folders):
    return Library(folders, clock=Clock())


def small_run(path):
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    write_lines(path / "metrics.jsonl", [metric(1, began=0.0)])
    return path


def test_a_folder_a_run_and_the_usual_folder_are_looked_into(tmp_path):
    small_run(tmp_path / "runs" / "deep")
    small_run(tmp_path / "here")
    assert set(library(tmp_path).runs()) == {"deep", "here"}
    assert set(library(tmp_path / "here").runs()) == {"here"}
    assert library(tmp_path / "nowhere").runs() == {}


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("monday", "tuesday"):
        small_run(tmp_path / parent / "tiny")
    found = library(tmp_path / "monday", tmp_path / "tuesday", tmp_path / "monday")
    assert set(found.runs()) == {"monday/tiny", "tuesday/tiny"}
    assert found.run("monday/tiny").path == tmp_path / "monday" / "tiny"


def test_runs_come_change_and_go(tmp_path):
    found = library(tmp_path)
    assert found.runs() == {}
    run = small_run(tmp_path / "one")
    watched = found.run("one")
    version = watched.version
    assert found.run("one") is watched
    assert watched.version == version
    write_lines(run / "metrics.jsonl", [metric(2, began=0.0)])
    assert found.run("one").version > version
    shutil.rmtree(run)
    with pytest.raises(NotFound, match="there is no run 'one'"):
        found.run("one")


def test_files_are_looked_at_once_a_second_however_many_ask(tmp_path):
    now = [0.0]
    found = Library([tmp_path], clock=lambda: now[0])
    assert found.runs() == {}
    small_run(tmp_path / "one")
    assert found.runs() == {}
    now[0] = POLL_S
    assert set(found.runs()) == {"one"}


def test_an_answer_is_made_once_for_each_version(tmp_path):
    run = small_run(tmp_path / "one")
    found = library(tmp_path)
    made = []

    def ask(what="steps"):
        one = found.run("one")
        return one.ends.answer(what, one.version, lambda run: made.append(what) or len(made))

    assert ask() == ask() == b"1"
    write_lines(run / "metrics.jsonl", [metric(2, began=0.0)])
    assert ask() == ask() == b"2"


def test_documents_are_what_they_say_they_are(tmp_path):
    (tmp_path / "check.json").write_text(json.dumps(sample_report(), indent=2))
    (tmp_path / "other.json").write_text('{"schema": "someone/else"}')
    (tmp_path / "odd.json").write_bytes(bytes(range(256)))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    found = library(tmp_path)
    assert set(found.documents("compile")) == {"check.json"}
    assert found.documents("plan") == {}
    (tmp_path / "check.json").unlink()
    assert found.documents("compile") == {}


def test_the_check_of_a_run_is_found_with_it(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    (run / "check.json").write_text(json.dumps(sample_report()))
    assert set(library(tmp_path).documents("compile")) == {"check.json"}
