"""Make the Python environment of a job on a host that has neither tpukit, pip nor uv.

The agent runs this file's text as a child process with one argument, a JSON object (`Request` in
`tpukit.pods.worker.order`). It writes the environment's folder to a file and exits with 0, or
writes one sentence to standard error and exits with 203 (the host cannot be used) or 206 (trying
again may help). It needs only the standard library of Python 3.8.

An environment is kept below the user's home by the digest of lock, wheel and Python. A file in it,
written last, tells that it is complete, and a lock file lets one process at a time make it.
"""

from __future__ import annotations

import configparser
import fcntl
import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

UNUSABLE, TRY_AGAIN = 203, 206  # SETUP_FAILED and SETUP_INTERRUPTED in tpukit.exit_codes
COMPLETE = "tpukit-complete.json"
# pip's settings by the variables with which uv reads the same. uv does not read pip's files.
PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")


class SetupRefused(Exception):
    """The environment cannot be made; the exit code tells whether trying again may help."""

    def __init__(self, code: int, why: str) -> None:
        self.code = code
        super().__init__(why)


def main(text: str) -> int:
    """Make an environment, and return the exit code."""
    try:
        make_environment(json.loads(text))
    except SetupRefused as refused:
        report(str(refused))
        return refused.code
    except OSError as error:
        report(f"it cannot be written: {error}")
        return TRY_AGAIN
    return 0


def make_environment(request: dict[str, Any]) -> str:
    """Make the environment unless it is there, and return its folder."""
    cache = os.path.expanduser(request["cache"])
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupRefused(
            UNUSABLE,
            f"expected a host with Linux on x86_64, but this is {platform.system()} on "
            f"{platform.machine()}; install tpukit there, and set launch.python.",
        )
    uv = unpack_uv(request["uv"], cache)
    python, version = find_python(uv, request["pythons"])
    digests = [file_digest(request["lock"]), file_digest(request["wheel"]), python, version]
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()[:20]
    folder = os.path.join(cache, "environments", digest)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(folder + ".lock", "w", encoding="utf-8") as lock:
        wait_for_lock(lock)
        if not os.path.exists(os.path.join(folder, COMPLETE)):
            refuse_full_disk(os.path.dirname(folder), request["disk_bytes"])
            shutil.rmtree(folder, ignore_errors=True)  # from a set-up that was killed
            fill(folder, uv, python, request)
            write_whole(os.path.join(folder, COMPLETE), json.dumps(digests).encode())
            report(f"complete, with Python {version} ({python})")
        else:
            report(f"already there, with Python {version}")
    write_whole(request["result"], folder.encode())
    return folder


def fill(folder: str, uv: str, python: str, request: dict[str, Any]) -> None:
    """Install the locked packages and the wheel in a new virtual environment."""
    report(f"installing {request['packages']} packages")
    run_uv([uv, "venv", "--quiet", "--no-project", "--python", python, folder])
    wheel = os.path.join(folder, request["wheel_name"])
    shutil.copyfile(request["wheel"], wheel)
    install = [uv, "pip", "install", "--no-deps", "--python", os.path.join(folder, "bin", "python")]
    run_uv([*install, "--require-hashes", "-r", request["lock"]])
    run_uv([*install, "--quiet", wheel])


def find_python(uv: str, supported: list[str]) -> tuple[str, str]:
    """Return path and version of the host's own supported Python, or of one that uv downloads.

    Args:
        uv: Path of uv.
        supported: Supported versions ("3.11"), the preferred one first.
    """
    for wanted in supported:
        found = find_installed(uv, wanted)
        if found is not None:
            return found
    report(f"no Python {' or '.join(supported)} is installed here, so uv downloads one")
    try:
        run_uv([uv, "python", "install", "--no-bin", supported[0]])
    except SetupRefused as refused:
        raise SetupRefused(
            TRY_AGAIN,
            f"this host has Python {platform.python_version()}, but {' or '.join(supported)} is "
            f"needed, and uv could not download it ({refused}); install it in the host's image.",
        ) from None
    found = find_installed(uv, supported[0])
    if found is None:
        raise SetupRefused(UNUSABLE, f"uv's own Python {supported[0]} cannot be run here.")
    return found


def find_installed(uv: str, wanted: str) -> tuple[str, str] | None:
    """Return path and full version of an installed Python; None if there is none."""
    argv = [uv, "python", "find", "--system", "--no-project", "--no-python-downloads", wanted]
    found = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=uv_environment(), check=False
    )
    if found.returncode:
        return None
    path = found.stdout.decode().strip()
    # Distributions may leave out modules that packages need.
    test = "import ctypes, platform, sqlite3, ssl, sysconfig; print(platform.python_version())"
    tried = subprocess.run(
        [path, "-c", test], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return None if tried.returncode else (path, tried.stdout.decode().strip())


def refuse_full_disk(folder: str, needed: int) -> None:
    """Refuse a host without room for the environment."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupRefused(
            UNUSABLE,
            f"it needs {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free; make room "
            "(for example in ~/.cache), or use a larger boot disk.",
        )


def unpack_uv(packed: str, cache: str) -> str:
    """Unpack uv's executable once, and return its path."""
    path = os.path.join(cache, "uv", file_digest(packed)[:20], "uv")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with gzip.open(packed, "rb") as file:
            write_whole(path, file.read(), mode=0o755)
    return path


def run_uv(argv: list[str]) -> None:
    """Run uv, and pass its messages on; a failure is refused with its last message."""
    last = ""
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=uv_environment()
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            text = line.decode(errors="replace").rstrip()
            if text.strip() and not text.lstrip().startswith("+ "):  # each installed package
                last = text.strip(" ×╰─▶│├")
                report(last)
    if running.returncode:
        raise SetupRefused(
            TRY_AGAIN, last or f"uv {argv[1]} ended with exit code {running.returncode}"
        )


def uv_environment(variables: dict[str, str] | None = None) -> dict[str, str]:
    """Return environment variables with which uv uses the index that pip's settings name.

    uv's own variables and files take precedence, so nothing is set where a variable exists.
    """
    given = dict(os.environ if variables is None else variables)
    settings: dict[str, str] = {}
    parser = configparser.RawConfigParser(strict=False)
    files = [os.path.expanduser(path) for path in (*PIP_FILES, given.get("PIP_CONFIG_FILE", ""))]
    try:
        parser.read([file for file in files if file], encoding="utf-8")
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update(parser.items(section))
    except configparser.Error:
        pass  # pip itself would refuse such a file
    for name in PIP_SETTINGS:
        variable = "PIP_" + name.upper().replace("-", "_")
        settings[name] = given.get(variable, settings.get(name, ""))
    taken = {
        variable: " ".join(settings[name].split())
        for name, variable in PIP_SETTINGS.items()
        if settings[name].strip()
    }
    if "UV_INDEX" in taken:
        # pip takes the best version of all indexes; the lock's hashes make that safe.
        taken["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if "UV_FIND_LINKS" in taken:
        taken["UV_FIND_LINKS"] = taken["UV_FIND_LINKS"].replace(" ", ",")
    return {"UV_NO_PROGRESS": "1", "UV_HTTP_RETRIES": "8", **taken, **given}


def wait_for_lock(file: Any) -> None:
    """Wait until no other process of this host makes the same environment."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        report("waiting for another process that makes it")
        fcntl.flock(file, fcntl.LOCK_EX)


def write_whole(path: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file that is either complete or missing."""
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(partial, mode)
    os.replace(partial, path)


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()


def report(text: str) -> None:
    """Write a progress line for the run's log."""
    sys.stderr.write(f"environment: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
