"""What the server says of runs, plans and checks, against the files themselves."""

import json
import math

import numpy as np
import pytest
from sample_report import sample_report
from sample_runs import metric, write_lines
from served import Served

from tpukit.hardware import Slice
from tpukit.hardware.slice import chip_positions


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_are_listed_with_the_folders_they_are_in(served, folder):
    found = served.get("/api/runs")
    assert {run["name"] for run in found["runs"]} == {"first", "second", "cube"}
    assert found["folders"] == [str(folder)]


def test_a_summary_has_every_figure_with_its_origin_or_a_reason(served, folder):
    found = served.get("/api/runs/second/summary")
    last = lines(folder / "runs/second/metrics.jsonl")[-1]
    figures = found["figures"]
    assert found["state_in_words"] == "ended: done"
    assert figures["step"]["value"] == 200
    assert figures["loss"]["value"] == last["loss"]
    assert figures["predicted_step"] == {
        **figures["predicted_step"],
        "value": 0.47,
        "origin": "model",
    }
    assert figures["ratio"]["value"] == pytest.approx(figures["step_time"]["value"] / 0.47)
    for one in figures.values():
        assert (one["value"] is None) == ("reason" in one) != ("origin" in one)


@pytest.mark.parametrize("by", ["step", "time"])
def test_a_series_is_what_the_file_holds(served, folder, by):
    found = served.get(f"/api/runs/first/series?metrics=loss,mfu&by={by}&points=2000")
    records = lines(folder / "runs/first/metrics.jsonl")
    loss, mfu = found["series"]
    assert loss["x"] == [record[by] for record in records]
    assert loss["y"] == [record["loss"] for record in records]
    assert mfu["unit"] == "share"
    assert loss["origin"] == "measured"


def test_a_series_is_thinned_and_keeps_its_extremes(served, folder):
    (found,) = served.get("/api/runs/first/series?metrics=loss&points=50")["series"]
    values = [record["loss"] for record in lines(folder / "runs/first/metrics.jsonl")]
    assert len(found["x"]) <= 50
    assert found["total"] == 400
    assert {min(values), max(values)} <= set(found["y"])


def test_a_part_of_a_series_is_told_exactly(served):
    (found,) = served.get("/api/runs/first/series?metrics=loss&start=100&end=120")["series"]
    assert found["x"] == list(range(100, 121))


def test_a_metric_that_a_run_does_not_have_says_so(served):
    (found,) = served.get("/api/runs/first/series?metrics=los")["series"]
    assert found["x"] == []
    assert "loss" in found["reason"]


def test_goodput_over_time_ends_at_the_goodput(served):
    (found,) = served.get("/api/runs/second/series?metrics=goodput&by=time")["series"]
    total = served.get("/api/runs/second/goodput")
    assert found["y"][-1] == pytest.approx(total["goodput"])
    assert total["productive_s"] + sum(total["spent_s"].values()) == pytest.approx(total["wall_s"])


def test_memory_is_of_the_fullest_chip(served):
    (found,) = served.get("/api/runs/first/series?metrics=memory_used&by=time")["series"]
    assert found["label"].endswith("chip 3")
    (mine,) = served.get("/api/runs/first/series?metrics=memory_used&by=time&process=1&chip=0")[
        "series"
    ]
    assert mine["label"] == "memory_used of process 1, chip 0"
    assert mine["y"][-1] < found["y"][-1]


def test_events_are_those_worth_telling(served):
    found = served.get("/api/runs/first/events")["events"]
    kinds = [event["event"] for event in found]
    assert kinds.count("attempt started") == 2
    assert "spent" not in kinds
    (taken,) = (event for event in found if event["event"] == "preempted")
    assert (taken["step"], taken["words"]) == (200, "signal SIGTERM")


def test_the_end_of_the_log_is_told(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "train.log").write_text("".join(f"line {at}\n" for at in range(99)) + "half a li")
    with Served([tmp_path]) as one:
        assert one.get("/api/runs/run/log")["lines"] == [f"line {at}" for at in range(59, 99)]


