"""Compiles of this folder go to a cache of their own, never to the user's."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
