"""The flags of the installed libtpu and jaxlib: look one up, search, find the nearest name.

The registry is cached on disk, one file per pair of versions.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from ...errors import FlagError, MissingExtraError
from ...plain_data import JsonMapping, JsonObject
from ...shown import Shown
from ..files import cache_folder, private_folder, write_json
from ..versions import NOT_INSTALLED, installed_version
from . import reading
from .flag import Flag, Parser

# Families that only libtpu has; what says so when libtpu is not there to be asked.
TPU_FAMILIES = ("xla_tpu_", "xla_jf_", "xla_sc_", "xla_msa_", "megascale_", "deepsea_", "tpu_")
_KEPT_SHARED_PREFIX = 5
FORMAT = 2  # raise it when what is read, or how it is written, changes


class FlagRegistry(Shown, Mapping[str, Flag]):
    """Every flag of one pair of jaxlib and libtpu, by name.

    `FlagRegistry.installed()` returns the one of this machine. The first call probes the two
    parsers in child processes, which takes some seconds; later calls read a file.
    """

    def __init__(
        self, flags: Iterable[Flag], *, jaxlib_version: str, libtpu_version: str | None
    ) -> None:
        self.jaxlib_version = jaxlib_version
        self.libtpu_version = libtpu_version
        self._flags = MappingProxyType({flag.name: flag for flag in flags})

    @classmethod
    def installed(cls, *, refresh: bool = False) -> "FlagRegistry":
        """Return the registry of the installed jaxlib and libtpu; without libtpu, of jaxlib alone.

        Args:
            refresh: Probe the parsers again even if the registry is on disk.

        Without libtpu it holds jaxlib's flags only.
        """
        jaxlib_version = installed_version("jaxlib") or NOT_INSTALLED
        libtpu_version = installed_version("libtpu")
        path = registry_path(jaxlib_version, libtpu_version)
        if not refresh:
            known = _from_file(path)
            if known is not None:
                return known
        libtpu = reading.read_libtpu() if libtpu_version is not None else {}
        registry = cls(
            reading.merge(reading.read_jaxlib(), libtpu).values(),
            jaxlib_version=jaxlib_version,
            libtpu_version=libtpu_version,
        )
        _store(path, registry.to_dict())
        _LOADED[path] = registry
        return registry

    @staticmethod
    def is_cached() -> bool:
        """Whether `installed` reads from disk, without probing."""
        jaxlib_version = installed_version("jaxlib") or NOT_INSTALLED
        path = registry_path(jaxlib_version, installed_version("libtpu"))
        return _from_file(path) is not None

    def __getitem__(self, name: str) -> Flag:
        return self._flags[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flags)

    def __len__(self) -> int:
        return len(self._flags)

    def find(self, name: str) -> Flag:
        """Return the flag called `name`, with or without dashes.

        Raises:
            FlagError: There is no such flag; the message has the nearest names.
            MissingExtraError: It is a TPU flag, but libtpu is not installed.
        """
        bare = name.lstrip("-")
        flag = self._flags.get(bare)
        if flag is not None:
            return flag
        if self.libtpu_version is None and bare.startswith(TPU_FAMILIES):
            raise MissingExtraError("tpu", needed_for=f"The TPU flag {bare}", module="libtpu")
        raise FlagError(self.unknown(bare))

    def unknown(self, name: str) -> str:
        """Return the error for a name that is not a flag."""
        nearest = " or ".join(repr(other) for other in self.nearest(name))
        return f"No flag '{name}' in {' or '.join(self._versions)}." + (
            f" Did you mean {nearest}?" if nearest else ""
        )

    @property
    def described(self) -> str:
        """The versions whose flags these are, for messages."""
        return " and ".join(self._versions)

    @property
    def _versions(self) -> list[str]:
        libtpu = [f"libtpu {self.libtpu_version}"] if self.libtpu_version else []
        return [*libtpu, f"jaxlib {self.jaxlib_version}"]

    def nearest(self, name: str, *, most: int = 3) -> list[str]:
        """Return names that look or mean the same: shared words first, rare words counting most."""
        words = _words(name)
        shared: dict[str, float] = {}
        for word in words:
            for other, known in self._names_by_word.items():
                if _same_word(word, other):
                    for candidate in known:
                        shared[candidate] = shared.get(candidate, 0.0) + 1.0 / len(known)
        close = difflib.get_close_matches(name, self._flags, n=most, cutoff=0.8)
        ranked = sorted(
            shared,
            key=lambda other: (
                -shared[other],
                -difflib.SequenceMatcher(a=name, b=other).ratio(),
            ),
        )
        return list(dict.fromkeys([*close, *ranked]))[:most]

    def search(self, part: str = "", *, parser: Parser | None = None) -> list[Flag]:
        """Return the flags whose name contains `part`, a plain text, by name.

        Raises:
            FlagError: `part` has characters that no flag's name has.
        """
        wanted = part.strip().removeprefix("--").lower()
        if wanted and not wanted.isidentifier() and not f"_{wanted}".isidentifier():
            raise FlagError(
                f"no flag's name contains {part!r:.60}, which is taken as plain text and not as a "
                "pattern; write part of a name, such as megacore."
            )
        return [
            flag
            for name, flag in sorted(self._flags.items())
            if wanted in name.lower() and (parser is None or parser in flag.parsers)
        ]

    def to_dict(self) -> JsonObject:
        """Return every flag as plain data, also for the file on disk."""
        return {
            "jaxlib": self.jaxlib_version,
            "libtpu": self.libtpu_version,
            "flags": [flag.to_dict() for flag in self._flags.values()],
        }

    @cached_property
    def _names_by_word(self) -> dict[str, list[str]]:
        index: dict[str, list[str]] = {}
        for name in self._flags:
            for word in _words(name):
                index.setdefault(word, []).append(name)
        return index


_LOADED: dict[Path, FlagRegistry] = {}  # parsed once a process; the file decides which


def _from_file(path: Path) -> FlagRegistry | None:
    if path in _LOADED:
        return _LOADED[path]
    data = _load(path)
    if data is None:
        return None
    try:
        registry = FlagRegistry(
            [Flag.from_dict(entry) for entry in data["flags"]],
            jaxlib_version=data["jaxlib"],
            libtpu_version=data["libtpu"],
        )
    except (KeyError, TypeError):
        return None  # damaged or foreign: read anew
    _LOADED[path] = registry
    return registry


def _words(name: str) -> frozenset[str]:
    return frozenset(name.lower().split("_")) - {"xla", "enable", ""}


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    shortest = min(len(word), len(other))
    return shortest >= _KEPT_SHARED_PREFIX and (word.startswith(other) or other.startswith(word))


def registry_path(jaxlib_version: str, libtpu_version: str | None) -> Path:
    """Return the registry file of a pair of versions."""
    name = f"jaxlib-{jaxlib_version}_libtpu-{libtpu_version or NOT_INSTALLED}_v{FORMAT}.json"
    return cache_folder("flags") / name


def _load(path: Path) -> JsonObject | None:
    """Return the contents of the file, or None if it is missing or damaged."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None  # pyright: ignore[reportUnknownVariableType]


def _store(path: Path, data: JsonMapping) -> bool:
    """Write the file atomically; return False if the folder is not writable."""
    try:
        private_folder(path.parent)
        write_json(path, dict(data))
    except OSError:
        return False
    return True
