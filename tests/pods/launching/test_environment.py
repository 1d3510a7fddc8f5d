"""The lock, the wheel and uv that travel to hosts; packages come from a folder, not an index."""

import gzip
import hashlib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from small_wheels import write_package
from uv import find_uv_bin

from tpukit.errors import ConfigError
from tpukit.pods.launching import environment
from tpukit.pods.launching.bundle import Bundle
from tpukit.pods.launching.wheel import write_wheel

ROOT = Path(__file__).parents[3]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of packages that is the only index, and a cache of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def test_a_wheel_has_the_files_that_the_build_backend_packs(tmp_path):
    ours = write_wheel("tpukit", tmp_path)
    first = ours.read_bytes()
    assert write_wheel("tpukit", tmp_path).read_bytes() == first
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "built"))
    with zipfile.ZipFile(ours) as mine, zipfile.ZipFile(built) as theirs:
        assert mine.testzip() is None
        names = {name for name in theirs.namelist() if name.startswith("tpukit/")}
        assert {name for name in mine.namelist() if name.startswith("tpukit/")} == names
        assert all(mine.read(name) == theirs.read(name) for name in names)
        described = {name for name in theirs.namelist() if ".dist-info/" in name}
        assert {name for name in mine.namelist() if ".dist-info/" in name} == described


def test_a_lock_has_the_installed_version_and_its_hash(index):
    wheels = [write_package(index, "tiny", version) for version in ("1.0", "2.0")]
    lock = environment.make_lock(["tiny>=0.5"], {"tiny": "1.0"})
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    assert lock.read_text() == f"tiny==1.0 \\\n    --hash=sha256:{digest}\n"
    for wheel in wheels:
        wheel.unlink()
    told = []
    assert environment.make_lock(["tiny>=0.5"], {"tiny": "1.0"}, progress=told.append) == lock
    assert not told  # no index is asked again


def test_what_no_index_has_is_refused(index):
    write_package(index, "tiny", "2.0")
    with pytest.raises(ConfigError, match=r"cannot be locked for hosts: .*tiny.* launch\.python"):
        environment.make_lock(["tiny"], {"tiny": "1.0"})
    # An index may have a package with the name of one that is installed from a folder here.
    write_package(index, "tpukit", "9.0")
    with pytest.raises(ConfigError, match="tpukit is needed, but it is installed here from"):
        environment.make_lock(["tpukit"], {})
    with pytest.raises(ConfigError, match=r"launch.requirements has 'no == such'"):
        environment.lock_environment(Bundle({}, {}), ["no == such"])


def test_what_shipped_files_import_is_locked_too(tmp_path):
    (tmp_path / "model.py").write_text(
        "import os, helpers\nfrom optax.tree import x\nimport yaml\n"
    )
    (tmp_path / "broken.py").write_text("import (")
    names = ("model.py", "broken.py", "helpers.py")
    bundle = Bundle({name: tmp_path / name for name in names[:2]} | {"helpers.py": b""}, {})
    assert environment.imported_packages(bundle) == {"optax", "PyYAML"}


def test_tpukit_s_own_requirements_name_jax_for_tpus():
    lines = environment.own_requirements()
    assert lines[-1].startswith("jax[tpu]==")
    assert any(line.startswith("orbax-checkpoint>=") for line in lines)
    assert not any(line.startswith("torch") for line in lines)


def test_uv_travels_as_one_compressed_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    packed = environment.pack_uv()
    with gzip.open(packed) as file:
        assert file.read() == Path(find_uv_bin()).read_bytes()
    assert environment.pack_uv() == packed


def test_this_python_is_the_preferred_one():
    assert set(environment.supported_pythons()) >= {"3.11", "3.12", "3.13"}
