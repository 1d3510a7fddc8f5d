"""A small HTTP server that Prometheus scrapes; on loopback unless another address is asked for."""

import errno
import os
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ...errors import TPUValidationError
from ...hardware.detect import Accelerators, detect_accelerators
from ...hardware.slice import Slice
from ...hardware.topology import format_shape
from ...runtime.address import is_loopback, names_this_machine
from ..readings import Reading
from .prometheus_text import CONTENT_TYPE, Labels, write_text

PORT = 9090
LOOPBACK = "127.0.0.1"
# As the downward API gives them to a pod, where its manifest asks for it.
POD_VARIABLES = {"namespace": "POD_NAMESPACE", "pod": "POD_NAME"}


class PrometheusExporter:
    """Serves the newest reading of every source at `/metrics`.

    The text is made when it is asked for and kept until the next readings come, so nobody pays for
    a scrape that does not happen.

    Args:
        port: Where to listen; 0 takes any free one, `port` then says which.
        address: The interface; the default serves this machine alone.
        labels: Of every chip; told from this machine by default.

    Raises:
        TPUValidationError: The port is taken.
    """

    name = "prometheus"

    def __init__(
        self, port: int = PORT, *, address: str = LOOPBACK, labels: Labels | None = None
    ) -> None:
        self._labels = labels or detect_labels()
        self._newest: dict[tuple[str, int, str], Reading] = {}
        self._text: bytes | None = None
        self._lock = threading.Lock()
        exporter = self

        class Handler(_Handler):
            only_loopback = is_loopback(address)

            def text(self) -> bytes:
                return exporter.text()

        try:
            self._server = _ExporterServer((address, port), Handler)
        except OSError as error:
            raise TPUValidationError(
                f"port {port} of {address} cannot be listened on ({error.strerror}); "
                + (
                    "another program has it: choose another prometheus_port, or 0 for any free one."
                    if error.errno == errno.EADDRINUSE
                    else "choose another address or port."
                )
            ) from error
        self.address, self.port = address, int(self._server.server_address[1])
        # Polls seldom: shutting down may take that long, and every poll wakes a CPU.
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.5},
            name="prometheus exporter",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the text is."""
        return f"http://{self.address}:{self.port}/metrics"

    def export(self, readings: Sequence[Reading]) -> None:
        """Show these from now on."""
        with self._lock:
            for reading in readings:
                self._newest[reading.host, reading.process, reading.source] = reading
            self._text = None

    def text(self) -> bytes:
        """Return what a scrape gets."""
        with self._lock:
            if self._text is None:
                self._text = write_text(self._newest.values(), self._labels).encode()
            return self._text

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ExporterServer(ThreadingHTTPServer):
    daemon_threads = True
    # Two monitors on one port would share it silently, and each scrape would reach either.
    allow_reuse_port = False


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # a client that says nothing holds a thread no longer
    server_version, sys_version = "tpukit", ""
    only_loopback = True

    def text(self) -> bytes:
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.only_loopback and not names_this_machine(self.headers.get("Host", "")):
            self.send_error(421, "This server is 127.0.0.1 and localhost; ask for those.")
            return
        if self.path.split("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        body = self.text()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no event."""


def detect_labels(here: Accelerators | None = None) -> Labels:
    """Return the labels of this machine's chips."""
    found = here or detect_accelerators()
    others = {
        label: os.environ[variable]
        for label, variable in POD_VARIABLES.items()
        if variable in os.environ
    }
    if found.kind != "tpu":
        return Labels(make="nvidia" if found.kind == "gpu" else "", others=others)
    if found.slice_name is None:
        return Labels(model=found.generation or "", others=others)
    part = Slice.parse(found.slice_name)
    return Labels(
        model=part.chip.gke_accelerator or part.chip.name,
        tpu_topology=format_shape(part.topology),
        others=others,
    )
