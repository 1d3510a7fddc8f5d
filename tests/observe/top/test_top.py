"""The screen of `tpukit top`, from a laptop to a pod: what fits, what is named, what is missing."""

import contextlib
import http.server
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
from recorded_run import chips_reading, write_run
from rich.console import Console
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import TPUValidationError
from tpukit.observe.exporters.prometheus import Labels, write_text
from tpukit.observe.readings import METRICS, Reading, Sample
from tpukit.observe.sources.prometheus import ScrapedHost
from tpukit.observe.top.columns import sparkline
from tpukit.observe.top.feed import Feed, PressedKeys
from tpukit.observe.top.screen import Screen


def drawn(snapshot, *, width=80, height=24, encoding="utf-8", **options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = Console(file=stream, width=width, height=height, force_terminal=False)
    console.print(Screen(snapshot, height=height, **options))
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("hosts", [1, 2, 3, 16, 17, 64])
def test_it_fits_a_small_terminal_whatever_the_pod(tmp_path, hosts):
    run = write_run(tmp_path / "run", hosts)
    snapshot = Feed(run, hosts=[str(run)]).read()
    assert len(snapshot.hosts) == hosts
    lines = drawn(snapshot).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "step 300 of 1,000" in text
    assert "predicted 0.8 s (measured is +25.0%)" in text
    assert "MFU 40.0%" in text
    assert "causal attention counted once" in text
    assert "checkpoint step 240" in text
    assert ("of all" in text) == (hosts > 16)


def test_above_sixteen_hosts_the_worst_is_named(tmp_path):
    run = write_run(tmp_path / "run", 20, slow=13)
    text = drawn(Feed(run, hosts=[str(run)]).read(), height=None, width=120)
    (duty,) = [line for line in text.splitlines() if line.startswith("duty")]
    assert duty.split()[1:] == ["55", "%", "93", "%", "93", "%", "host-13", "chip", "0"]
    assert "! host-13 (process 13) is slow at input" in text
    assert "host-4 " not in text


def test_what_is_missing_says_why(tmp_path):
    run = write_run(tmp_path / "run", 1)
    text = drawn(Feed(run, hosts=[str(run)]).read(), width=120)
    assert "– memory bandwidth utilization: this libtpu does not offer it" in text
    assert "HBM bw" not in text
    assert "9.0 s" not in text  # a rare quantile is not what usually happens


def test_this_machine_is_shown_where_there_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snapshot = Feed(at_once=True).read()
    (host,) = snapshot.hosts
    assert 0 <= host.values["host_cpu_utilization"] <= 1
    assert host.values["host_memory_used"] < host.values["host_memory_total"]
    text = drawn(snapshot)
    assert "no run: `tpukit train` writes one" in text
    if not host.chips:
        assert "duty cycle" in text
        assert "duty_cycle" in host.missing


def test_names_from_elsewhere_are_text_and_not_markup(tmp_path):
    evil = "[red]x[/red]"
    run = write_run(tmp_path / "[bold]run", 2, slow=1, name=evil + "{}")
    text = drawn(Feed(run, hosts=[str(run)]).read(), width=200, view="chips")
    assert "[red]x[/red]1" in text
    assert "[bold]run" in text
    rolled = drawn(Feed(run, hosts=[str(run)]).read(), width=200, view="rolled up")
    assert "[red]x[/red]1" in rolled


def test_a_terminal_without_unicode_gets_letters(tmp_path):
    run = write_run(tmp_path / "run", 1)
    text = drawn(Feed(run, hosts=[str(run)]).read(), encoding="ascii")
    assert "#####." in text
    assert "\\u2588" not in text


def test_hosts_that_fell_silent_are_counted_and_not_shown(tmp_path):
    run = write_run(tmp_path / "run", 2, now=time.time() - 3600)
    snapshot = Feed(run, hosts=[str(run)]).read()
    assert snapshot.hosts == ()
    text = drawn(snapshot)
    assert "2 hosts stopped reporting" in text
    assert "silent since" in text


def test_sparklines_keep_their_width_and_show_gaps():
    assert sparkline([0.0, 0.5, 1.0], 10, low=0.0, high=1.0) == "▁▅█"
    assert sparkline([-1e308, 1e308], 10, low=0.0, high=1.0) == "▁█"
    assert sparkline([1.0, float("nan"), 1.0], 10) == "▁ ▁"
    assert len(sparkline(list(range(1000)), 12)) == 12
    assert sparkline([], 5) == sparkline([float("nan")], 5) == ""


def test_keys_choose_and_take_back():
    keys = PressedKeys().press("h")
    assert keys.view == "hosts"
    assert keys.press("h").view == "auto"
    assert keys.press("?").help
    assert not keys.press("?").press("x").help
    assert PressedKeys().press("q").quit
    assert PressedKeys().press("s").by_duty


def test_a_recording_is_shown_as_it_ends(tmp_path):
    path = tmp_path / "readings.jsonl"
    readings = [chips_reading(1000.0 + at, "old", 0, duty=at / 100) for at in range(100)]
    path.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in readings))
    (host,) = Feed(recording=path, at_once=True).read().hosts
    assert (host.name, host.time) == ("old", 1099.0)
    assert host.chips[0].values["duty_cycle"] == 0.99
    assert len(host.chips[0].history) == 61  # of the last minute
    (first,) = Feed(recording=path).read().hosts
    assert first.time == 1000.0


