"""The dashboard on a run of a million steps, and on many runs.

python benchmarks/dashboard.py
"""

import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import HELD_TO_TARGET, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "",
        "",
        options={
            "--steps": {"type": int, "default": 1_000_000},
            "--viewers": {"type": int, "default": 50},
            "--seconds": {"type": float, "default": 20.0},
            "--only": {"choices": ("million", "many", "half")},
            "--runs": {"type": int, "default": 200},
            "--run-steps": {"type": int, "default": 100_000},
            "--half-requests": {"type": int, "default": 1100},
        },
    ),
)

import psutil
from chromium import Browser, find_browser
from sample_runs import make_run, metric, write_lines

RUN = "million"
CHARTS = "loss,step_time_s,mfu,goodput,memory_used"
STEP_S = 0.5
ASKED_AT_MOST_EVERY_S = 2.0
LOADS = 7
OPEN_FILES = (1024, 1024)  # of the server, as most machines have it
COLD_VIEWERS, COLD_RUNS = 4, 100
HALF_REQUEST = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Server:
    """`tpukit dashboard` over a folder, and what it writes to standard error."""

    def __init__(self, folder):
        self.said = folder / "stderr.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tpukit", "dashboard", str(folder), "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES),
            )
        self.url = self.process.stdout.readline().split()[0].rstrip("/")
        self.port = int(self.url.rpartition(":")[2])

    def cpu_s(self):
        spent = psutil.Process(self.process.pid).cpu_times()
        return spent.user + spent.system

    def peak_mb(self):
        """Return the most memory it ever held."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1e3

    def said_bytes(self):
        return self.said.stat().st_size

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


def million(folder, steps, viewers, seconds):
    run = make_run(folder / RUN, steps=steps, hosts=1, chips=4)
    server = Server(folder)
    try:
        read_s = seconds_until_read(server, steps)
        read_cpu_s = server.cpu_s()
        paint, contentful, drawn = page_loads(server)
        load_cpu_s = (server.cpu_s() - read_cpu_s) / LOADS
        before = server.cpu_s()
        waits, told = asyncio.run(watch(server, run, steps, viewers, seconds))
        viewers_cpu = (server.cpu_s() - before) / seconds
    finally:
        server.close()
    count = f"{steps:.0e} points".replace("e+0", "e")
    return (
        Result(f"{count}, read once at the start", read_s, "s"),
        Result(
            f"dashboard, CPU of the server to start and to read {count} once",
            read_cpu_s,
            "s",
            key="start_cpu",
            form=".1f",
            **HELD_TO_TARGET,
        ),
        Result(
            f"dashboard, first paint of {count}",
            paint / 1e3,
            "s",
            1.0,
            key="first_paint",
            form=".2f",
            **HELD_TO_TARGET,
        ),
        Result(f"{count}, first contentful paint", contentful / 1e3, "s", at_most=1.0),
        Result(
            f"dashboard, all five charts drawn of {count}",
            drawn / 1e3,
            "s",
            1.0,
            key="charts",
            form=".2f",
            **HELD_TO_TARGET,
        ),
        Result(
            "dashboard, CPU of the server for one page of that run",
            load_cpu_s,
            "s",
            key="page_cpu",
            form=".3f",
            **HELD_TO_TARGET,
        ),
        Result(
            f"dashboard, CPU of the server for {viewers} viewers of that run while it is written",
            viewers_cpu,
            "cores",
            key="viewers_cpu",
            form=".2f",
            **HELD_TO_TARGET,
        ),
        Result(f"{viewers} viewers, all curves, p50", share(waits, 0.5), "s"),
        Result(
            f"dashboard, {viewers} viewers wait for all five curves, p99",
            share(waits, 0.99),
            "s",
            key="viewers_p99",
            form=".2f",
            **HELD_TO_TARGET,
        ),
        Result(f"{viewers} viewers, written to told, p50", share(told, 0.5), "s"),
        Result(f"{viewers} viewers, written to told, p99", share(told, 0.99), "s"),
    )


def make_many(folder, runs, steps):
    """Make one run, and others of the same files."""
    first = make_run(folder / "run-0", steps=steps, hosts=1, chips=4)
    for number in range(1, runs):
        for file in (one for one in first.rglob("*") if one.is_file()):
            path = folder / f"run-{number}" / file.relative_to(first)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, path)


async def open_cold(port, names):
    """Return the seconds that the list of runs and each run took."""
    waits = []

    async def timed(path):
        began = time.monotonic()
        await ask(port, path)
        waits.append(time.monotonic() - began)

    async def viewer(own):
        for name in own:
            await timed(f"/api/runs/{name}/series?metrics={CHARTS}&by=time&points=1000")

    await timed("/api/runs")
    await asyncio.gather(*(viewer(names[at::COLD_VIEWERS]) for at in range(COLD_VIEWERS)))
    return waits


def many_runs(folder, runs, steps):
    make_many(folder, runs, steps)
    names = [f"run-{number}" for number in range(runs)]
    random.Random(0).shuffle(names)
    server = Server(folder)
    try:
        before = server.cpu_s()
        waits = asyncio.run(open_cold(server.port, names[:COLD_RUNS]))
        cpu_s = server.cpu_s() - before
        time.sleep(5)  # whatever it reads on its own
        peak = server.peak_mb()
    finally:
        server.close()
    count = f"{runs} runs of {steps:.0e} steps".replace("e+0", "e")
    return (
        Result(f"{count}, cold: list of runs", waits[0], "s"),
        Result(f"{count}, cold: p50", share(waits, 0.5), "s"),
        Result(f"{count}, cold: p99", share(waits, 0.99), "s", at_most=2.0),
        Result(f"{count}, cold: CPU of the server for a run", cpu_s / COLD_RUNS, "s"),
        Result(f"{count}, peak memory", peak, "MB", at_most=400),
    )


async def half_requests(port, count):
    """Return how long viewers wait while others hold connections without asking for anything."""
    held = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF_REQUEST)
        held.append((reader, writer))
    waits = []
    for _ in range(50):
        began = time.monotonic()
        try:
            await asyncio.wait_for(ask(port, "/api/runs"), 10)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            waits.append(float("inf"))
            break
        waits.append(time.monotonic() - began)
        await asyncio.sleep(0.1)
    for _, writer in held:
        writer.close()
    return waits


def half_sent(folder, count):
    make_run(folder / RUN, steps=100, hosts=1, chips=4)
    server = Server(folder)
    try:
        waits = asyncio.run(half_requests(server.port, count))
        said = server.said_bytes()
    finally:
        server.close()
    return (
        Result(f"{count} half-sent requests, a viewer waits, p99", share(waits, 0.99), "s",
              at_most=1.0),
        Result(f"{count} half-sent requests, lines of log", said / 1e3, "kB", at_most=10),
    )  # fmt: skip


def share(values, part):
    return sorted(values)[int(part * (len(values) - 1))]


def run_dashboard(options):
    """How soon the dashboard shows one run of a million steps and many runs, to how many viewers.

    The server is `tpukit dashboard` in a process of its own, whose CPU seconds are counted: on a
    busy machine they mean more than a clock. Paint is what Chromium itself says (`performance`,
    type paint); "charts drawn" is when all charts of the run stand with their points. A viewer is
    a stream of events and, like the page, a question for all curves whenever the stream says that
    the run changed, at most every two seconds; the run is written to all the while, two steps a
    second.

    Many runs are hard links to one run's files, which are read as if each had its own. "Cold" is a
    server that has just started: the list of runs is asked for first, then four viewers open runs
    that nobody opened before, all five charts each. Half-sent requests are connections that send
    the first lines of a request and then nothing, to a server that may open 1024 files.
    """
    parts = {
        "million": lambda folder: million(folder, options.steps, options.viewers, options.seconds),
        "many": lambda folder: many_runs(folder, options.runs, options.run_steps),
        "half": lambda folder: half_sent(folder, options.half_requests),
    }
    claims = []
    for name, measure in parts.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                claims += measure(Path(folder))
    report(*claims)


if __name__ == "__main__":
    run_command(COMMAND_LINE, run_dashboard)
