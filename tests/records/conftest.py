"""Stores to write to: gcp-storage-emulator on loopback, and fsspec's memory."""

import uuid

import pytest
from storage_server import storage_server

from tpukit.runtime.object_store import ObjectStore, open_files


@pytest.fixture(scope="package")
def server():
    with storage_server() as environment:
        yield environment


@pytest.fixture
def gs(server, monkeypatch):
    """Lead gs:// addresses of this process to the emulator."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    open_files.cache_clear()
    yield
    open_files.cache_clear()


@pytest.fixture(params=["gs", "memory"])
def store(request):
    if request.param == "gs":
        request.getfixturevalue("gs")
    return ObjectStore(f"{request.param}://bucket/{uuid.uuid4().hex}/run")
