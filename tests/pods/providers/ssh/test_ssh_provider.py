"""Provider ssh on emulated machines: the suite for all providers, and what is its own."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import Case, ProviderConformance, wait_for_lines
from tpukit.errors import ConfigError, PodUnavailable, ProviderError
from tpukit.job.sections import LaunchSettings
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import Host, PodState
from tpukit.pods.providers.ssh.provider import SSHProvider
from tpukit.pods.providers.ssh.transport import SSHTransport, own_key, split_address
from tpukit.pods.worker.order import Order, bootstrap
from tpukit_emulators.hosts import EmulatedHosts

pytestmark = pytest.mark.xdist_group("pods-processes")
CONFIG = PodConfig(tpu_type="v6e-16", zones=("on-premise",))


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def machines(tmp_path):
    made = EmulatedHosts(tmp_path / "machines")
    yield made
    made.close()


@pytest.fixture
def launch(machines, state, tmp_path):
    """Eight hosts that know the user's key, and a configuration that offers it."""
    key = own_key(tmp_path / "user")
    names = [machines.start(f"host{number}", f"ann:{key.public} ann") for number in range(8)]
    config = tmp_path / "ssh_config"
    config.write_text(
        f"{machines.ssh_config.read_text()}  User ann\n  IdentityFile {key.private_file}\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {tmp_path / 'known_hosts'}\n"
    )
    return LaunchSettings(hosts=tuple(names), ssh_config=str(config))


@pytest.fixture
def provider(launch):
    return SSHProvider(launch)


class TestOwnHosts(ProviderConformance):
    @pytest.fixture
    def case(self, provider):
        return Case(provider=provider, config=CONFIG)


def test_a_pod_waits_for_the_hosts_of_another(provider):
    for name in ("first-a1", "second-a1", "third-a1"):
        provider.create(name, CONFIG)
    states = {pod.name: pod.state for pod in provider.list()}
    assert states["third-a1"] is PodState.WAITING
    taken = [host.address for pod in provider.list() for host in pod.hosts]
    assert len(set(taken)) == len(taken) == 8
    provider.delete("first-a1", zone="on-premise")
    assert provider.get("third-a1", zone="on-premise").is_ready


def test_a_higher_priority_goes_first(provider):
    for name in ("first-a1", "second-a1", "third-a1"):
        provider.create(name, CONFIG)
    provider.create("urgent-a1", replace(CONFIG, priority=5))
    provider.delete("first-a1", zone="on-premise")
    assert provider.get("urgent-a1", zone="on-premise").is_ready
    assert provider.get("third-a1", zone="on-premise").state is PodState.WAITING


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (replace(CONFIG, tpu_type="v6e-256"), PodUnavailable),
        (replace(CONFIG, software_version="tpu-ubuntu2204-base"), ConfigError),
        (replace(CONFIG, network="vpc"), ConfigError),
    ],
)
def test_what_hosts_cannot_do_is_refused(provider, config, error):
    with pytest.raises(error):
        provider.create("never-a1", config)
    assert provider.list() == []


def test_hosts_that_gave_trouble_are_left_out(provider, launch):
    avoid = launch.hosts[1:3]
    pod = provider.create("careful-a1", replace(CONFIG, avoid=avoid))
    assert not {host.name for host in pod.hosts} & set(avoid)
    with pytest.raises(PodUnavailable, match="failed before"):
        provider.create("anxious-a1", replace(CONFIG, avoid=launch.hosts[:5]))


def test_hosts_named_twice_are_refused():
    with pytest.raises(ConfigError, match="twice"):
        SSHProvider(LaunchSettings(hosts=("a", "b", "a")))


def test_a_deletion_ends_what_runs(provider):
    case = Case(provider=provider, config=CONFIG)
    _, gang = case.run("busy-a1", "print('begun', flush=True); import time; time.sleep(600)")
    wait_for_lines(gang, "begun", 4)
    SSHProvider(provider._launch).delete("busy-a1", zone="on-premise")  # as another process would
    endings = [event for event in gang.wait(20) if hasattr(event, "ending")]
    while not endings:
        endings = [event for event in gang.wait(20) if hasattr(event, "ending")]
    gang.close()


