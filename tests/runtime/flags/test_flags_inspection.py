"""Judging flag strings and the environment, from Python and from the command line."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tpukit.cli.flags import app
from tpukit.errors import FlagError
from tpukit.runtime.flags import (
    FlagRegistry,
    inspect_environment,
    inspect_flags,
)
from tpukit.runtime.flags.flag import Flag

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

SMALL = FlagRegistry(
    [Flag("xla_a", ("xla",), "bool"), Flag("xla_tpu_b", ("libtpu",), "int64")],
    jaxlib_version="1",
    libtpu_version="2",
)


@pytest.fixture
def run(registry, monkeypatch):
    monkeypatch.setattr(FlagRegistry, "installed", lambda **_: registry)
    monkeypatch.setattr(FlagRegistry, "is_cached", lambda: True)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"XLA_FLAGS": "--xla_tpu_b=1"}, "move it to LIBTPU_INIT_ARGS"),
        ({"LIBTPU_INIT_ARGS": "--xla_a=true"}, "move it to XLA_FLAGS"),
        ({"XLA_FLAGS": "-xla_a=true"}, "one dash, which XLA refuses"),
        ({"XLA_FLAGS": "xla_a=true"}, "takes it for the name of a file"),
        ({"XLA_FLAGS": "--noxla_a"}, "a form only libtpu reads"),
        ({"LIBTPU_INIT_ARGS": "xla_tpu_b=1"}, "skip it silently"),
        ({"LIBTPU_INIT_ARGS": "--xla_tpu_b=fast"}, "takes a whole number"),
        ({"LIBTPU_INIT_ARGS": "--xla_tpu_c=1"}, "No flag 'xla_tpu_c' in libtpu 2 or jaxlib 1"),
    ],
)
def test_what_would_go_wrong_in_each_variable(environment, problem):
    report = inspect_environment(environment, registry=SMALL)
    assert not report.ok
    assert problem in report.verdicts[0].problem


def test_orders_to_libtpus_parser_are_not_flags():
    environment = {"LIBTPU_INIT_ARGS": "--undefok=x --xla_tpu_b=1", "XLA_FLAGS": "--xla_a"}
    report = inspect_environment(environment, registry=SMALL)
    assert report.ok
    assert report.values == {"xla_tpu_b": "1", "xla_a": "true"}


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(["--xla_a", "--xla_tpu_b=1", "=", "'"])).map(" ".join))
def test_only_a_flag_error_comes_out(text):
    with contextlib.suppress(FlagError):
        inspect_flags(text, registry=SMALL)
    inspect_environment({"XLA_FLAGS": text, "LIBTPU_INIT_ARGS": text}, registry=SMALL)


def test_check_says_where_each_goes(run):
    result = run("check", "--xla_tpu_rwb_fusion=false --xla_dump_to='/tmp/a b'")
    assert result.exit_code == 0
    assert "ok   --xla_tpu_rwb_fusion=false  in LIBTPU_INIT_ARGS" in result.stdout
    assert "2 flags, 0 wrong" in result.stdout


def test_check_exits_2_and_names_the_nearest(run):
    result = run("check", "--json", "--xla_tpu_enable_data_parallelism=true")
    assert result.exit_code == 2
    data = json.loads(result.stdout)
    assert not data["ok"]
    assert "xla_tpu_enable_data_parallel_all_reduce_opt" in data["flags"][0]["problem"]


def test_check_reads_the_environment(run, monkeypatch):
    assert run("check").exit_code == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_tpu_rwb_fusion=false")
    result = run("check")
    assert result.exit_code == 2
    assert "LIBTPU_INIT_ARGS" in result.stdout


def test_check_can_compile(run):
    result = run("check", "--xla_tpu_rwb_fusion=false", "--on", "v6e", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["compiled_for"] == "v6e-4"


def test_list(run):
    data = json.loads(run("list", "megacore", "--where", "libtpu", "--json").stdout)
    names = [flag["name"] for flag in data["flags"]]
    assert "xla_tpu_enable_megacore_fusion" in names
    assert "flags of libtpu" in run("list", "megacore").stdout


def test_list_a_level(run):
    data = json.loads(run("list", "--level", "2", "--on", "v5p", "--json").stdout)
    assert (data["level"], data["generation"]) == (2, "v5p")
    assert "xla_tpu_enable_megacore_fusion" in {flag["name"] for flag in data["flags"]}
    assert "Level 3 on 7x" in run("list", "--on", "tpu7x").stdout


def test_explain(run):
    assert json.loads(run("explain", "--xla_tpu_rwb_fusion", "--json").stdout)["default"] == "true"
    assert "no description published" in run("explain", "xla_tpu_autotune_fusions").stdout
    assert isinstance(run("explain", "xla_tpu_rwb_fusions").exception, FlagError)
