"""What a run, the cache and unexpected errors leave is for their user alone."""

import os
import stat
import tempfile
from pathlib import Path

import jax
import pytest

from tpukit.cli.main import tell
from tpukit.compiler.cache import CompileCache
from tpukit.errors import TPUCacheError
from tpukit.pods import Store
from tpukit.records.events import EventsFile
from tpukit.records.metrics import MetricsFile
from tpukit.training.failure import HangWatchdog
from tpukit.training.recompile import enable_compilation_cache
from tpukit.training.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    """The modes of a folder and all below it that differ from 700 and 600."""
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    return {path: mode for path, mode in found.items() if mode & 0o077}


def test_a_run_directory(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "one")
    run.open({"model": "tiny"}, recipe={}, settings={})
    run.log("a line")
    events, metrics = EventsFile(run.path / "events.jsonl"), MetricsFile(run.metrics)
    events.write("note", text="x")
    metrics.write({"step": 1, "loss": 1.0})
    for one in (events, metrics, run):
        one.close()
    assert {path.name for path in run.path.iterdir()} >= {"run.json", "train.log", "metrics.jsonl"}
    assert modes(run.path) == {}


def test_the_file_of_an_unexpected_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["tpukit", "dashboard", "--token", "hunter2"])
    assert tell(KeyError("layers")) == 1
    capsys.readouterr()
    (file,) = (tmp_path / "cache" / "errors").iterdir()
    assert "hunter2" not in file.read_text()
    assert "--token" in file.read_text()
    assert modes(tmp_path / "cache") == {}


def test_the_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    Store().close()
    assert modes(tmp_path / "state") == {}


def test_stacks_of_a_hang_have_no_name_that_others_know(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    with HangWatchdog(60):
        seen = list(tmp_path.rglob("hang-*.txt"))
        assert modes(tmp_path / seen[0].parent) == {}
    assert seen[0].parent != tmp_path
    assert list(tmp_path.iterdir()) == [], "nothing hung, so nothing is left"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_compile_cache_that_others_may_write_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    for name in ("compiles", "xla"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    with pytest.raises(TPUCacheError, match=r"compiles may be written by other .* chmod go-w"):
        CompileCache.default()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.raises(TPUCacheError, match="xla may be written by other users"):
            enable_compilation_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (tmp_path / "compiles").chmod(0o755)
    assert CompileCache.default().folder == tmp_path / "compiles"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_compile_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    Path(tmp_path, "compiles").mkdir(mode=0o700)
    os.chown(tmp_path / "compiles", 4711, 4711)
    with pytest.raises(TPUCacheError, match="belongs to another user"):
        CompileCache.default()
