"""Environments on hosts, made with real uv and a real Python from packages in a folder."""

import ast
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from small_wheels import write_package
from uv import find_uv_bin

from tpukit.exit_codes import ExitCode
from tpukit.pods.worker import environment
from tpukit.pods.worker.order import AGENT, ENVIRONMENT

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def packed_uv(tmp_path_factory):
    packed = tmp_path_factory.mktemp("uv") / "uv.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(Path(find_uv_bin()).read_bytes())
    return packed


class BareHost:
    """A home and a package index of its own, and the request for an environment."""

    def __init__(self, folder, uv):
        self.home, self.index = folder / "home", folder / "index"
        self.home.mkdir()
        self.index.mkdir()
        tiny = write_package(self.index, "tiny")
        lock = folder / "lock.txt"
        digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
        lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
        wheel = write_package(folder, "shipped")
        self.lock = lock
        self.request = {
            "cache": "~/.cache/tpukit",
            "lock": str(lock),
            "wheel": str(wheel),
            "wheel_name": wheel.name,
            "uv": str(uv),
            "pythons": [HERE],
            "packages": 1,
            "disk_bytes": 1,
            "result": str(folder / "result"),
        }
        self.variables = {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.defpath}",
            "PIP_FIND_LINKS": str(self.index),
            "UV_NO_INDEX": "1",
            "UV_PYTHON_DOWNLOADS_JSON_URL": (folder / "none.json").as_uri(),
        }
        (folder / "none.json").write_text("{}")

    def start(self, **changes):
        text = json.dumps({**self.request, **changes})
        return subprocess.Popen(
            [sys.executable, "-c", ENVIRONMENT.read_text(), text],
            env=self.variables,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def make(self, **changes):
        process = self.start(**changes)
        _, errors = process.communicate()
        return process.returncode, errors

    @property
    def folder(self):
        return Path(Path(self.request["result"]).read_text())

    @property
    def folders(self):
        return [
            path for path in (self.home / ".cache/tpukit/environments").glob("*") if path.is_dir()
        ]


@pytest.fixture
def host(tmp_path, packed_uv):
    return BareHost(tmp_path, packed_uv)


@pytest.mark.parametrize("path", [AGENT, ENVIRONMENT])
def test_programs_for_hosts_are_written_for_python_3_8(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert any(node.module == "__future__" for node in imports)  # annotations are not evaluated
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [node.module for node in imports]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_an_environment_has_the_locked_packages_and_is_used_again(host):
    code, errors = host.make()
    assert code == 0, errors
    assert f"environment: complete, with Python {HERE}" in errors
    seen = subprocess.check_output(
        [
            host.folder / "bin/python",
            "-c",
            "import tiny, shipped, sys; print(tiny.version, sys.prefix)",
        ],
        text=True,
        env={"HOME": str(host.home)},
    )
    assert seen.split() == ["1.0", str(host.folder)]
    shutil.rmtree(host.index)  # not needed a second time
    code, errors = host.make()
    assert (code, errors.count("\n")) == (0, 1)
    assert "already there" in errors
    assert len(host.folders) == 1


def test_another_lock_or_wheel_gives_another_environment(host, tmp_path):
    assert host.make()[0] == 0
    first = host.folder
    wheel = write_package(tmp_path, "shipped", text="changed = True\n")
    assert host.make(wheel=str(wheel))[0] == 0
    assert host.folder != first
    assert len(host.folders) == 2


def test_a_set_up_that_was_killed_is_not_taken_for_complete(host):
    assert host.make()[0] == 0
    done = host.folder
    (done / environment.COMPLETE).unlink()  # what a kill before the last step leaves
    (done / "half").write_text("made")
    code, errors = host.make()
    assert code == 0
    assert "environment: complete" in errors
    assert host.folder == done
    assert not (done / "half").exists()


def test_a_kill_in_the_middle_leaves_nothing_that_is_used(host):
    process = host.start()
    for line in process.stderr:
        if "installing" in line:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not [path for path in host.folders if (path / environment.COMPLETE).exists()]
    assert host.make()[0] == 0


def test_two_at_once_make_it_once(host, tmp_path):
    both = [host.start(result=str(tmp_path / f"result{number}")) for number in range(2)]
    reports = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], reports
    assert sum("environment: complete" in report for report in reports) == 1
    assert sum("already there" in report for report in reports) == 1


def test_a_package_with_another_hash_is_refused(host):
    write_package(host.index, "tiny", text="other = 1\n")
    code, errors = host.make()
    assert code == ExitCode.SETUP_INTERRUPTED == environment.TRY_AGAIN
    assert "hash mismatch" in errors.lower()
    assert not (host.folders[0] / environment.COMPLETE).exists()


def test_hosts_that_cannot_have_it_are_refused_in_one_sentence(host):
    code, errors = host.make(disk_bytes=10**18)
    assert code == ExitCode.SETUP_FAILED == environment.UNUSABLE
    assert errors.startswith("environment: it needs 1000000000.0 GB, but ")
    assert errors.count("\n") == 1
    code, errors = host.make(pythons=["3.99"])
    assert code == ExitCode.SETUP_INTERRUPTED
    assert "but 3.99 is needed, and uv could not download it" in errors.splitlines()[-1]
    assert not host.folders


@pytest.mark.slow
def test_a_host_with_too_old_a_python_gets_one_from_uv(host, tmp_path):
    """As on images with Python 3.10; uv's list of downloads is a file here, not GitHub's."""
    left_out = ("__pycache__", "site-packages", "test", "share")

    def keep(entry):
        return None if entry.name.split("/")[-1] in left_out else entry

    archive = tmp_path / "python.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(sys.base_prefix, "python", filter=keep)
    major, minor, patch = sys.version_info[:3]
    download = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": archive.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "variant": None,
        "build": "20260101",
    }
    name = f"cpython-{major}.{minor}.{patch}-linux-x86_64-gnu"
    (tmp_path / "none.json").write_text(json.dumps({name: download}))
    host.variables["PATH"] = str(tmp_path / "nothing")
    code, errors = host.make()
    assert code == 0, errors
    assert "is installed here, so uv downloads one" in errors
    assert f"{host.home}/.local/share/uv/python" in errors.splitlines()[-1]


def test_pip_s_settings_become_uv_s(tmp_path, monkeypatch):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://mirror.example/simple\nextra-index-url =\n    https://a.example\n"
        "    https://b.example\n[install]\ncert = /etc/mine.pem\n"
    )
    monkeypatch.setattr(environment, "PIP_FILES", (str(file),))
    seen = environment.uv_environment({"PIP_FIND_LINKS": "/w /x", "SSL_CERT_FILE": "/own.pem"})
    assert seen["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert seen["UV_INDEX"] == "https://a.example https://b.example"
    assert seen["UV_FIND_LINKS"] == "/w,/x"
    assert seen["SSL_CERT_FILE"] == "/own.pem"  # uv's own variables come first
