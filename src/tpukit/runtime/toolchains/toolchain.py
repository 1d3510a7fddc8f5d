"""A toolchain, described: a version of jax with the libtpu it asks for, on a version of Python."""

import re
import sys
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ...errors import ConfigError, did_you_mean
from .interpreters import find_interpreter

RUNNING = "default"
"""The name of the toolchain that this process runs with."""
_NAME = re.compile(r"jax-(?P<jax>\d+(?:\.\d+)+)(?:-py(?P<python>3\.\d+))?")


@dataclass(frozen=True)
class Toolchain:
    """A pair of jax and libtpu on a version of Python.

    Attributes:
        name: As it is typed: "default", or "jax-0.12.0.1" with "-py3.12" where that was asked for.
        python: Minor version, such as "3.13".
        requirements: What pip installs beside tpukit's own dependencies; nothing for the default.
        jax: The version that has to come of it; "" for the default, whatever it is.
    """

    name: str
    python: str
    requirements: tuple[str, ...] = ()
    jax: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it is the one of this process, which needs no environment."""
        return self.name == RUNNING

    @property
    def folder_name(self) -> str:
        """The name of its environment: one for each version of jax and of Python."""
        return f"jax-{self.jax}-py{self.python}"

    def with_requirements(self, *more: str) -> "Toolchain":
        """Return the toolchain with more packages in its environment."""
        return replace(self, requirements=(*self.requirements, *more))


def parse_toolchains(text: str) -> list[Toolchain]:
    """Read names between commas; one alone is compared with the running toolchain.

    Raises:
        ConfigError: A name is no toolchain, or stands there twice.
    """
    found = [parse_toolchain(name.strip()) for name in text.split(",")]
    if len(found) == 1 and not found[0].is_running:
        found.insert(0, parse_toolchain(RUNNING))
    names = [one.name for one in found]
    if len(found) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"--toolchain {text!r} names nothing to compare; give another toolchain than the "
            f"running one, such as {_example()}, or several different ones."
        )
    return found


def parse_toolchain(name: str) -> Toolchain:
    """Read the name of a toolchain; any version of jax has one, whether it was tried or not.

    Raises:
        ConfigError: It is no such name, or this jax does not install on that Python.
    """
    if name == RUNNING:
        return Toolchain(name, f"{sys.version_info.major}.{sys.version_info.minor}")
    match = _NAME.fullmatch(name)
    if match is None:
        known = [RUNNING, *(f"jax-{row['jax']}" for row in tried())]
        raise ConfigError(
            f"{name!r} is no toolchain; write jax-VERSION, with -py3.12 behind it for a certain "
            f"Python, or {RUNNING}. Tried were {', '.join(known[1:])}." + did_you_mean(name, known)
        )
    jax = match["jax"]
    row = _nearest(jax)
    pythons: list[str] = row["pythons"]
    if match["python"] and match["python"] not in pythons:
        raise ConfigError(
            f"{name} asks for Python {match['python']}, and jax {jax} was tried with "
            f"{', '.join(pythons)}; leave -py{match['python']} away, or choose one of those."
        )
    installed = (one for one in pythons if find_interpreter(one) is not None)
    python = match["python"] or next(installed, pythons[0])
    return Toolchain(name, python, (f"jax[tpu]=={jax}", *row["requirements"]), jax)


@cache
def tried() -> list[dict[str, Any]]:
    """What is known of the versions of jax that were tried, the newest first."""
    data = resources.files("tpukit.runtime.toolchains").joinpath("data", "tried.toml")
    return tomllib.loads(data.read_text(encoding="utf-8"))["tried"]


def _nearest(jax: str) -> dict[str, Any]:
    """Return the row of the same minor version, else of the newest before it, else the oldest."""
    series = _order(jax)[:2]
    return next((row for row in tried() if _order(row["jax"])[:2] <= series), tried()[-1])


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _example() -> str:
    return f"jax-{tried()[0]['jax']}"
