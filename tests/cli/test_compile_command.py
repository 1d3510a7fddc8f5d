"""`tpukit compile`: what is split, and the time that `check` predicts for the same program."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tpukit.cli.check import check
from tpukit.cli.compile import compile_function


@pytest.fixture
def run(tmp_path):
    app = typer.Typer()
    app.command("compile")(compile_function)
    app.command("check")(check)
    (tmp_path / "f.py").write_text("def f(x, w):\n    return x @ w\n")

    def run(command, *more):
        words = [command, f"{tmp_path}/f.py:f", "--on", "v6e-8", *more]
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 0, found.output
        return found.stdout

    return run


WHOLE = ("--arg", "bf16[1024,512]", "--arg", "bf16[512,512]")
SPLIT = (
    "--arg",
    "bf16[1024@data,512]",
    "--arg",
    "bf16[512,512@tensor]",
    "--mesh",
    "data=4,tensor=2",
)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_program_is_split_as_its_arguments_say(run):
    whole, split = (json.loads(run("compile", *how, "--json")) for how in (WHOLE, SPLIT))
    assert "each of the 8 devices of v6e-8 holds all of them" in whole["unsplit"]
    assert split["unsplit"] == ""
    flops = [one["flops_per_device"]["value"] for one in (whole, split)]
    assert flops[0] == 2 * 1024 * 512 * 512
    assert flops[1] == flops[0] / 8
    checked = json.loads(run("check", *SPLIT, "--json"))["prediction"]
    assert split["prediction"]["step_time_s"] == checked["step_time_s"]
    shown = " ".join(run("compile", *WHOLE).split())
    assert "note: no argument is split" in shown
    assert f"step {whole['prediction']['step_time_s']:.4g} s" in shown
    assert "note: no argument is split" in " ".join(run("check", *WHOLE).split())
