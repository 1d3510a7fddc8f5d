"""`tpukit report`: compare, draw and trace from the files a check leaves."""

import json

import pytest
from typer.testing import CliRunner

from tpukit.checker.report import read_report
from tpukit.cli.report import app
from tpukit.errors import TPUValidationError


@pytest.fixture
def saved(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_diff_prints_changes_for_people_and_machines(report, saved, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**report, "verdict": "does not fit"}))
    assert "does not fit" in run("diff", saved, other)
    (change,) = json.loads(run("diff", saved, other, "--json"))["changes"]
    assert (change["before"], change["after"]) == ("fits", "does not fit")


def test_html_goes_beside_the_report_or_where_it_is_told(saved, tmp_path):
    run("html", saved)
    run("html", saved, "-o", tmp_path / "there.html")
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "there.html").read_bytes()


def test_perfetto_knows_the_step_and_its_memory(saved, tmp_path):
    run("perfetto", saved, "-o", tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "tiny on v6e-8, one device, predicted"
    assert sum(event["ph"] == "C" for event in events) == 3
    assert "step" in run("perfetto", saved, "-o", tmp_path / "step.pftrace.gz")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[1, 2]", "JSON but no report of a check; make one with `tpukit check"),
        ('{"verdict": "fits"}', "JSON but no report of a check"),
        ("FITS", "is not JSON"),
        ('{"schema": "tpukit.report/0"}', "format 'tpukit.report/0' and this tpukit reads"),
    ],
)
def test_what_is_no_report_is_refused_in_a_sentence(tmp_path, content, complaint):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(TPUValidationError, match=complaint):
        read_report(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TPUValidationError, match=r"gone\.json cannot be read \(No such file"):
        read_report(tmp_path / "gone.json")


def test_a_span_without_a_name_is_refused(report, saved):
    del report["spans"][0]["name"]
    saved.write_text(json.dumps(report))
    result = CliRunner().invoke(app, ["html", str(saved)])
    assert isinstance(result.exception, TPUValidationError)
    assert "a span of the report lacks" in str(result.exception)
