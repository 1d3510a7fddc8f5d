"""`tpukit compile --save`: a program for a slice nobody rented, in a file."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tpukit.cli.compile import compile_function
from tpukit.compiler import read_header
from tpukit.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    app = typer.Typer()
    app.command()(compile_function)
    (tmp_path / "f.py").write_text("def f(x):\n    return x + 1\n")
    words = [f"{tmp_path}/f.py:f", "--on", "v5e-1", "--arg", "f32[8,128]"]
    return lambda *more: CliRunner().invoke(app, [*words, "--save", str(tmp_path / "saved"), *more])


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_function_is_saved(run, tmp_path):
    result = run("--json")
    assert result.exit_code == 0, result.output
    header = read_header(tmp_path / "saved")
    assert json.loads(result.stdout)["checksum"] == header.checksum
    assert (header.name, header.slice, header.platform) == ("f", "v5e-1", "tpu")


def test_half_a_compile_cannot_be_saved(run, tmp_path):
    result = run("--until", "schedule")
    assert isinstance(result.exception, ConfigError)
    assert "leave out --until" in str(result.exception)
    assert not (tmp_path / "saved").exists()