class Exporter:
    """Serves a text as a monitor's exporter would."""

    def __init__(self, text):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_what_an_exporter_wrote_comes_back_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    samples = []
    for name, metric in METRICS.items():
        if metric.scope == "chip":
            samples += [Sample(name, 0.25 + chip, chip) for chip in range(2)]
        elif metric.scope == "host":
            samples.append(Sample(name, 0.5))
    sent = Reading(time.time(), "far-7", 7, "libtpu grpc", tuple(samples))
    with Exporter(write_text([sent], Labels(model="tpu-v6e-slice"))) as far:
        (host,) = Feed(hosts=[far.address]).read().hosts
    assert (host.name, host.process) == ("far-7", 7)
    for chip in host.chips:
        assert chip.values == {
            sample.metric: sample.value for sample in samples if sample.chip == chip.chip
        }
    assert host.values == {s.metric: s.value for s in samples if s.chip is None}


def test_a_host_that_does_not_answer_is_shown_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (host,) = Feed(hosts=["127.0.0.1:1"]).read().hosts
    assert host.name == "127.0.0.1:1"
    assert "nothing is served" in host.missing["duty_cycle"]


@pytest.mark.parametrize("address", ["", "ftp://x", "host:port", "http://", "[::1", "a:99999999"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(TPUValidationError, match="is no host address"):
        ScrapedHost(address)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(TPUValidationError, match="is no run directory"):
        Feed(hosts=[str(tmp_path)])
    with pytest.raises(TPUValidationError, match="contains no run"):
        Feed(tmp_path)
    (tmp_path / "empty.jsonl").write_text("nothing\n")
    with pytest.raises(TPUValidationError, match="contains no readings"):
        Feed(recording=tmp_path / "empty.jsonl")


def test_json_has_everything_the_screen_has(tmp_path):
    run = write_run(tmp_path / "run", 2, slow=0)
    result = CliRunner().invoke(app, ["top", str(run), "--hosts", str(run), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert [host["name"] for host in said["hosts"]] == ["host-0", "host-1"]
    assert said["training"]["summary"]["step"] == 300
    assert said["training"]["goodput"]["attempts"] == 1
    assert said["training"]["stragglers"]["found"][0]["cause"] == "input"
    assert said["cost_per_hour"]["unit"] == "USD/h"


COMMAND = "from tpukit.cli.main import run; run()"


def test_one_screen_loads_neither_jax_nor_what_stands_on_it(tmp_path):
    run = write_run(tmp_path / "run", 2)
    heavy = ("jax", "flax", "torch", "orbax", "pandas", "scipy", "tensorflow")
    program = (
        "import sys\n"
        "from tpukit.cli.app import app\n"
        f"app(['top', {str(run)!r}, '--once'], standalone_mode=False)\n"
        f"print('LOADED', *sorted(set(sys.modules) & set({heavy!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "LOADED"
    assert "step 300 of 1,000" in done.stdout
    assert "\x1b" not in done.stdout  # plain, off a terminal


@contextlib.contextmanager
def terminal(command, folder):
    """A command on a terminal of 80 x 24; yields (read until a text came, type, process)."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    before = termios.tcgetattr(follower)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *command],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=folder,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    seen = bytearray()

    def read_until(wanted):
        deadline = time.monotonic() + 60
        while wanted.encode() not in seen and time.monotonic() < deadline:
            if select.select([leader], [], [], 0.2)[0]:
                seen.extend(os.read(leader, 65536))
        assert wanted.encode() in seen, seen[-2000:].decode(errors="replace")
        seen.clear()

    try:
        yield read_until, lambda keys: os.write(leader, keys.encode()), process
        assert termios.tcgetattr(follower) == before  # the terminal is as it was
    finally:
        process.kill()
        process.wait()
        os.close(leader)
        os.close(follower)


def test_it_lives_on_a_terminal_until_q(tmp_path):
    run = write_run(tmp_path / "run", 2, slow=1)
    with terminal(["top", str(run), "--hosts", str(run), "--rate", "0.2"], tmp_path) as (
        read_until,
        press,
        process,
    ):
        read_until("step 300 of 1,000")
        press("?")
        read_until("q quit")
        press("h")
        read_until("chips")
        press("q")
        read_until("\x1b[?1049l")  # it left the other screen
        assert process.wait(timeout=30) == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path):
    run = write_run(tmp_path / "run", 1)
    with terminal(["top", str(run)], tmp_path) as (read_until, _, process):
        read_until("step 300 of 1,000")
        os.killpg(process.pid, signal.SIGINT)
        read_until("interrupted")
        assert process.wait(timeout=30) == 130