def test_preflight_tries_every_host(machines, launch):
    machines.stop("host3")
    with contextlib.suppress(ConnectionRefusedError):
        while True:  # until it is gone; on its way out it hangs up
            with contextlib.suppress(ConnectionResetError):
                socket.create_connection((launch.hosts[3], machines.port)).close()
            time.sleep(0.01)
    findings = SSHProvider(launch).preflight(CONFIG)
    assert findings[0].severity == "ok"
    assert [one.severity for one in findings[1:]] == ["ok"] * 3 + ["error"] + ["ok"] * 4
    assert "refused" in findings[4].seen


def test_nothing_starts_on_a_pod_that_waits(provider):
    pod = provider.create("wait-a1", CONFIG).in_state(PodState.WAITING)
    with pytest.raises(ProviderError):
        provider.start(pod, Case(provider=provider, config=CONFIG).command("pass"), attempt=1)


class TestTransport:
    def test_what_ssh_is_told_is_constant(self, tmp_path):
        transport = SSHTransport("pod", key_file=tmp_path / "a key")
        argv = transport.command(Host("h", "ann@10.0.0.1:2222"))
        assert argv[-2:] == ["10.0.0.1", shlex.join(bootstrap())]
        assert argv[argv.index("-l") + 1] == "ann"
        assert argv[argv.index("-p") + 1] == "2222"
        assert "BatchMode=yes" in argv

    @pytest.mark.parametrize(
        ("address", "parts"),
        [
            ("tpu-1", (None, "tpu-1", None)),
            ("ann@tpu-1:22", ("ann", "tpu-1", 22)),
            ("2001:db8::1", (None, "2001:db8::1", None)),
            ("[2001:db8::1]:2200", (None, "2001:db8::1", 2200)),
        ],
    )
    def test_addresses(self, address, parts):
        assert split_address(address) == parts

    @pytest.mark.parametrize("address", ["-oProxyCommand=evil", "", "a b", "-l@host", "x@-oy"])
    def test_addresses_that_ssh_would_misread(self, address):
        with pytest.raises(ConfigError):
            split_address(address)

    def test_each_attempt_has_another_port(self):
        hosts = [Host("a", "203.0.113.1", internal_address="10.0.0.1"), Host("b", "203.0.113.2")]
        first = {SSHTransport("pod").coordinator(hosts) for _ in range(5)}
        assert len(first) > 1
        assert all(one.startswith("10.0.0.1:") for one in first)

    def test_strangers_are_not_let_in(self, launch, tmp_path):
        stranger = own_key(tmp_path / "stranger")
        config = tmp_path / "strange_config"
        config.write_text(
            Path(launch.ssh_config)
            .read_text()
            .replace(str(tmp_path / "user" / "id_ed25519"), str(stranger.private_file))
        )
        refused = SSHTransport("pod", config=str(config)).try_host(Host("h", launch.hosts[0]))
        assert "Permission denied" in refused

    def test_a_broken_connection_ends_the_worker(self, launch, tmp_path):
        transport = SSHTransport("pod", config=launch.ssh_config)
        mark = tmp_path / "pid"
        process = transport.start(Host("h", launch.hosts[0]))
        program = (
            f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        )

        order = Order(
            argv=("python3", "-c", program, str(mark)),
            environment={"JAX_PLATFORMS": "cpu"},
            folder="~/tpukit/pod",
        )
        process.stdin.write(order.to_line())
        process.stdin.flush()
        deadline = time.monotonic() + 30
        while not (mark.exists() and mark.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        pid = int(mark.read_text())
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_two_who_start_at_once_agree_on_a_key(tmp_path):
    program = (
        "import sys; from pathlib import Path;"
        "from tpukit.pods.providers.ssh.transport import own_key;"
        "print(own_key(Path(sys.argv[1])).public)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "ssh")], stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    assert len({one.communicate()[0] for one in both}) == 1
