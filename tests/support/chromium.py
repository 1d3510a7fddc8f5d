"""A real browser without a window, spoken to over its debugging pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60
KEY_NUMBERS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
KEY_TEXTS = {"Enter": "\r"}
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
            env={**os.environ, "HOME": str(folder)},  # some of its files are kept there anyway
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
        self.call("Page.navigate", url="about:blank")  # what the page before still asks is its own
        self.events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        self.wait_until("document.readyState === 'complete'")
        if scripts:  # one drawn frame later everything the page asked for is done
            frame = "(done) => requestAnimationFrame(() => requestAnimationFrame(done))"
            self.run(f"new Promise({frame})")

    def run(self, script):
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_until(self, condition):
        """Wait until a script says something true."""
        deadline = time.monotonic() + ANSWER_S
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < deadline, f"it never came: {condition}"
            time.sleep(0.02)

    def press(self, key, text="", *, shift=False):
        """Press a key; a browser moves the focus, or clicks, only for those it knows by number."""
        about = {"key": key, "text": text or KEY_TEXTS.get(key, ""), "modifiers": 8 if shift else 0}
        about["windowsVirtualKeyCode"] = KEY_NUMBERS.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **about)

    def click(self, selector):
        """Click in the middle of an element, as a person does."""
        self.drag(selector, 0.5, 0.5)

    def drag(self, selector, begin, end):
        """Press at one share of an element's width, and let go at another."""
        box = self._at_rest(selector)
        middle = box["y"] + box["height"] / 2
        first, last = (box["x"] + box["width"] * share for share in (begin, end))
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=first, y=middle)
        for kind, x in (("mousePressed", first), ("mouseMoved", last), ("mouseReleased", last)):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=middle, button="left", clickCount=1
            )

    def _at_rest(self, selector):
        """Where an element is, once it has stopped moving and nothing lies over its middle.

        What is still being loaded above it pushes it down, and a click goes to what is there then.
        """
        script = f"""(() => {{
            const one = document.querySelector({selector!r});
            one.scrollIntoView({{block: "center", behavior: "instant"}});
            const {{x, y, width, height}} = one.getBoundingClientRect();
            const hit = document.elementFromPoint(x + width / 2, y + height / 2);
            return {{x, y, width, height, free: one.contains(hit) || hit?.contains(one) || false}};
        }})()"""
        deadline = time.monotonic() + ANSWER_S
        before = None
        while (box := self.run(script)) != before or not box["free"]:
            assert time.monotonic() < deadline, f"{selector} never comes to rest: {box}"
            before = box
            time.sleep(0.05)
        return box

    def save_downloads_in(self, folder):
        """Put what is downloaded from now on into a folder."""
        session, self._session = self._session, None  # of the browser, not of its page
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self._session = session

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


def find_browser():
    """Where a browser is installed; None where none is."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)
