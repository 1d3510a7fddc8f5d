"""The compile cache: whole or absent, bounded, shared by processes, never trusted blindly."""

import errno
import logging
import os
import subprocess
import sys
import zipfile

import pytest

from tpukit.compiler.cache import CompileCache
from tpukit.errors import TPUCacheError


@pytest.fixture
def cache(tmp_path):
    return CompileCache(tmp_path / "compiles")


def test_texts_come_back_as_they_went(cache):
    texts = {"hlo": "HloModule µ\n" * 100, "about.json": "{}"}
    assert cache.load("a") is None
    assert cache.store("a", texts)
    assert cache.load("a") == texts
    assert cache.store_json("b", {"key": [1, "two"]})
    assert cache.load_json("b") == {"key": [1, "two"]}
    assert cache.load_json("a") is None
    assert cache.summary().entries == 2
    assert "2 entries" in cache.summary().__rich__()
    assert cache.summary().to_dict()["size_bytes"] > 0
    assert cache.clear() == 2
    assert cache.load("a") is None
    assert cache.summary().size_bytes == 0


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut short", b"no zip at all" * 50])
def test_a_damaged_entry_is_dropped(cache, caplog, damage):
    cache.store("a", {"hlo": "x" * 1000})
    (path,) = cache.folder.glob("*.zip")
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert cache.load("a") is None
    assert "damaged" in caplog.text
    assert not path.exists()


def test_a_flipped_bit_is_noticed(cache):
    cache.store("a", {"hlo": "0123456789" * 1000})
    (path,) = cache.folder.glob("*.zip")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.infolist()[0].header_offset + 30 + len("hlo")
    data[start + 10] ^= 0x10
    path.write_bytes(bytes(data))
    assert cache.load("a") is None


def test_the_least_recently_used_go_first(cache):
    text = {"data": os.urandom(3000).hex()}
    small = CompileCache(cache.folder, limit_bytes=12_000)
    for age, key in enumerate(("first", "second", "third")):
        cache.store(key, text)
        os.utime(cache.folder / f"{key}.zip", (1000 + age, 1000 + age))
    assert cache.load("first") == text  # used just now
    small.store("fourth", text)
    kept = {path.stem for path in cache.folder.glob("*.zip")}
    assert "fourth" in kept
    assert "second" not in kept
    assert "first" in kept
    assert small.summary().size_bytes <= 12_000


def test_one_entry_larger_than_the_bound_is_still_kept(cache):
    tiny = CompileCache(cache.folder, limit_bytes=10)
    assert tiny.store("a", {"data": "text"})
    assert tiny.load("a") == {"data": "text"}


def test_what_a_crash_left_half_written_is_swept_up(cache):
    cache.store("a", {"data": "text"})
    orphan = cache.folder / "tmpabc.partial"
    orphan.write_bytes(b"half")
    os.utime(orphan, (1000, 1000))
    cache.store("b", {"data": "text"})
    assert not orphan.exists()


def test_a_full_disk_is_a_warning(cache, monkeypatch, caplog):
    def no_space(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipfile.ZipFile, "writestr", no_space)
    with caplog.at_level(logging.WARNING):
        assert not cache.store("a", {"data": "text"})
    assert "No space left" in caplog.text
    assert list(cache.folder.iterdir()) == []
    assert cache.load("a") is None


def test_a_file_that_cannot_be_deleted_is_named(cache, monkeypatch):
    cache.store("a", {"data": "text"})

    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(TPUCacheError, match=r"a\.zip cannot be deleted"):
        cache.clear()


def test_processes_share_it(cache):
    code = (
        "import sys; from pathlib import Path; from tpukit.compiler.cache import CompileCache\n"
        "cache = CompileCache(Path(sys.argv[1]), limit_bytes=20_000)\n"
        "for turn in range(150):\n"
        "    key = f'k{turn % 5}'\n"
        "    cache.store(key, {'data': key * 500})\n"
        "    found = cache.load(key)\n"
        "    assert found is None or found == {'data': key * 500}, found\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(cache.folder)], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for worker in workers:
        _, complaints = worker.communicate(timeout=60)
        assert worker.returncode == 0, complaints.decode()
        assert b"damaged" not in complaints
    assert not list(cache.folder.glob("*.partial"))
