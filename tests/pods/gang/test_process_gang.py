"""Gangs of light programs on a local pod: the real agents, no jax."""

import os
import signal
import sys
import time

import psutil
import pytest

from tpukit.pods.causes import Cause
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.pods.providers.protocol import Command, Ended, Line, StepCompleted

REPORT = "from tpukit.records.reporting import report_step, report_stop\n"
WHO = "import os, sys, time, signal\nrank = int(os.environ['TPUKIT_HOST_ID'])\n"


@pytest.fixture
def pod(tmp_path):
    provider = LocalProvider(folder=tmp_path / "pods")
    return provider, provider.create("job-a1", PodConfig(tpu_type="v6e-16"))


@pytest.fixture
def start(pod):
    gangs = []

    def begin(text, **details):
        provider, where = pod
        command = Command(argv=(sys.executable, "-c", WHO + text), **details)
        gangs.append(provider.start(where, command, attempt=3))
        return gangs[-1]

    yield begin
    for gang in gangs:
        gang.close()


def follow(gang, *, until=Ended, limit_s=30):
    events, deadline = [], time.monotonic() + limit_s
    while time.monotonic() < deadline:
        events += gang.wait(1)
        if any(isinstance(event, until) for event in events):
            return events
    raise AssertionError(events)


def ending(events):
    (ended,) = [event for event in events if isinstance(event, Ended)]
    return ended.ending


def test_every_process_knows_who_it_is_and_all_lines_come(start):
    names = "TPUKIT_HOST_ID TPUKIT_NUM_HOSTS TPUKIT_ATTEMPT TPUKIT_HEARTBEAT_S JAX_PLATFORMS WORD"
    gang = start(
        f"print(*(os.environ[name] for name in {names!r}.split()))\n"
        "print(os.environ['XLA_FLAGS'].split()[-1], file=sys.stderr)",
        environment={"WORD": "x", "TPUKIT_HOST_ID": "77"},
        heartbeat_s=7,
    )
    events = follow(gang)
    assert ending(events).cause is Cause.DONE
    lines = {(event.host, event.text) for event in events if isinstance(event, Line)}
    flag = "--xla_force_host_platform_device_count=4"
    assert lines == {(f"job-a1-{rank}", f"{rank} 4 3 7 cpu x") for rank in range(4)} | {
        (f"job-a1-{rank}", flag) for rank in range(4)
    }


@pytest.mark.parametrize("victim", [0, 2])
def test_a_kill_is_seen_at_once_and_ends_all(start, victim):
    gang = start(
        REPORT + "report_step(rank + 1, 0.5)\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    pids, steps = {}, {}
    while len(pids) < 4 or len(steps) < 4:
        for event in gang.wait(5):
            if isinstance(event, Line):
                pids[event.host] = int(event.text)
            elif isinstance(event, StepCompleted):
                steps[event.host] = event.step
    assert steps == {f"job-a1-{rank}": rank + 1 for rank in range(4)}
    os.kill(pids[f"job-a1-{victim}"], signal.SIGKILL)
    found = ending(follow(gang))
    assert (found.cause, found.host, found.evidence) == (
        Cause.KILLED,
        f"job-a1-{victim}",
        "SIGKILL",
    )
    assert not any(map(psutil.pid_exists, pids.values()))


def test_a_stopped_process_is_killed_with_the_rest(start):
    gang = start("print(os.getpid(), flush=True)\ntime.sleep(600)")
    pids = []
    while len(pids) < 4:
        pids += [int(event.text) for event in gang.wait(5)]
    os.kill(pids[1], signal.SIGSTOP)
    gang.close()
    assert not any(map(psutil.pid_exists, pids))


def test_the_echo_of_a_death_waits_for_the_death_itself(start):
    gang = start("time.sleep(0.2 * (rank == 3))\nos._exit(137 if rank == 3 else 201)")
    assert ending(follow(gang)).host == "job-a1-3"


def test_no_first_step_and_no_later_step_in_time_are_hangs(start):
    found = ending(follow(start("time.sleep(600)", first_step_s=0.5)))
    assert (found.cause, found.evidence) == (Cause.HUNG, "no report of the first step for 0.5 s")
    gang = start(REPORT + "report_step(1)\ntime.sleep(600)", step_s=0.5)
    assert ending(follow(gang)).evidence == "no report of step for 0.5 s"


def test_stop_lets_processes_save_and_kills_those_that_do_not(start):
    saves = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
    gang = start(saves + "print('ready', flush=True)\ntime.sleep(600)")
    ready = 0
    while ready < 4:
        ready += len(gang.wait(5))
    gang.stop(20)
    events = gang.wait(0)
    assert ending(events).cause is Cause.STOPPED
    assert (
        sum(event == Line(f"job-a1-{rank}", "saved") for event in events for rank in range(4)) == 4
    )
    gang = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('', flush=True)\ntime.sleep(600)"
    )
    follow(gang, until=Line)
    gang.stop(0.3)
    assert "did not end in time" in ending(gang.wait(0)).evidence


def test_a_notice_that_one_process_got_is_an_eviction(start):
    gang = start(REPORT + "rank or report_stop(5, 'preempted')")
    assert ending(follow(gang)).cause is Cause.NOTICE


def test_a_big_bundle_reaches_every_host(start, tmp_path):
    import tarfile

    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    with tarfile.open(tmp_path / "bundle.tar", "w") as tar:
        tar.add(tmp_path / "big", "big")
    gang = start("print(os.path.getsize('big'), os.getcwd())", bundle=tmp_path / "bundle.tar")
    events = follow(gang)
    texts = [event.text for event in events if isinstance(event, Line)]
    assert len({text for text in texts if text.startswith("3000000 ")}) == 4


def test_lines_without_end_and_bars_do_not_block(start):
    gang = start("rank or print('x' * 200_000, end='')\nprint('\\r 10%\\r 20%')")
    events = follow(gang)
    lines = [event for event in events if isinstance(event, Line)]
    # All but what the bar was written over: at most one read and one line of the longest.
    assert sum(len(line.text) for line in lines if line.host == "job-a1-0") >= 65_536
    assert Line("job-a1-1", " 20%") in events


def test_an_evaluation_is_not_a_hang(start):
    text = f"{REPORT}from tpukit.runtime.long_work import report_long_work\nif rank == 0:\n"
    gang = start(
        f"{text}    report_step(1)\n    report_long_work('evaluation')\n    time.sleep(4)",
        step_s=1.0,
    )
    events = follow(gang)
    assert ending(events).cause is Cause.DONE
    assert not [event for event in events if isinstance(event, Line)]


def test_work_without_a_report_is_a_hang(start):
    gang = start(
        f"{REPORT}from tpukit.runtime.long_work import report_long_work\n"
        "report_step(1)\nreport_long_work('save')\nreport_long_work('')\ntime.sleep(600)",
        step_s=1.0,
    )
    assert ending(follow(gang)).cause is Cause.HUNG
