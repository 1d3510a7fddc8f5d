"""Growing files in an object store: an object cannot be appended to, so a file is many segments.

`records/metrics.jsonl/000002.0001.000000000512-000000000512-000000000640` has the bytes 512 to 640
of one version of `metrics.jsonl`. The name begins with the version:

| part | meaning |
|---|---|
| `000002` | epoch: the number of the lease under which it was written, higher for a later attempt |
| `0001` | counts the times that this attempt rewrote the file (a rollback removes lines) |
| `000000000512` | base: the version counts only when its segments reach up to this byte |

The highest version that reaches its base is the file. So a writer that was given up, and writes on
with its old epoch, changes nothing; and a kill during a rewrite leaves the version before. Segments
of a version may overlap, because small ones are merged: the merged object is written first, then
the small ones are deleted.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

RECORDS = "records"
"""Folder of a run's address that contains its files, apart from checkpoints."""

_NAME = re.compile(r"(\d{6})\.(\d{4})\.(\d{12})-(\d{12})-(\d{12})", re.ASCII)


@dataclass(frozen=True, order=True)
class FileVersion:
    """One version of a file."""

    epoch: int
    rewrite: int
    base: int

    def __str__(self) -> str:
        return f"{self.epoch:06d}.{self.rewrite:04d}.{self.base:012d}"


@dataclass(frozen=True, order=True)
class FileSegment:
    """The bytes from `start` to `end` of a version of a file."""

    version: FileVersion
    start: int
    end: int

    @property
    def name(self) -> str:
        """The last part of the object's name."""
        return f"{self.version}-{self.start:012d}-{self.end:012d}"

    @classmethod
    def parse(cls, name: str) -> "FileSegment | None":
        """Read what `name` returned; None for anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        epoch, rewrite, base, start, end = map(int, match.groups())
        return cls(FileVersion(epoch, rewrite, base), start, end) if start <= end else None


def object_name(file: str, segment: FileSegment) -> str:
    """Return the name of a segment's object, relative to the run's address."""
    return f"{RECORDS}/{file}/{segment.name}"


def files_in(names: Iterable[str]) -> dict[str, list[FileSegment]]:
    """Return the segments among some object names, by the file that they belong to.

    Names that could lead out of a folder are left out: whoever may write to the bucket chose them.
    """
    files: dict[str, list[FileSegment]] = {}
    for name in names:
        folder, *parts, last = name.split("/")
        segment = FileSegment.parse(last)
        is_safe = all(part and not part.startswith(".") and "\\" not in part for part in parts)
        if folder == RECORDS and parts and is_safe and segment is not None:
            files.setdefault("/".join(parts), []).append(segment)
    return files


def newest_version(segments: Iterable[FileSegment]) -> tuple[FileVersion, list[FileSegment]] | None:
    """Return the highest version that reaches its base, with its segments; None if none does."""
    versions: dict[FileVersion, list[FileSegment]] = {}
    for segment in segments:
        versions.setdefault(segment.version, []).append(segment)
    for version in sorted(versions, reverse=True):
        if reach(versions[version]) >= version.base:
            return version, versions[version]
    return None


def reach(segments: Sequence[FileSegment], position: int = 0) -> int:
    """Return up to which byte some segments have every byte after `position`."""
    for segment in path_through(segments, position):
        position = segment.end
    return position


def path_through(segments: Sequence[FileSegment], position: int) -> Iterator[FileSegment]:
    """Yield segments that together have every byte after `position`, the longest ones first."""
    starting = sorted(segments, key=lambda segment: segment.start)
    at, best = 0, None
    while True:
        while at < len(starting) and starting[at].start <= position:
            if best is None or starting[at].end > best.end:
                best = starting[at]
            at += 1
        if best is None or best.end <= position:
            return
        yield best
        position = best.end
