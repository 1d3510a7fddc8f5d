"""Only what changed, in words that fit a terminal."""

import copy
import json

import pytest
from rich.console import Console

from tpukit.checker.report import diff_reports

SNAPSHOT = """\
before jax 0.10.2, libtpu 0.0.42.1
after  jax 0.10.2, libtpu 0.0.43.0
                            before     after                   change  origin
verdict
  verdict                     fits  does not fit
program
  batch_size                     8        16
memory
  HBM per device             3 GiB    34 GiB  +31 GiB (+1033.3 %)  compiler
    temporaries              1 GiB    32 GiB  +31 GiB (+3100.0 %)  compiler
time
  step                      100 ms    150 ms       +50 ms (+50.0 %)  model
  tokens/s/chip             20,480    13,653       −6,827 (−33.3 %)  model
  MFU                        30.0%     20.0%                 −10.0 points  model
    ici                      20 ms     70 ms      +50 ms (+250.0 %)  model
operations
  fusions                      120       131           +11 (+9.2 %)  compiler
communication
  all-gather over 8, exposed 20 ms     70 ms      +50 ms (+250.0 %)  model
options
  xla_tpu_x                   True         –
"""


@pytest.fixture
def changed(report):
    new = copy.deepcopy(report)
    new["verdict"] = "does not fit"
    new["job"]["batch_size"] = 16
    new["memory"]["total_bytes"] += 31 * 2**30
    new["memory"]["purposes"]["temporaries"] += 31 * 2**30
    new["prediction"].update(step_time_s=0.15, tokens_per_s_per_chip=13_653.3, mfu=0.2)
    new["prediction"]["seconds_by_cause"]["ici"] = 0.07
    new["collectives"][0]["exposed_s"] = 0.07
    new["operations"]["fusions"] = 131
    new["options"] = {}
    new["versions"]["libtpu"] = "0.0.43.0"
    return new


def shown(diff):
    console = Console(width=100, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(diff)
    return captured.get()


def words(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_a_person_sees_what_changed_and_nothing_else(report, changed):
    assert words(shown(diff_reports(report, changed))) == words(SNAPSHOT)


def test_a_machine_gets_numbers(report, changed):
    data = json.loads(json.dumps(diff_reports(report, changed).to_dict()))
    by_name = {change["name"]: change for change in data["changes"]}
    step = by_name["step"]
    assert (step["before"], step["after"], step["unit"], step["origin"]) == (
        0.1,
        0.15,
        "s",
        "model",
    )
    assert step["delta"] == pytest.approx(0.05)
    assert step["percent"] == pytest.approx(50.0)
    assert by_name["verdict"]["delta"] is None


def test_a_report_does_not_differ_from_itself(report):
    again = json.loads(json.dumps(report))
    assert diff_reports(report, again).changes == ()
    assert words(shown(diff_reports(report, again))) == ["nothing changed"]


def test_forward_and_backward_differ_by_the_same_amounts(report, changed):
    there, back = diff_reports(report, changed), diff_reports(changed, report)
    assert {(one.name, one.before, one.after) for one in there.changes} == {
        (one.name, one.after, one.before) for one in back.changes
    }


def test_a_step_that_is_gone_is_a_reason_not_a_hundred_percent(report):
    refused = {**report, "prediction": None, "no_prediction": "a program that does not fit"}
    del refused["collectives"]
    (change,) = diff_reports(report, refused).changes
    assert (change.before, change.after) == ("100 ms", "none: a program that does not fit")
    assert change.delta is None


def test_a_step_without_a_kernel_is_no_faster_step(report):
    missing = copy.deepcopy(report)
    caveat = "1 Pallas kernels could not be timed and count as nothing: the step takes longer."
    missing["prediction"].update(step_time_s=0.08, caveats=[caveat])
    by_name = {one.name: one for one in diff_reports(report, missing).changes}
    assert (by_name["step"].before, by_name["step"].after) == ("100 ms", "at least 80 ms")
    assert by_name["step"].delta is None
    assert (by_name["not counted"].before, by_name["not counted"].after) == ("nothing", caveat)
    assert "MFU" not in by_name


def test_reports_without_any_part_can_be_compared(report):
    bare = {"schema": report["schema"]}
    assert diff_reports(bare, bare).changes == ()
    assert diff_reports(bare, report).changes