def test_stragglers_are_those_of_the_run(served):
    found = served.get("/api/runs/first/stragglers")
    assert found["hosts"] == 4
    assert [one["host"] for one in found["found"]] == ["host-2"]


@pytest.mark.parametrize(("run", "name"), [("first", "v6e-16"), ("cube", "v5p-128")])
def test_chips_lie_where_the_hardware_has_them(served, run, name):
    found = served.get(f"/api/runs/{run}/chips")
    target = Slice.parse(name)
    assert found["layout"]["shape"] == list(target.topology)
    assert found["layout"]["wraps"] == list(target.wraps)
    assert [(one["process"], one["chip"], tuple(one["coordinates"])) for one in found["chips"]] == [
        (one.process, one.chip, one.coordinates) for one in chip_positions(target)
    ]
    values = {(one["process"], one["chip"]): one["value"] for one in found["chips"]}
    assert values.pop((2, 1)) == 0.41
    assert min(values.values()) > 0.9


def test_a_chip_without_a_value_says_why(served):
    found = served.get("/api/runs/first/chips?metric=power_watts")
    assert {one["reason"] for one in found["chips"]} == {"TPUs publish none"}
    assert {one["value"] for one in found["chips"]} == {None}


def test_two_runs_are_compared_settings_first(served):
    found = served.get("/api/compare?a=first&b=second")
    different = {one["key"]: (one["a"], one["b"]) for one in found["settings"]}
    assert different["recipe.learning_rate"] == ("0.0003", "0.0001")
    assert "identity.model" in {one["key"] for one in found["same"]}
    assert "identity.model" not in different
    (loss,) = (row for row in found["figures"] if row["title"] == "Loss")
    assert loss["ratio"] == loss["b"]["value"] / loss["a"]["value"]


def test_a_run_compared_with_itself_differs_in_nothing(served):
    found = served.get("/api/compare?a=first&b=first")
    assert found["settings"] == []
    assert {row["ratio"] for row in found["figures"]} == {1.0}


def test_plans_and_checks_are_found_by_what_they_hold(served, plan_data):
    (plan,) = served.get("/api/plan")["files"]
    assert (plan["name"], plan["about"], plan["good"]) == ("plan.json", "llama3.2-1b", True)
    assert served.get("/api/plan?file=plan.json") == plan_data
    (check,) = served.get("/api/compile")["files"]
    assert check["memory"]["value"] == sample_report()["memory"]["total_bytes"]
    for kind in ("plan", "compile"):
        name = served.get(f"/api/{kind}")["files"][0]["name"]
        assert b"Made by tpukit" in served.ask(f"/{kind}/page?file={name}").body


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/runs/firs/summary", 404, "did you mean 'first'"),
        ("/api/runs/first/nothing", 404, "series"),
        ("/api/runs/first/series", 400, "metrics"),
        ("/api/runs/first/series?metrics=loss&points=-1", 400, "points"),
        ("/api/runs/first/series?metrics=loss&points=1e9", 400, "points"),
        ("/api/runs/first/series?metrics=loss&points=99999999999", 400, "points"),
        ("/api/runs/first/series?metrics=loss&start=nan", 400, "start"),
        ("/api/runs/first/series?metrics=loss&by=day", 400, "step, time"),
        ("/api/runs/first/series?metric=loss", 400, "did you mean 'metrics'"),
        (f"/api/runs/first/series?metrics={'a,' * 40}b", 400, "at most"),
        ("/api/compare?a=first", 400, "b is missing"),
        ("/api/plan?file=", 400, "file"),
        ("/api/nothing", 404, "nothing at"),
    ],
)
def test_errors_say_what_is_wrong_and_the_way_out(served, path, status, words):
    answer = served.ask(path)
    assert answer.status == status
    assert words in answer.data["error"].lower() or words in answer.data["error"]
    assert answer.data["way_out"]


