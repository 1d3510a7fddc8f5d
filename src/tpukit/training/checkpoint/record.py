"""What a process writes beside the arrays of a checkpoint: its files' digests and its position.

Each process writes one record after all arrays are committed, and a checkpoint counts only when
the records of all processes are there: the records are the commit marker. Every process digests
its share of the files, so that no single host has to read a whole pod's checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from etils import epath

from ...errors import TPUCheckpointError
from ...plain_data import parse_json
from .files import write_whole
from .named_arrays import LeafShape

FOLDER = "tpukit"
FORMAT = 1
NAME = re.compile(r"process-(\d+)-of-(\d+)\.json")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint, as it was when it was committed."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """One process's part of what is known about a checkpoint.

    Attributes:
        step: The step the checkpoint was taken after.
        process: Which process wrote this record.
        processes: How many records the checkpoint has.
        files: This process's share of the checkpoint's files.
        data: Where this process's data stream stood.
        metadata: What the caller gave to keep; the same in every record.
        items: What arrays the checkpoint holds; the same in every record.
    """

    step: int
    process: int
    processes: int
    files: dict[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    data: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    items: dict[str, list[LeafShape]] = field(default_factory=dict[str, list[LeafShape]])

    def write(self, step_folder: epath.Path) -> None:
        """Write the record, whole or not at all."""
        folder = step_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        body = _canonical({"format": FORMAT, **asdict(self)})
        document = f'{{"sha256": "{_sha256(body)}", "record": {body}}}\n'
        write_whole(folder / record_name(self.process, self.processes), document)

    @classmethod
    def read(cls, path: epath.Path) -> "Record":
        """Read a record.

        Raises:
            TPUCheckpointError: It is damaged, or of a format this version does not know.
        """
        try:
            document: dict[str, Any] = parse_json(path.read_bytes())
            saved: dict[str, Any] = document["record"]
            intact = document["sha256"] == _sha256(_canonical(saved))
        except (ValueError, KeyError, TypeError) as error:
            raise TPUCheckpointError(f"the record {path.name} cannot be read: {error}") from error
        if not intact:
            raise TPUCheckpointError(f"the record {path.name} is not as it was written")
        if saved["format"] != FORMAT:
            raise TPUCheckpointError(
                f"the record {path.name} has format {saved['format']}, and this tpukit reads "
                f"format {FORMAT}"
            )
        return cls(
            step=saved["step"],
            process=saved["process"],
            processes=saved["processes"],
            files={name: FileEntry(**entry) for name, entry in saved["files"].items()},
            data=saved["data"],
            metadata=saved["metadata"],
            items={
                name: [LeafShape.from_dict(leaf) for leaf in leaves]
                for name, leaves in saved["items"].items()
            },
        )


def record_name(process: int, processes: int) -> str:
    """The file name of one process's record."""
    return f"process-{process:05d}-of-{processes:05d}.json"


def missing_records(names: list[str]) -> str | None:
    """Why the records named are not those of a whole checkpoint, or None when they are."""
    found = {(int(match[1]), int(match[2])) for name in names if (match := NAME.fullmatch(name))}
    if not found:
        return "it was not finished: no process has recorded its part"
    counts = {processes for _, processes in found}
    if len(counts) > 1:
        return f"its records speak of {' and '.join(map(str, sorted(counts)))} processes"
    expected = counts.pop()
    absent = sorted(set(range(expected)) - {process for process, _ in found})
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
        return f"it was not finished: of {expected} processes, {shown} left no record"
    return None


def plain_json(value: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """A copy of `value` as JSON keeps it, taken now.

    Raises:
        TPUCheckpointError: JSON cannot hold it exactly.
    """
    try:
        copied = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TPUCheckpointError(
            f"{what}= must be plain data (dicts, lists, strings, numbers): {error}. Pass arrays as "
            "items of their own, save(step, name=array)."
        ) from error
    return copied


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
