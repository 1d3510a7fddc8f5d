"""A report with every part, and a real browser spoken to over its debugging pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

from tpukit.checker.report.build import roofs_of
from tpukit.checker.report.schema import SCHEMA
from tpukit.compiler.memory import Buffer, Finding, MemoryReport, Peak
from tpukit.compiler.timeline import Span, StepPrediction
from tpukit.hardware import Slice

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60
# Chromium reads its debugging pipe at descriptor 3 and writes it at 4.
AS_THREE_AND_FOUR = """
import os, sys
reading, writing = (os.dup(int(number)) for number in sys.argv[1:3])
spare = [os.dup(one) for one in (reading, writing) for _ in range(3)]  # above 3 and 4 for certain
os.dup2(spare[2], 3)
os.dup2(spare[5], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Chromium without a window, and whatever it asked the network for."""

    def __init__(self, program, folder):
        to_browser, self._ask = os.pipe()
        self._hear, from_browser = os.pipe()

        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", AS_THREE_AND_FOUR, str(to_browser), str(from_browser)),
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update"),
                *("--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"),
                f"--user-data-dir={folder}",
            ],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread, self._number, self._session = b"", 0, None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                return heard["result"]
            self.events.append(heard)

    def _next(self):
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._hear], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {ANSWER_S} s"
            piece = os.read(self._hear, 1 << 20)
            assert piece, "the browser ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, path, *, width=1400, height=900, dark=False, scripts=True):
        self.events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + ANSWER_S
        while self.run("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.02)
        if scripts:  # one drawn frame later everything the page asked for is done
            frame = "(done) => requestAnimationFrame(() => requestAnimationFrame(done))"
            self.run(f"new Promise({frame})")

    def run(self, script):
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text)

    def screenshot(self, path, *, selector=None):
        clip = {}
        if selector:
            script = f"""(() => {{
                const box = document.querySelector({selector!r}).getBoundingClientRect();
                return {{x: box.x + scrollX, y: box.y + scrollY,
                         width: box.width, height: box.height, scale: 1}};
            }})()"""
            clip = {"clip": self.run(script), "captureBeyondViewport": True}
        shot = self.call("Page.captureScreenshot", format="png", **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def requests(self):
        """Every address asked for but the page itself and what is in it."""
        asked = (
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        )
        return [url for url in asked if not url.startswith(("file:", "data:", "about:"))]

    @property
    def complaints(self):
        """Errors and refusals written to the console."""
        return [
            event
            for event in self.events
            if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ask)
        os.close(self._hear)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser ({', '.join(BROWSERS)}); apt-get install chromium to run this")
    opened = Browser(program, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


MEMORY = MemoryReport(
    program="tiny",
    slice=Slice.parse("v6e-8"),
    fits=True,
    total_bytes=3 * 2**30,
    usable_bytes=33_554_432_000,
    host_bytes=2**20,
    argument_bytes=2**30,
    temp_bytes=2 * 2**30,
    result_bytes=0,
    alias_bytes=2**30,
    purposes={"parameters": 2**30, "activations": 2**30, "temporaries": 2**30},
    buffers=tuple(
        Buffer("activations", f"bf16[{size},128]", "{1,0:T(8,128)(2,1)}", size * 256, 256, "HBM",
               "jvp()/while/body/dot_general", f"model.py:{size}", True)
        for size in range(40, 0, -1)
    ),
    peak=Peak(2, "fusion.2", "jvp()/while/body/dot_general", "model.py:40"),
    curve=((0, 2**30), (1, 2 * 2**30), (2, 3 * 2**30), (3, 2**30)),
    schedule_length=4,
    findings=(Finding("not donated", "[0].params['w'] f32[8]", 2**20, "donate it."),),
)  # fmt: skip
# A loop of four turns whose body is shown once, two copies side by side, a collective waited for.
SPANS = (
    Span("core", "embed", 0.0, 0.010, "hbm", "jit(f)/embed", 0.0, 1e9, 1),
    Span("core", "while.1", 0.010, 0.080, "loop", "jit(f)/while", 0.0, 0.0, 1),
    Span("core", "fusion.2", 0.010, 0.015, "matrix", "jit(f)/while/body/dot_general", 8e12, 1e9, 4),
    Span("core", "all-gather-done.3", 0.025, 0.005, "ici", "jit(f)/while/body/gather", times=4),
    Span("ici", "all-gather-start.3", 0.010, 0.020, "ici", "jit(f)/while/body/gather", 0, 2e8, 4),
    Span("hbm", "copy-start.4", 0.010, 0.004, "hbm", "", 0.0, 6e9, 4),
    Span("hbm", "copy-start.5", 0.012, 0.004, "hbm", "", 0.0, 6e9, 4),
    Span("core", "adam", 0.090, 0.010, "hbm", "jit(f)/optimizer/mul", 1e9, 12e9, 1),
)
PREDICTION = StepPrediction(
    slice=Slice.parse("v6e-8"),
    step_time_s=0.100,
    low_s=0.090,
    high_s=0.112,
    seconds_by_cause={"matrix": 0.060, "hbm": 0.020, "ici": 0.020},
    transfer_s={"ici": 0.080},
    hardware_flops=3.2e13,
    spans=SPANS,
    tokens_per_step=16_384,
    model_flops=2.2032e14,
)


@pytest.fixture
def report():
    """What a check of a training step gives, small enough to reckon by hand."""
    return {
        "schema": SCHEMA,
        "verdict": "fits",
        "program": "tiny",
        "job": {"model": "tiny", "on": "v6e-8", "batch_size": 8, "options": {}},
        "slice": Slice.parse("v6e-8").to_dict(),
        "chip": roofs_of(Slice.parse("v6e-8")),
        "memory": MEMORY.to_dict(),
        "live_memory": [[0.0, 2.0**30], [0.010, 3.0 * 2**30], [0.090, 2.0**30]],
        "prediction": PREDICTION.to_dict(),
        "no_prediction": "",
        "spans": [span.to_dict() for span in SPANS],
        "collectives": [
            {
                "kind": "all-gather",
                "group_size": 8,
                "bytes": 200_000_000,
                "times": 4,
                "seconds": 0.080,
                "exposed_s": 0.020,
                "op_name": "jit(f)/while/body/gather",
            }
        ],
        "compile": {"compile_s": {"value": 7.5, "origin": "measured"}, "from_cache": False},
        "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1"},
        "options": {"xla_tpu_x": True},
        "fixes": [
            {
                "changes": {"remat": "full"},
                "cost": "recomputes each layer",
                "estimate": {"value": 2**31, "origin": "model", "reason": ""},
                "verified": {"value": None, "origin": "compiler"},
                "fits": None,
                "failure": "",
            }
        ],
        "next": "tpukit train tiny.yaml",
    }


@pytest.fixture
def step():
    return PREDICTION
