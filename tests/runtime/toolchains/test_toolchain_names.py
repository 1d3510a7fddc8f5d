"""Names of toolchains: any version of jax has one, and a wrong one is told the right ones."""

import sys

import pytest

from tpukit.errors import ConfigError
from tpukit.runtime.toolchains import parse_toolchain, parse_toolchains, toolchain
from tpukit.runtime.toolchains.toolchain import find_interpreter

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def pythons(monkeypatch):
    """Which versions of Python this machine has."""
    here = {"3.11", "3.12"}
    monkeypatch.setattr(toolchain, "find_interpreter", lambda minor: minor in here or None)
    return here


def test_the_running_toolchain_needs_nothing():
    default = parse_toolchain("default")
    assert (default.is_running, default.python, default.requirements) == (True, HERE, ())


def test_a_version_that_was_tried_brings_what_it_needs(pythons):
    found = parse_toolchain("jax-0.12.0.1")
    assert (found.jax, found.python) == ("0.12.0.1", "3.12"), "3.13 comes first, and is not here"
    assert found.requirements == ("jax[tpu]==0.12.0.1", "flax>=0.12.12")
    pythons.add("3.13")
    assert parse_toolchain("jax-0.12.0.1").python == "3.13"
    assert parse_toolchain("jax-0.12.0.1-py3.12").python == "3.12"
    assert parse_toolchain("jax-0.12.0.1-py3.12").folder_name == "jax-0.12.0.1-py3.12"


def test_a_version_nobody_tried_is_taken_as_its_series_or_the_one_before_it(pythons):
    """The first of a series has its Python too: jax 0.11 and later install on none before 3.12."""
    for version in ("0.11.0", "0.11.1", "0.12.0"):
        found = parse_toolchain(f"jax-{version}")
        assert (found.python, found.requirements[1:]) == ("3.12", ("flax>=0.12.12",))
    assert parse_toolchain("jax-0.13.0").python == "3.12"
    assert parse_toolchain("jax-0.12.7").requirements == ("jax[tpu]==0.12.7", "flax>=0.12.12")
    assert parse_toolchain("jax-0.10.3").requirements == ("jax[tpu]==0.10.3",)
    assert parse_toolchain("jax-0.10.3").python == "3.11"


def test_without_its_python_it_is_the_preferred_one_that_is_missing(pythons):
    pythons.clear()
    assert parse_toolchain("jax-0.12.0.1").python == "3.13"


@pytest.mark.parametrize("name", ["", "jax", "jax-", "0.12.0.1", "jax-0.12.0.1-py4", "jax-0.x"])
def test_what_is_no_name_is_told_how_one_is_written(name):
    with pytest.raises(
        ConfigError, match=r"is not a toolchain; write jax-VERSION.*jax-0\.12\.0\.1"
    ):
        parse_toolchain(name)


def test_a_python_that_this_jax_does_not_install_on_is_refused():
    with pytest.raises(ConfigError, match=r"asks for Python 3\.11.*tried with 3\.13, 3\.12"):
        parse_toolchain("jax-0.12.0.1-py3.11")


def test_one_name_is_compared_with_the_running_toolchain():
    assert [one.name for one in parse_toolchains("jax-0.12.0.1")] == ["default", "jax-0.12.0.1"]
    names = "jax-0.12.0.1-py3.12, default,jax-0.11.2"
    assert [one.name for one in parse_toolchains(names)] == names.replace(" ", "").split(",")
    for nothing in ("default", "jax-0.12.0,jax-0.12.0"):
        with pytest.raises(ConfigError, match="names nothing to compare"):
            parse_toolchains(nothing)


def test_an_interpreter_has_to_say_its_version_itself(tmp_path, monkeypatch):
    find_interpreter.cache_clear()
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_interpreter("3.99") is None
    find_interpreter.cache_clear()
    shim.write_text("#!/bin/sh\necho 3.99\n")
    assert find_interpreter("3.99") == shim
    find_interpreter.cache_clear()
    assert find_interpreter(HERE) is not None
