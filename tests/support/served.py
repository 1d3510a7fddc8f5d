"""A dashboard on a free port of this machine, and a client that says exactly what it is told to."""

import asyncio
import http.client
import json
import threading
import time
from dataclasses import dataclass

from tpukit.observe.dashboard.app import make_app
from tpukit.observe.dashboard.library import Library
from tpukit.observe.dashboard.serving import LOOPBACK, listening, make_server

PATIENCE_S = 30


@dataclass
class Answer:
    """What the server said."""

    status: int
    headers: dict
    body: bytes

    @property
    def data(self):
        return json.loads(self.body)


class Served:
    """A dashboard that runs until the block ends."""

    def __init__(self, folders, *, port=0, connections=None, **options):
        self.library = Library(folders)
        self.server = make_server(make_app(self.library, **options), connections)
        self._listening = listening(LOOPBACK, port)

    def __enter__(self):
        listener = self._listening.__enter__()
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[listener])), daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not self.server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = self.server.force_exit = True
        self._thread.join(PATIENCE_S)
        self._listening.__exit__(None, None, None)

    @property
    def url(self):
        return f"http://{LOOPBACK}:{self.port}"

    def ask(self, path, *, method="GET", body=None, **headers):
        """Send a request as it is written; headers with `_` for `-`."""
        line = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PATIENCE_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        line.putrequest(
            method, path, skip_host="host" in map(str.lower, named), skip_accept_encoding=True
        )
        if body is not None and "content-length" not in {name.lower() for name in named}:
            named["content-length"] = str(len(body))
        for name, value in named.items():
            line.putheader(name, value)
        line.endheaders(body)
        found = line.getresponse()
        answer = Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        line.close()
        return answer

    def get(self, path):
        """Ask for JSON that must be there."""
        answer = self.ask(path)
        assert answer.status == 200, answer.body
        return answer.data

    def follow(self, path="/api/live", **headers):
        """Yield the messages of the stream, each as (event, data), until it is closed."""
        line = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PATIENCE_S)
        line.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        stream = line.getresponse()
        try:
            while True:
                message = dict(_message(stream))
                if "event" in message:
                    yield message["event"], json.loads(message["data"])
        finally:
            line.close()


def _message(stream):
    while (text := stream.readline().decode().rstrip("\n")) != "":
        name, _, value = text.partition(": ")
        yield name, value
