"""A launch to a host that shares no file, PATH, HOME or package with this machine."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from tpukit.pods.launching.launch import prepare_launch
from tpukit.pods.providers.ssh.transport import own_key
from tpukit_emulators.hosts import EmulatedHosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("pods-processes"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("unshare"),
        reason="this user may not mount a small file system",
    ),
]


@pytest.fixture
def packages():
    """uv's own cache of packages, so that the second run of this test downloads nothing."""
    folder = Path(os.environ.get("UV_CACHE_DIR", "~/.cache/uv")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def host(tmp_path, packages):
    machines = EmulatedHosts(tmp_path / "machines", shared=[packages])
    key = own_key(tmp_path / "user")
    address = machines.start("bare", f"ann:{key.public} ann")
    config = tmp_path / "ssh_config"
    config.write_text(
        f"{machines.ssh_config.read_text()}  User ann\n  IdentityFile {key.private_file}\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {tmp_path / 'known_hosts'}\n"
    )
    yield address, config
    machines.close()


def test_a_job_trains_on_a_host_without_tpukit(host, packages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    address, config = host
    np.save("tokens.npy", np.arange(4000, dtype=np.uint16) % 256)
    job = {
        "model": "tiny",
        "on": "v6e-1",
        "batch_size": 2,
        "sequence_length": 16,
        "train": {"data": "tokens.npy", "steps": 2},
        "launch": {
            "provider": "ssh",
            "hosts": [address],
            "ssh_config": str(config),
            "environment": {"UV_CACHE_DIR": str(packages)},
        },
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))
    texts = []

    def run(name):
        texts.clear()
        ready = prepare_launch("job.yaml", name=name, is_checked=True)
        return ready.run(lambda event: texts.append(getattr(event, "text", "")))

    outcome = run("first")
    home = tmp_path / "machines" / "hosts" / "bare"
    assert outcome.is_done, texts
    assert (home / "tpukit" / "first-a1" / "runs" / "first").is_dir()
    assert any("environment: complete, with Python" in text for text in texts)

    outcome = run("second")
    assert outcome.is_done, texts
    assert any("environment: already there" in text for text in texts)
    (environment,) = (home / ".cache" / "tpukit" / "environments").glob("*/bin/tpukit")
    assert "/home/tpukit/" in environment.read_text()  # nothing of this machine's paths
