"""How soon the dashboard shows a run of a million steps, and what fifty viewers cost its server.

    python benchmarks/observe_dashboard.py [--steps 1000000] [--viewers 50] [--seconds 20]

The server is `tpukit dashboard` in a process of its own, whose CPU seconds are counted: on a busy
machine they mean more than a clock. Paint is what Chromium itself says (`performance`, type paint);
"charts drawn" is when all charts of the run stand with their points. A viewer is a stream of events
and, like the page, a question for all curves whenever the stream says that the run changed, at most
every two seconds; the run is written to all the while, two steps a second.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from claims import Claim, report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from chromium import Browser, find_browser  # noqa: E402
from sample_runs import make_run, metric, write_lines  # noqa: E402

RUN = "million"
CHARTS = "loss,step_time_s,mfu,goodput,memory_used"
STEP_S = 0.5
ASKED_AT_MOST_EVERY_S = 2.0
LOADS = 7


class Server:
    """`tpukit dashboard` over a folder."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tpukit", "dashboard", str(folder), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.process.stdout.readline().split()[0].rstrip("/")
        self.port = int(self.url.rpartition(":")[2])

    def cpu_s(self):
        spent = psutil.Process(self.process.pid).cpu_times()
        return spent.user + spent.system

    def close(self):
        self.process.terminate()
        self.process.wait()


def seconds_until_read(server, steps):
    """Until the first curve is answered: the server reads the whole file as soon as it starts."""
    began = time.perf_counter()
    data = asyncio.run(ask(server.port, f"/api/runs/{RUN}/series?metrics=loss"))
    assert json.loads(data)["series"][0]["total"] == steps
    return time.perf_counter() - began


def page_loads(server):
    """Milliseconds of first paint, first contentful paint and charts drawn, for each load."""
    program = find_browser()
    if program is None:
        sys.exit("no browser: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # its children linger
        browser = Browser(program, folder)
        try:
            found = []
            for _ in range(LOADS):
                browser.open("about:blank")
                browser.open(f"{server.url}/run?run={RUN}")
                browser.wait_until("performance.getEntriesByName('drawn').length")
                found.append(
                    browser.run("""(() => {
                        const at = (name) => performance.getEntriesByName(name)[0].startTime;
                        return [at("first-paint"), at("first-contentful-paint"), at("drawn")];
                    })()""")
                )
        finally:
            browser.close()
    return [statistics.median(column) for column in zip(*found, strict=True)]


async def ask(port, path):
    """Return the body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    body = await reader.read()
    writer.close()
    return body


async def view(port, until, waits, told):
    """One viewer: hears of changes, and asks for the curves as the page does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(b"GET /api/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    asked = 0.0
    while (left := until - time.monotonic()) > 0:
        try:
            line = await asyncio.wait_for(reader.readline(), left)
        except TimeoutError:
            break
        if not line.startswith(b'data: {"runs"'):
            continue
        said = json.loads(line[6:])
        if not said["whole"]:  # the first tells what was there before
            told.append(time.time() - said["runs"][0]["last_seen"])
        if time.monotonic() - asked >= ASKED_AT_MOST_EVERY_S:
            asked = time.monotonic()
            await ask(port, f"/api/runs/{RUN}/series?metrics={CHARTS}&by=time&points=1000")
            waits.append(time.monotonic() - asked)
    writer.close()


async def write_on(run, step, until):
    """Write as a training run does."""
    while time.monotonic() < until:
        step += 1
        write_lines(run / "metrics.jsonl", [metric(step, began=time.time() - step * STEP_S)])
        await asyncio.sleep(STEP_S)


async def watch(server, run, steps, viewers, seconds):
    """Waits for curves and delays of news, in seconds, of all viewers."""
    waits, told = [], []
    until = time.monotonic() + seconds
    await asyncio.gather(
        write_on(run, steps, until),
        *(view(server.port, until, waits, told) for _ in range(viewers)),
    )
    return waits, told


def share(values, part):
    return sorted(values)[int(part * (len(values) - 1))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / RUN, steps=options.steps, hosts=1, chips=4)
        server = Server(folder)
        try:
            read_s = seconds_until_read(server, options.steps)
            read_cpu_s = server.cpu_s()
            paint, contentful, drawn = page_loads(server)
            load_cpu_s = (server.cpu_s() - read_cpu_s) / LOADS
            before = server.cpu_s()
            waits, told = asyncio.run(
                watch(server, run, options.steps, options.viewers, options.seconds)
            )
            viewers_cpu = (server.cpu_s() - before) / options.seconds
        finally:
            server.close()
    count = f"{options.steps:.0e} points".replace("e+0", "e")
    report(
        Claim(f"{count}, read once at the start", read_s, "s"),
        Claim("CPU of the server until then", read_cpu_s, "s"),
        Claim(f"{count}, first paint", paint / 1e3, "s", at_most=1.0),
        Claim(f"{count}, first contentful paint", contentful / 1e3, "s", at_most=1.0),
        Claim(f"{count}, all charts drawn", drawn / 1e3, "s", at_most=1.0),
        Claim("CPU of the server for one load of the page", load_cpu_s, "s"),
        Claim(f"{options.viewers} viewers, CPU of the server", viewers_cpu, "cores"),
        Claim(f"{options.viewers} viewers, all curves, p50", share(waits, 0.5), "s"),
        Claim(f"{options.viewers} viewers, all curves, p99", share(waits, 0.99), "s"),
        Claim(f"{options.viewers} viewers, written to told, p50", share(told, 0.5), "s"),
        Claim(f"{options.viewers} viewers, written to told, p99", share(told, 0.99), "s"),
    )


if __name__ == "__main__":
    main()
