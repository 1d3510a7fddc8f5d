"""The cache folder: one rule, and every part of tpukit that keeps something follows it."""

import re
from pathlib import Path
from typing import get_args

import tpukit
from tpukit.runtime.files import Kept, cache_folder

SOURCE = Path(tpukit.__file__).parent


def test_the_rule(monkeypatch, tmp_path):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TPUKIT_CACHE_DIR")
    assert cache_folder("flags") == tmp_path / "xdg" / "tpukit" / "flags"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # which the standard reads as not set
    assert cache_folder("xla") == tmp_path / "home" / ".cache" / "tpukit" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("xla") == tmp_path / "home" / ".cache" / "tpukit" / "xla"
    monkeypatch.setenv("TPUKIT_CACHE_DIR", "~/mine")
    assert cache_folder() == tmp_path / "home" / "mine"


def test_every_folder_of_the_list_is_in_use_and_nobody_reads_the_variables_again():
    sources = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    used = re.findall(r'cache_folder\("(\w+)"\)', "".join(sources.values()))
    assert sorted(set(used)) == sorted(get_args(Kept))
    readers = [path.name for path, text in sources.items() if "XDG_CACHE_HOME" in text]
    assert readers == ["files.py"]
