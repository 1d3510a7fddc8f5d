"""Stages in order: what one finds, fails at or leaves out, and what is left on the disk."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from sample_rehearsal import sample_rehearsal
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.cli.rehearse import PlainRehearsalView
from tpukit.errors import ConfigError, TPUError, TPUValidationError
from tpukit.job import Job
from tpukit.rehearsal.rehearse import Began, play, prepare, refuse_other_folder, rehearse
from tpukit.rehearsal.result import RESULT
from tpukit.rehearsal.stage import LeftOut, Scene


class Found:
    def __init__(self, good):
        self.is_good, self.sentence = good, "something"

    def beside(self):
        return ()

    def to_dict(self):
        return {}


class Stage:
    name, question = "stage", "And?"

    def __init__(self, result):
        self.result = result

    def run(self, scene):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def scene():
    return Scene(None, None, None, None)


@pytest.mark.parametrize(
    ("result", "verdict", "sentence"),
    [
        (Found(True), "passed", "something"),
        (Found(False), "failed", "something"),
        (TPUError("no such thing"), "failed", "no such thing"),
        (LeftOut("not for this model"), "left out", "not for this model"),
    ],
)
def test_a_stage_ends_with_a_verdict(scene, result, verdict, sentence):
    played = play(Stage(result), scene)
    assert (played.verdict, played.sentence) == (verdict, sentence)
    assert len(scene.findings) == isinstance(result, Found)
    assert played.to_dict()["stage"] == "stage"


def test_an_error_nobody_foresaw_is_not_a_finding(scene):
    with pytest.raises(ZeroDivisionError):
        play(Stage(ZeroDivisionError()), scene)


def test_a_stage_that_needs_another_is_left_out(scene):
    with pytest.raises(LeftOut, match="needs the result of 'found'"):
        scene.find(Found)
    play(Stage(Found(True)), scene)
    assert scene.find(Found).is_good


def test_a_folder_with_something_else_is_not_replaced(tmp_path):
    refuse_other_folder(tmp_path / "new")
    (tmp_path / "old").mkdir()
    refuse_other_folder(tmp_path / "old")
    (tmp_path / "old" / "thesis.tex").touch()
    with pytest.raises(TPUValidationError, match="something other than a rehearsal"):
        rehearse(folder=tmp_path / "old")
    (tmp_path / "old" / RESULT).touch()
    refuse_other_folder(tmp_path / "old")
    with pytest.raises(TPUValidationError, match="something other than a rehearsal"):
        refuse_other_folder(tmp_path / "old" / "thesis.tex")


def test_a_job_without_a_slice_and_too_few_steps_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="which slice"):
        rehearse(Job(model="tiny"), folder=tmp_path / "new")
    with pytest.raises(TPUValidationError, match="steps"):
        rehearse(steps=3, folder=tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_begins_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["rehearse", "llama3.1-8b", "--on", "v6e-64", "--dry-run"])
    assert found.exit_code == 0, found.output
    assert "stands in for llama3.1-8b" in found.stdout
    said = CliRunner().invoke(app, ["rehearse", "--dry-run", "--json"])
    assert json.loads(said.stdout)["is_same_model"] is True
    assert not list(tmp_path.iterdir())
    assert prepare(None)[0].slice.chip.name == "v6e"


def test_a_result_shows_itself_to_people_and_machines():
    from rich.console import Console

    result = sample_rehearsal("something was found")
    data = json.loads(json.dumps(result.to_dict()))
    assert data["good"] is False
    assert result.exit_code == 1
    assert [one["stage"] for one in data["stages"]][-1] == "quantize"
    pairs = {one["what"]: one for one in data["predicted_beside_measured"]}
    assert pairs["step"]["ratio"] is None, "steps of a TPU and of a CPU"
    assert pairs["steps repeated"]["measured"]["value"] == 1
    assert pairs["checkpoint"]["ratio"] == pytest.approx(1000 / 900)
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, record=True, width=200)
        console.print(result)
    text = console.export_text()
    assert "different machines" in text
    assert "failed: quantize" in text


def test_off_a_terminal_progress_is_plain_lines(capsys):
    view = PlainRehearsalView()
    view.tell(Began("plan", "Which slice?"))
    view.say("weighed 3 candidates")
    view.tell(SimpleNamespace(name="plan", question="Which slice?"))
    view.tell(sample_rehearsal("sold").played[-1])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" s  ", 1)[1].split() for line in lines] == [
        ["plan:", "Which", "slice?"],
        ["plan", "weighed", "3", "candidates"],
        ["plan:", "Which", "slice?"],
        ["✗", "quantize", "1.0", "s", "sold"],
    ]
    assert "\x1b" not in "".join(lines)


@pytest.mark.slow
def test_the_whole_life_of_the_default_job(tmp_path):
    """Everything for real: the TPU compiler, an emulated cloud, processes that are killed."""
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", "rehearse", "--steps", "60", "-o", "out", "--json"],
        cwd=tmp_path,
        env={**os.environ, "XLA_FLAGS": "", "REHEARSED_IN": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert [one["verdict"] for one in said["stages"]] == ["passed"] * 9
    # Read by nobody's code: the files that the two runs left.
    losses = [
        {line["step"]: line["loss"] for line in map(json.loads, path.read_text().splitlines())}
        for path in (
            tmp_path / "out" / run / "metrics.jsonl" for run in ("undisturbed", "preempted")
        )
    ]
    assert losses[0] == losses[1]
    assert list(losses[0]) == list(range(1, 61))
    assert losses[0][60] < losses[0][1] < 1.2 * math.log(384)
    found = {one["stage"]: one["found"] for one in said["stages"]}
    causes = [one["ending"]["cause"] for one in found["preempt"]["outcome"]["attempts"]]
    assert causes == ["spot", "spot", "done"]
    assert found["preempt"]["outcome"]["losses"][0]["lost_steps"] == 0, "it had a notice"
    assert found["preempt"]["outcome"]["losses"][1]["lost_steps"] > 0, "it had none"
    assert (
        found["check"]["refused"]["fixed_bytes"]["value"]
        < found["check"]["refused"]["usable_bytes"]
    )
    assert (
        found["check"]["refused"]["total_bytes"]["value"]
        > found["check"]["refused"]["usable_bytes"]
    )
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert "preempted-a2 is preempted without notice" in done.stderr
    left = [
        one
        for one in psutil.process_iter(["environ"])
        if (one.info["environ"] or {}).get("REHEARSED_IN") == str(tmp_path)
    ]
    assert not psutil.wait_procs(left, timeout=5)[1]


def test_a_command_of_others_is_refused_with_what_to_do_instead():
    refused = CliRunner().invoke(app, ["rehearse", "--on", "v6e-8", "--", "python", "train.py"])
    assert isinstance(refused.exception, ConfigError)
    assert "tpukit check --on SLICE -- COMMAND" in str(refused.exception)
