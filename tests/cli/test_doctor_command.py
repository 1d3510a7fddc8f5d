"""`tpukit doctor`: for people, for machines, and by its exit code."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tpukit.cli.doctor import doctor
from tpukit.runtime.doctor import diagnose_tpu


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    app = typer.Typer()
    app.command()(doctor)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_people_see_every_finding_and_every_fix(run):
    result = run()
    assert result.exit_code == 0, result.output
    folded = " ".join(result.output.split())
    for finding in diagnose_tpu().findings:
        if "measured" not in finding.seen:  # figures change between two looks
            assert " ".join(finding.seen.split()) in folded
        assert finding.fix is None or " ".join(finding.fix.split()) in folded


def test_machines_get_json(run):
    result = run("--json")
    assert result.exit_code == 0
    answer = json.loads(result.output)
    assert answer["healthy"] is True
    assert {"id", "topic", "severity", "seen", "fix"} == set(answer["findings"][0])


def test_an_error_shows_in_the_exit_code(run, monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/no/such/libtpu.so")
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["healthy"] is False
    assert "✗ error" in run().output
