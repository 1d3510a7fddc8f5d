"""A run's folder or address: identity, metrics, log and checkpoints of exactly one run."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import jax

from ..errors import TPUError, TPUStorageError, TPUValidationError
from ..hardware.figure import format_quantity
from ..plain_data import read_json
from ..records.lease import LEASES
from ..records.mirror import is_small
from ..records.names import (
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    IDENTITY_FILE,
    LOG_FILE,
    METRICS_FILE,
)
from ..runtime.files import (
    PASSING_ERRORS,
    open_private,
    private_folder,
    write_text,
)
from ..runtime.logs import ROOT, TextFormatter
from ..runtime.object_store import is_address
from ..runtime.writer_lock import WriterLock
from ..step.parts import TrainState
from .checkpoint.agreement import raise_together
from .stored_run import StoredRun

FORMAT = 1
PLACEMENT = "placement.txt"
LOCK = "run.lock"
ENDING_S = 60.0


class RunDirectory:
    """The folder of one run. Process 0 writes it; each process writes its part of `hosts/`.

    A run whose directory is an address (gs://bucket/run) is written to a local folder, which a
    thread sends to the address (`records.upload`). Its lock is a lease (`records.lease`).

    | file | content |
    |---|---|
    | `run.lock` | the process that writes here; locked while the run trains |
    | `run.json` | the run's identity (model, data, batch, seed), its recipe and its settings |
    | `metrics.jsonl` | one JSON object per logged step |
    | `events.jsonl` | attempts, saves, rollbacks, and where the time went |
    | `hosts/0/` … | `steps.jsonl` of each process: that host's times of every step |
    | `train.log` | messages with times, and every warning |
    | `checkpoints/` | unless `checkpoint_dir` is another folder |

    Args:
        path: A local folder, or an address of an object store.

    Attributes:
        path: The local folder that files are written to.
        checkpoints: The folder or address of the checkpoints, unless `checkpoint_dir` is set.
        changes: How the recipe differs from that of the run that is resumed.

    Raises:
        MissingExtraError: The package for gs:// is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self._stack = contextlib.ExitStack()
        self._store: StoredRun | None = None
        if is_address(path):
            self._store = StoredRun(str(path), self._stack)
            self.path = self._store.folder
            self.checkpoints: Path | str = f"{self._store.store.address}/{CHECKPOINTS_FOLDER}"
        else:
            self.path = Path(path)
            self.checkpoints = self.path / CHECKPOINTS_FOLDER
        self.metrics = self.path / METRICS_FILE
        self.changes: tuple[str, ...] = ()
        self._handler: _RunLog | None = None
        self._lock: WriterLock | None = None

    def __str__(self) -> str:
        return str(self.path) if self._store is None else self._store.store.address

    def open(
        self,
        identity: Mapping[str, Any],
        *,
        recipe: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        """Create the folder, or continue in one of the same run.

        Args:
            identity: Values that make it this run; a folder with another identity is refused.
            recipe: Values that may change when a run resumes.
            settings: Written for people to read.

        Raises:
            TPUValidationError: The folder belongs to another run, is not a run's folder, or another
                process is writing it.
            TPUStorageError: A folder that was used before cannot be written now.
        """
        problem: TPUError | None = None
        try:
            if jax.process_index() == 0:
                self._open(*map(_plain, (identity, recipe, settings)))
            elif self._store is not None:
                self._store.open_host(jax.process_index())
        except OSError as error:
            problem = self._unusable(error)
        except (TPUValidationError, TPUStorageError) as error:
            problem = error
        if problem is not None:
            self.close()
        raise_together(
            problem,
            elsewhere=f"Another process refused the run directory {self}; its error says why.",
            refusal=TPUValidationError,
        )
        if self._store is not None:
            self._store.start()

    def refuse_other(self, identity: Mapping[str, Any], *, recipe: Mapping[str, Any]) -> bool:
        """Return whether the folder is of another run that never took a step; write nothing.

        Raises:
            TPUValidationError: The folder belongs to another run, or is not a run's folder.
        """
        if self._store is not None:
            self._store.pull(is_small)
        file = self.path / IDENTITY_FILE
        if file.is_file():
            return self._differs(_plain(identity), _plain(recipe), _read(file))
        if self.path.exists() and not self.path.is_dir():
            raise TPUValidationError(f"{self.path} is a file; give the run its own folder.")
        if any(name not in (LOCK, LEASES) for name in self._names()):
            raise TPUValidationError(
                f"{self} contains files but no run ({IDENTITY_FILE} is missing); give the run its "
                "own folder."
            )
        return False

    def check_owned(self) -> None:
        """Raise if another process took over the run; a local lock cannot be lost.

        Raises:
            TPUValidationError: Another process writes the run.
        """
        if self._store is not None and self._store.is_lost:
            raise TPUValidationError(
                f"Another process took the lease of {self}, because this one did not renew it in "
                "time; this process ends, and the other one goes on."
            )

    def flush(self) -> None:
        """Send all lines to the address now, as far as the store takes them."""
        if self._store is not None:
            self._store.flush()

    def log(self, message: str) -> None:
        """Add a line to train.log."""
        if self._handler is not None:
            record = logging.makeLogRecord(
                {"name": f"{ROOT}.training", "levelname": "INFO", "msg": message}
            )
            self._handler.write(record)

    def close(self) -> None:
        """Stop logging to the folder, send its last lines, and release its lock."""
        if self._handler is not None:
            logging.getLogger(ROOT).removeHandler(self._handler)
            self._handler.close()
            self._handler = None
        self._stack.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(
        self, identity: dict[str, Any], recipe: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        file = self.path / IDENTITY_FILE
        self.refuse_other(identity, recipe=recipe)
        if self._store is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            private_folder(self.path)
        self._lock_folder()
        # Again, now that no other process can change the folder.
        if self.refuse_other(identity, recipe=recipe):
            (self.path / EVENTS_FILE).unlink(missing_ok=True)  # of another run
        document = {"format": FORMAT, "identity": identity, "recipe": recipe, "settings": settings}
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        if (
            not file.is_file() or file.read_text() != text
        ):  # no write, so that a full disk does not stop a restart
            write_text(file, text, private=True)
        handler = _RunLog(self.path / LOG_FILE, encoding="utf-8")
        handler.setLevel(logging.WARNING)
        handler.setFormatter(TextFormatter())
        logging.getLogger(ROOT).addHandler(handler)
        self._handler = handler

    def _lock_folder(self) -> None:
        """Become the only process that writes here, before any change."""
        # The process of the previous attempt may still be ending, on a host that was given up.
        is_restart = int(os.environ.get("TPUKIT_ATTEMPT") or 0) > 1
        wait_s = ENDING_S if is_restart else 0.0
        instead = "end that run, or choose another run_dir. Nothing was changed."
        if self._store is not None:
            self._store.lease.take(wait_s=wait_s, instead=instead)
            return
        lock = WriterLock(self.path / LOCK)
        lock.take(wait_s=wait_s, what=f"The run directory {self.path}", instead=instead)
        self._lock = lock

    def _unusable(self, error: OSError) -> TPUError:
        """Return the error to raise; only storage that worked before may work again."""
        message = f"the run directory {self} cannot be written ({error.strerror or error})"
        if (self.path / LOCK).exists() or error.errno in PASSING_ERRORS:
            return TPUStorageError(f"{message}; free space or fix the storage, and start again.")
        return TPUValidationError(f"{message}; choose another.")

    def _differs(
        self, identity: dict[str, Any], recipe: dict[str, Any], written: dict[str, Any]
    ) -> bool:
        """Return whether the folder is of another run; refuse one that took a step."""
        different = _differences(written.get("identity", {}), identity)
        if not different:
            self.changes = tuple(_differences(written.get("recipe", {}), recipe))
            return False
        began = self.metrics.is_file() and self.metrics.stat().st_size
        saved = any(name.isdigit() for name in self._names(CHECKPOINTS_FOLDER))
        if not began and not saved:
            return True
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise TPUValidationError(
            f"{self} belongs to another run: {'; '.join(different[:3])}{more}. Choose another "
            "run_dir, or use the settings in its run.json; nothing was changed."
        )

    def _names(self, folder: str = "") -> list[str]:
        """Return the names in the run directory, or in a folder of it."""
        if self._store is not None:
            return self._store.store.names(folder)
        inside = self.path / folder
        return [path.name for path in inside.iterdir()] if inside.is_dir() else []


def read_run(path: str | Path) -> dict[str, Any]:
    """Read `run.json` of a run directory, with its `identity` and `settings`.

    Raises:
        TPUValidationError: The file is damaged, or of another tpukit.
    """
    return _read(Path(path) / IDENTITY_FILE)


class _RunLog(logging.FileHandler):
    """Writes log records to a file, and also shows them if no other handler is set up."""

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record)
        others = [*logging.getLogger(ROOT).handlers, *logging.getLogger().handlers]
        if logging.lastResort is not None and others == [self]:
            logging.lastResort.handle(record)

    def write(self, record: logging.LogRecord) -> None:
        """Write a record to the file only."""
        super().emit(record)

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return TextIOWrapper(
            os.fdopen(open_private(self.baseFilename, flags), "ab"), encoding="utf-8"
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: a full disk must not fill the terminal with tracebacks."""


def name_for(model: str) -> Path:
    """Return a new folder under runs/, the same on every process."""
    from jax.experimental import multihost_utils

    seconds = int(datetime.now(UTC).timestamp())
    if jax.process_count() > 1:
        seconds = int(multihost_utils.broadcast_one_to_all(jax.numpy.int32(seconds)))
    stamp = datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{model}-{stamp}"


def _read(file: Path) -> dict[str, Any]:
    try:
        data = read_json(file)
    except (OSError, ValueError) as error:
        raise TPUValidationError(
            f"{file} cannot be read ({error}), so the run is unknown; choose another run_dir."
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
        raise TPUValidationError(f"{file} is not of this tpukit version; choose another run_dir.")
    return data  # pyright: ignore[reportUnknownVariableType]  compared key by key


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data as JSON reads them back: tuples become lists."""
    return json.loads(json.dumps(data))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one text per value that differs."""
    old, new = _flat(before), _flat(now)
    return [
        "the data differ" if key == "data" else f"{key} was {old.get(key)}, is {new.get(key)}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[f"{before}{key}"] = value
    return flat


def write_placement(state: TrainState, folder: Path) -> Path:
    """Write one line per array: path, shape, sharding, devices, bytes per device."""
    lines: list[str] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        shard = leaf.addressable_shards[0].data
        shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        split = getattr(leaf.sharding, "spec", leaf.sharding)
        kind = getattr(leaf.sharding, "memory_kind", None) or "device"
        size = format_quantity(shard.nbytes, "B")
        count = len(leaf.sharding.device_set)
        lines.append(
            f"{jax.tree_util.keystr(path)}  {shape}  {split}  {count} devices, {size} each, {kind}"
        )
    target = folder / PLACEMENT
    write_text(target, "\n".join(lines) + "\n")
    return target
