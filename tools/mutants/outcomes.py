"""What came of changes, kept on disk so that a run that was stopped goes on."""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from changes import Change
from rooms import Room
from trials import Trial


class Outcomes:
    """What came of the changes of one room.

    An outcome is good while the changed file stays as it is, and so does the test that noticed;
    a change that none noticed is tried again when any test of its room is another.

    Args:
        repository: Whose files they are.
        room: Whose changes.
        path: Of the JSON file.
    """

    def __init__(self, repository: Path, room: Room, path: Path) -> None:
        self._repository, self._room, self._path = repository, room, path
        self._kept: dict[str, dict[str, str]] = {}
        if path.exists():
            self._kept = json.loads(path.read_text("utf-8"))

    def find(self, change: Change) -> Trial | None:
        """What came of a change; None where it is to be tried."""
        kept = self._kept.get(self._key(change))
        if kept is None or kept["tests"] != self._tests(kept["by"]):
            return None
        return Trial(kept["outcome"], kept["by"])

    def store(self, change: Change, trial: Trial) -> None:
        """Keep an outcome at once."""
        self._kept[self._key(change)] = {**asdict(trial), "tests": self._tests(trial.by)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._kept, indent=0), "utf-8")

    def _key(self, change: Change) -> str:
        return f"{change.id}-{_hash_of((self._repository / change.file,))}"

    def _tests(self, by: str | None) -> str:
        """The content of the test that noticed, else of all that did not."""
        named = [by.partition("::")[0]] if by else self._room.tests
        return _hash_of(tuple(self._repository / name for name in named))


@cache
def _hash_of(paths: tuple[Path, ...]) -> str:
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)]
    return hashlib.sha256("".join(contents).encode()).hexdigest()[:12]
