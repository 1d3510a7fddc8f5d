"""`Toolchain`: a version of jax with its libtpu, on a version of Python."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

from packaging.version import Version

from ...errors import ConfigError, did_you_mean
from ...plain_data import JsonObject

_SAYS_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_PATIENCE_S = 20.0


@cache
def find_interpreter(minor: str) -> Path | None:
    """Return an interpreter of a minor version of Python, such as "3.13", or None.

    Candidates are the running one, `python3.13` on the PATH and pyenv's. Each is asked for its
    version, because a name on the PATH may be a shim for a Python that is not installed.
    """
    return next((path for path in _candidates(minor) if _version_of(path) == minor), None)


def _candidates(minor: str) -> Iterator[Path]:
    # Not the link in a virtual environment, which would lead to that environment's packages.
    yield Path(getattr(sys, "_base_executable", sys.executable))
    on_path = shutil.which(f"python{minor}")
    if on_path:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    yield from sorted(pyenv.glob(f"versions/{minor}.*/bin/python{minor}"), reverse=True)


def _version_of(path: Path) -> str:
    try:
        asked = subprocess.run(
            [path, "-I", "-c", _SAYS_VERSION],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


RUNNING = "default"
"""The name of the toolchain that this process runs with."""
_NAME = re.compile(r"jax-(?P<jax>\d+(?:\.\d+)+)(?:-py(?P<python>3\.\d+))?")


@dataclass(frozen=True)
class Toolchain:
    """A pair of jax and libtpu on a version of Python.

    Attributes:
        name: "default", or "jax-0.12.0.1", with "-py3.12" for another Python.
        python: Minor version, such as "3.13".
        requirements: pip requirements besides tpukit's dependencies; empty for the default.
        jax: The expected version of jax; "" for the default.
    """

    name: str
    python: str
    requirements: tuple[str, ...] = ()
    jax: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it is this process's own, which needs no environment."""
        return self.name == RUNNING

    @property
    def folder_name(self) -> str:
        """The name of its environment, one per version of jax and of Python."""
        return f"jax-{self.jax}-py{self.python}"

    def with_requirements(self, *more: str) -> "Toolchain":
        """Return the toolchain with more packages in its environment."""
        return replace(self, requirements=(*self.requirements, *more))


def parse_toolchains(text: str) -> list[Toolchain]:
    """Parse comma-separated names; a single one is compared with the running toolchain.

    Raises:
        ConfigError: A name is not a toolchain, or appears twice.
    """
    found = [parse_toolchain(name.strip()) for name in text.split(",")]
    if len(found) == 1 and not found[0].is_running:
        found.insert(0, parse_toolchain(RUNNING))
    names = [candidate.name for candidate in found]
    if len(found) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"--toolchain {text!r} names nothing to compare; give another toolchain than the "
            f"running one, such as {_example()}, or several different ones."
        )
    return found


def parse_toolchain(name: str) -> Toolchain:
    """Parse a toolchain's name; any version of jax is valid, tried or not.

    Raises:
        ConfigError: The name is invalid, or this jax does not install on that Python.
    """
    if name == RUNNING:
        return Toolchain(name, f"{sys.version_info.major}.{sys.version_info.minor}")
    match = _NAME.fullmatch(name)
    if match is None:
        known = [RUNNING, *(f"jax-{row['jax']}" for row in tried())]
        raise ConfigError(
            f"{name!r} is not a toolchain; write jax-VERSION, with -py3.12 behind it for a certain "
            f"Python, or {RUNNING}. Tried were {', '.join(known[1:])}." + did_you_mean(name, known)
        )
    jax = match["jax"]
    row = _nearest(jax)
    pythons: list[str] = row["pythons"]
    if match["python"] and match["python"] not in pythons:
        raise ConfigError(
            f"{name} asks for Python {match['python']}, but jax {jax} was tried with "
            f"{', '.join(pythons)}; leave out -py{match['python']}, or choose one of those."
        )
    installed = (candidate for candidate in pythons if find_interpreter(candidate) is not None)
    python = match["python"] or next(installed, pythons[0])
    return Toolchain(name, python, (f"jax[tpu]=={jax}", *row["requirements"]), jax)


@cache
def tried() -> list[JsonObject]:
    """Return the facts about the versions of jax that were tried, the newest first."""
    data = resources.files("tpukit.runtime.toolchains").joinpath("data", "tried.toml")
    return tomllib.loads(data.read_text(encoding="utf-8"))["tried"]


def _nearest(jax: str) -> JsonObject:
    """Return the row of the same minor version, else of the newest before it, else the oldest."""
    series = Version(jax).release[:2]
    return next((row for row in tried() if Version(row["jax"]).release[:2] <= series), tried()[-1])


def _example() -> str:
    return f"jax-{tried()[0]['jax']}"
