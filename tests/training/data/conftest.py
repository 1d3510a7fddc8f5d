"""A bucket on the loopback interface: as much of Cloud Storage's JSON API as reading takes."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tpukit.runtime.object_store import open_files

LIST, DOWNLOAD = "/storage/v1/b/", "/download/storage/v1/b/"


class Bucket:
    """Objects by name, what was asked for, and whether anybody may ask."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse: int | None = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urlsplit(self.path)
        bucket: Bucket = self.server.bucket
        bucket.requests.append(f"{parts.path} {self.headers.get('Range', '')}".strip())
        if bucket.refuse:
            return self._refuse(bucket.refuse, "Anonymous caller does not have access")
        for prefix in (DOWNLOAD, LIST):
            if parts.path.startswith(prefix):
                name, _, rest = parts.path.removeprefix(prefix).partition("/")
                return self._answer(bucket, name, unquote(rest), parse_qs(parts.query))
        return self._refuse(404, "no such page")

    def _answer(self, bucket, name, rest, query):
        if name != "bucket":
            return self._refuse(404, "no such bucket")
        if rest in ("o", "o/"):
            return self._json(_listing(bucket, query))
        key = rest.removeprefix("o/")
        if key not in bucket.objects:
            return self._refuse(404, f"No such object: {key}")
        if query.get("alt") == ["media"]:
            return self._media(bucket.objects[key])
        return self._json(_item(bucket, key))

    def _media(self, content):
        wanted, status = self.headers.get("Range"), 200
        headers = {"Content-Type": "application/octet-stream"}
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) if last else len(content), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            content, status = content[begin : end + 1], 206
        self._send(content, status, headers)

    def _refuse(self, code, message):
        self._json({"error": {"code": code, "message": message}}, status=code)

    def _json(self, data, status=200):
        self._send(json.dumps(data).encode(), status, {"Content-Type": "application/json"})

    def _send(self, content, status, headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Tests are quiet."""


def _item(bucket, key):
    content = bucket.objects[key]
    return {
        "kind": "storage#object",
        "name": key,
        "bucket": "bucket",
        "size": str(len(content)),
        "etag": str(hash(content)),
        "generation": "1",
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
    }


def _listing(bucket, query):
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    items, prefixes = [], set()
    for key in sorted(bucket.objects):
        if key.startswith(prefix):
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(_item(bucket, key))
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


@contextmanager
def serve_bucket():
    """The bucket `gs://bucket`, and the address it answers at."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.bucket = Bucket()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.bucket, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    with serve_bucket() as (bucket, address):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        open_files.cache_clear()
        yield bucket
    open_files.cache_clear()
