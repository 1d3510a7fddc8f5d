"""The wheel that users install: every data file of the package is in it, with the licences."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    source = ROOT / "src"
    files = (path.relative_to(source) for path in (source / "tpukit").rglob("*") if path.is_file())
    expected = {str(path) for path in files if not str(path).endswith(".pyc")}
    assert "tpukit/observe/dashboard/assets/index.html" in expected
    assert expected <= set(wheel.namelist())


def test_what_others_wrote_comes_with_its_licence(wheel):
    names = wheel.namelist()
    vendor = "tpukit/observe/dashboard/assets/vendor/uplot"
    assert f"{vendor}/uPlot.iife.min.js" in names
    assert "MIT" in wheel.read(f"{vendor}/LICENSE").decode()
    licences = [name for name in names if ".dist-info/licenses/" in name]
    assert sum("LICENSE" in name for name in licences) == 2
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0 AND MIT" in wheel.read(metadata).decode()


def test_emulators_are_not_in_it(wheel):
    assert not [name for name in wheel.namelist() if "emulators" in name]
