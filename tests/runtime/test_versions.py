"""Installed versions: what the packages themselves say, and nothing where there is none."""

from pathlib import Path

import jax
import jaxlib

import tpukit
from tpukit.runtime.versions import (
    NOT_INSTALLED,
    installed_requirements,
    installed_version,
    installed_versions,
    is_any_installed,
)


def test_versions_are_those_the_packages_report():
    expected = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "no-such": NOT_INSTALLED}
    assert installed_versions("jax", "jaxlib", "no-such") == expected
    assert installed_version("no-such") is None


def test_what_is_required_and_installed():
    assert any(line.startswith("jaxlib") for line in installed_requirements("jax"))
    assert installed_requirements("no-such") == []
    assert is_any_installed("jaxl")
    assert not is_any_installed("no-such")


def test_nobody_else_asks_for_them():
    source = Path(tpukit.__file__).parent
    found = {path for path in source.rglob("*.py") if "importlib.metadata" in path.read_text()}
    shipping = source / "pods" / "launching"  # packs whole distributions for hosts without them
    shipping_files = {shipping / "environment.py", shipping / "wheel.py"}
    assert found == {source / "runtime" / "versions.py", *shipping_files}
