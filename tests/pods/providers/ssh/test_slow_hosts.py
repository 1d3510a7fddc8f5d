"""Hosts that refuse ssh for a while, and agents that a lost connection left behind."""

import contextlib
import time

import psutil
import pytest

from tpukit.job.sections import LaunchSettings
from tpukit.pods.causes import Cause
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import Host
from tpukit.pods.providers.protocol import Command, Ended, Line
from tpukit.pods.providers.ssh.provider import SSHProvider
from tpukit.pods.providers.ssh.transport import SSHTransport, own_key
from tpukit.pods.worker.order import Order
from tpukit_emulators.hosts import FIRST_ADDRESS, EmulatedHosts

pytestmark = pytest.mark.xdist_group("pods-processes")
LIMIT_S = 120


@pytest.fixture
def machines(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    made = EmulatedHosts(tmp_path / "machines")
    yield made
    made.close()


@pytest.fixture
def key(tmp_path):
    return own_key(tmp_path / "user")


@pytest.fixture
def config(machines, key, tmp_path):
    file = tmp_path / "ssh_config"
    file.write_text(
        f"{machines.ssh_config.read_text()}  User ann\n  IdentityFile {key.private_file}\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {tmp_path / 'known_hosts'}\n"
    )
    return str(file)


def follow(config, mend, **limits):
    """Start a gang on the first host, call `mend` when it was refused, and return the ending."""
    launch = LaunchSettings(hosts=(str(FIRST_ADDRESS),), ssh_config=config, **limits)
    provider = SSHProvider(launch)
    pod = provider.create("slow", PodConfig(tpu_type="v6e-1"))
    command = Command(argv=("python3", "-c", "print('ran')"), environment={"JAX_PLATFORMS": "cpu"})
    gang, lines, deadline = provider.start(pod, command, attempt=1), [], time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline:
            for event in gang.wait(0.5):
                if isinstance(event, Ended):
                    return event.ending, lines
                if isinstance(event, Line):
                    lines.append(event.text)
                    if len(lines) == 1:
                        mend()
    finally:
        gang.close()
    raise AssertionError(lines)


def test_a_host_whose_sshd_starts_late_is_waited_for(machines, config, key):
    ending, lines = follow(config, lambda: machines.start("late", f"ann:{key.public} ann"))
    assert ending.cause is Cause.DONE
    assert "refused" in lines[0]
    assert lines[-1] == "ran"


def test_a_user_that_is_made_late_is_waited_for(machines, config, key):
    machines.start("late", "")
    ending, lines = follow(config, lambda: machines.let_in("late", f"ann:{key.public} ann"))
    assert ending.cause is Cause.DONE
    assert "Permission denied" in lines[0]


def test_the_wait_ends_at_the_job_s_limit(machines, config):
    ending, _ = follow(config, lambda: None, connect_timeout_seconds=0.1)
    assert ending.cause is Cause.UNREACHABLE
    assert "refused" in str(ending)


def test_a_lost_network_ends_a_connection_only_after_the_job_s_limit():
    command = SSHTransport("pod", silent_s=600).command(Host("h", "h"))
    options = dict(part.split("=", 1) for part in command if "=" in part and "\n" not in part)
    alive_s = int(options["ServerAliveInterval"]) * int(options["ServerAliveCountMax"])
    assert alive_s == 600
    assert options["TCPKeepAlive"] == "no"


def test_a_new_agent_ends_the_one_of_a_lost_connection(machines, config, key):
    address = machines.start("host", f"ann:{key.public} ann")
    transport = SSHTransport("pod", config=config)
    text = "import os, time; print(os.getpid(), flush=True); time.sleep({})"
    agents = []
    for sleep in (600, 0):
        agent = transport.start(Host("h", address))
        order = Order(
            argv=("python3", "-c", text.format(sleep)),
            environment={"JAX_PLATFORMS": "cpu"},
            folder="~/tpukit/pod",
        )
        agent.stdin.write(order.to_line())
        agent.stdin.flush()
        agents.append((agent, int(agent.stdout.readline())))
    (first, pid), (second, _) = agents
    assert second.wait(LIMIT_S) == 0
    assert first.wait(LIMIT_S) != 0
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(LIMIT_S)
    assert b"of a lost connection" in second.stderr.read()
    for agent, _ in agents:
        for stream in (agent.stdin, agent.stdout, agent.stderr):
            stream.close()