def test_numbers_that_json_has_no_word_for_are_null(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    write_lines(run / "metrics.jsonl", [{**metric(1, began=0.0), "loss": math.nan}])
    with Served([tmp_path]) as one:
        body = one.ask("/api/runs/run/series?metrics=loss").body
    assert json.loads(body, parse_constant=pytest.fail)["series"][0]["y"] == [None]


def test_names_with_markup_are_only_names(tmp_path):
    name = "<b onclick=x>&\"'"
    run = tmp_path / name
    run.mkdir()
    (run / "run.json").write_text("{}")
    write_lines(run / "metrics.jsonl", [{**metric(1, began=0.0), name: 3.0}])
    with Served([tmp_path]) as one:
        answer = one.ask("/api/runs")
        assert answer.headers["content-type"] == "application/json"
        assert [run["name"] for run in answer.data["runs"]] == [name]


def test_the_first_answer_does_not_wait_for_a_long_file(tmp_path):
    """The ends of a file say how a run is doing; the whole of it is read for its curves alone."""
    run = tmp_path / "long"
    run.mkdir()
    (run / "run.json").write_text("{}")
    write_lines(run / "metrics.jsonl", (metric(step, began=0.0) for step in range(1, 3001)))
    with Served([tmp_path]) as one:
        watched = one.library.run("long")
        with watched.whole.lock:  # as while the whole file is read
            assert one.get("/api/runs/long/summary")["figures"]["step"]["value"] == 3000
        assert np.all(np.diff(one.get("/api/runs/long/series?metrics=loss")["series"][0]["x"]) > 0)


def damage_nothing(run):
    """As soon as it is there: one file, and no step."""


def damage_bytes(run):
    for name in ("metrics.jsonl", "events.jsonl", "check.json", "hosts/0/readings.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(bytes(range(256)) * 3 + b"\n{}\n[]\n3\n")


def damage_kinds(run):
    for name in ("metrics.jsonl", "events.jsonl", "check.json"):
        (run / name).mkdir()
    (run / "hosts").write_text("no folder")


def damage_values(run):
    odd = {"time": "x", "step": [], "loss": {}, "event": 3, "samples": [{"metric": 1}]}
    started = {"time": 1.0, "event": "attempt started", "step": "x", "slice": 7, "chips": "many"}
    write_lines(run / "metrics.jsonl", [odd, {**metric(1, began=0.0), "loss": "high"}])
    write_lines(run / "events.jsonl", [odd, started, {**started, "predicted_step_s": "soon"}])
    for process in ("0", "1", "x"):
        write_lines(run / "hosts" / process / "readings.jsonl", [odd, {**odd, "process": {}}])
        write_lines(run / "hosts" / process / "steps.jsonl", [odd])


@pytest.mark.parametrize(
    ("damage", "identity"),
    [
        (damage_nothing, "{}"),
        (damage_bytes, "no json"),
        (damage_kinds, "[1]"),
        (damage_values, '{"settings": 3}'),
    ],
)
def test_a_damaged_run_hurts_nobody(tmp_path, damage, identity, folder):
    run = tmp_path / "odd"
    run.mkdir()
    (run / "run.json").write_text(identity)
    damage(run)
    with Served([tmp_path, folder]) as one:
        for what in (
            *("summary", "events", "goodput", "log", "stragglers", "chips"),
            "series?metrics=loss,goodput,mfu,memory_used,duty_cycle&by=time",
            "series?metrics=loss,goodput,memory_used&by=step&process=1&chip=0",
        ):
            answer = one.ask(f"/api/runs/odd/{what}")
            assert answer.status == 200, (what, answer.body)
        assert one.ask("/api/compare?a=odd&b=first").status == 200
        assert {"odd", "first"} <= {run["name"] for run in one.get("/api/runs")["runs"]}
        assert one.ask("/api/compile").status == 200
