"""Cloud Storage on loopback: as much of its JSON API as TensorStore, gcsfs and the client use."""

import base64
import email
import email.policy
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


class Bucket:
    """Objects by name, each with its bytes and its generation."""

    def __init__(self):
        self.objects = {}
        self.requests = []
        self.lock = threading.Lock()
        self.generation = 0

    def put(self, name, content, must_match=None):
        with self.lock:
            current = self.objects.get(name, (b"", 0))[1]
            if must_match is not None and int(must_match) != current:
                return None
            self.generation += 1
            self.objects[name] = (content, self.generation)
            return self.describe(name)

    def describe(self, name):
        import google_crc32c  # comes with gcsfs

        content, generation = self.objects[name]
        checksum = google_crc32c.Checksum(content).digest()
        return {
            "kind": "storage#object",
            "bucket": "bucket",
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "crc32c": base64.b64encode(checksum).decode(),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "storageClass": "STANDARD",
            "contentType": "application/octet-stream",
        }

    def list(self, prefix, delimiter, start="", end=""):
        with self.lock:
            items, folders = [], set()
            for name in sorted(self.objects):
                if not name.startswith(prefix) or name < start or (end and name >= end):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    items.append(self.describe(name))
            return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer takes 40 ms

    def log_message(self, *arguments):
        """Be silent."""

    @property
    def bucket(self):
        return self.server.bucket

    def answer(self, status, content=b"", kind="application/json", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def serve(self):
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        path = [unquote(part) for part in url.path.strip("/").split("/")]
        content = self.body()
        self.bucket.requests.append((self.command, self.path))
        if path[0] == "upload":
            return self.upload(query, content)
        if path[0] == "batch":
            return self.batch(content)
        if path[:2] == ["storage", "v1"] and path[2:3] == ["b"]:
            return self.storage(path[3:], query)
        if path[0] == "download" and path[3:4] == ["b"]:
            return self.storage(path[4:], {**query, "alt": "media"})
        return self.answer(501, {"error": {"code": 501, "message": self.path}})

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = serve

    def storage(self, path, query):
        if path[:1] == ["forbidden"]:
            message = "Anonymous caller does not have storage.objects.list access."
            return self.answer(401, {"error": {"code": 401, "message": message}})
        if path == ["bucket"]:
            return self.answer(200, {"kind": "storage#bucket", "name": "bucket", "id": "bucket"})
        if path == ["bucket", "storageLayout"]:
            return self.answer(200, {"kind": "storage#storageLayout", "bucket": "bucket"})
        if path == ["bucket", "o"]:
            listing = self.bucket.list(
                query.get("prefix", ""),
                query.get("delimiter", ""),
                query.get("startOffset", ""),
                query.get("endOffset", ""),
            )
            return self.answer(200, listing)
        if path[:2] != ["bucket", "o"] or path[2] not in self.bucket.objects:
            return self.answer(404, {"error": {"code": 404, "message": "Not Found"}})
        name = path[2]
        if self.command == "DELETE":
            with self.bucket.lock:
                self.bucket.objects.pop(name, None)
            return self.answer(204)
        if query.get("alt") != "media":
            return self.answer(200, self.bucket.describe(name))
        return self.media(name)

    def media(self, name):
        content, generation = self.bucket.objects[name]
        status, headers = 200, {"x_goog_generation": str(generation)}
        if span := self.headers.get("Range"):
            first, last = span.removeprefix("bytes=").split("-")
            begin = int(first) if first else len(content) - int(last)
            end = min(int(last) + 1 if first and last else len(content), len(content))
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content, status = content[begin:end], 206
        return self.answer(status, content, "application/octet-stream", **headers)

    def upload(self, query, content):
        name = query.get("name")
        if query["uploadType"] == "multipart":
            header = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            message = email.message_from_bytes(header + content, policy=email.policy.HTTP)
            described, data = message.get_payload()
            name = json.loads(described.get_payload(decode=True))["name"]
            content = data.get_payload(decode=True)
        elif query["uploadType"] == "resumable" and "upload_id" not in query:
            name = name or json.loads(content)["name"]
            where = f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o"
            location = f"{where}?uploadType=resumable&upload_id=1&name={name}"
            return self.answer(200, {}, Location=location)
        described = self.bucket.put(name, content, query.get("ifGenerationMatch"))
        if described is None:
            return self.answer(412, {"error": {"code": 412, "message": "Precondition Failed"}})
        return self.answer(200, described)

    def batch(self, content):
        boundary = self.headers["Content-Type"].split("boundary=")[1].strip('"')
        answers = []
        for part in content.decode().split(f"--{boundary}"):
            for line in part.splitlines():
                if line.startswith("DELETE "):
                    name = unquote(urlsplit(line.split()[1]).path.rsplit("/", 1)[-1])
                    with self.bucket.lock:
                        found = self.bucket.objects.pop(name, None)
                    status = "204 No Content" if found else "404 Not Found"
                    answers.append("--reply\r\nContent-Type: application/http\r\n\r\n")
                    answers.append(f"HTTP/1.1 {status}\r\n\r\n")
        reply = ("".join(answers) + "--reply--").encode()
        return self.answer(200, reply, 'multipart/mixed; boundary="reply"')


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Clients that hang up, as gcsfs does, are no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture(scope="module")
def bucket_server():
    """Serve one bucket called `bucket`; yields it and the environment that leads clients to it."""
    pytest.importorskip("gcsfs")
    server = Server(("127.0.0.1", 0), Handler)
    server.bucket = Bucket()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    environment = {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GOOGLE_CLOUD_PROJECT": "none",
        "FSSPEC_GS_TOKEN": "anon",
        "FSSPEC_GCS_TOKEN": "anon",
        # Or gcsfs asks a service that is not here what kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "no_proxy": "127.0.0.1",
    }
    try:
        yield server.bucket, environment
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
