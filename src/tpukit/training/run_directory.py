"""A run's own folder: what it is, its metrics, log, checkpoints and arrays; never another run's."""

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
from ..runtime.files import open_private, private_folder, write_text
from ..runtime.logs import ROOT, TextFormatter
from ..runtime.run_files import EVENTS_FILE, IDENTITY_FILE, LOG_FILE, METRICS_FILE
from ..runtime.storage import PASSING_ERRORS
from ..runtime.writer_lock import WriterLock
from .checkpoint.agreement import raise_together

FORMAT = 1
PLACEMENT = "placement.txt"
LOCK = "run.lock"
ENDING_S = 60.0


class RunDirectory:
    """The folder of one run. Process 0 writes, and each process below `hosts/`.

    | file | what it holds |
    |---|---|
    | `run.lock` | which process writes here; held while the run trains |
    | `run.json` | what makes it this run (model, data, batch, seed), its recipe and its settings |
    | `metrics.jsonl` | one JSON object a logged step |
    | `events.jsonl` | attempts, saves, rollbacks, and where the time went |
    | `hosts/0/` … | `steps.jsonl` of each process: what that host did in every step |
    | `train.log` | what happened, with times, and every warning |
    | `checkpoints/` | unless they are kept elsewhere |

    Attributes:
        changes: How the recipe differs from that of the run that is continued.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / METRICS_FILE
        self.checkpoints = self.path / "checkpoints"
        self.changes: tuple[str, ...] = ()
        self._handler: _RunLog | None = None
        self._lock: WriterLock | None = None

    def open(
        self,
        identity: Mapping[str, Any],
        *,
        recipe: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        """Make the folder, or continue in one that holds the same run.

        Args:
            identity: What makes it this run: a folder with another one is refused.
            recipe: What may change when a run goes on.
            settings: Kept for people to read.

        Raises:
            TPUValidationError: It holds another run, something that is no run at all, or a run
                that another process is writing.
            TPUStorageError: A folder that was used before cannot be used now.
        """
        problem: TPUError | None = None
        if jax.process_index() == 0:
            try:
                self._open(*map(_plain, (identity, recipe, settings)))
            except OSError as error:
                problem = self._unusable(error)
            except (TPUValidationError, TPUStorageError) as error:
                problem = error
        if problem is not None:
            self.close()
        raise_together(
            problem,
            elsewhere=f"Process 0 refused the run directory {self.path}; its error says why.",
            refusal=TPUValidationError,
        )

    def refuse_other(self, identity: Mapping[str, Any], *, recipe: Mapping[str, Any]) -> bool:
        """Return whether the folder holds another run that never took a step, writing nothing.

        Raises:
            TPUValidationError: It holds another run, or something that is no run at all.
        """
        file = self.path / IDENTITY_FILE
        if file.is_file():
            return self._differs(_plain(identity), _plain(recipe), _read(file))
        if self.path.is_dir() and any(path.name != LOCK for path in self.path.iterdir()):
            raise TPUValidationError(
                f"{self.path} holds files but no run ({IDENTITY_FILE} is missing); give the run a "
                "folder of its own."
            )
        if self.path.exists() and not self.path.is_dir():
            raise TPUValidationError(f"{self.path} is a file; give the run a folder of its own.")
        return False

    def log(self, message: str) -> None:
        """Add a line to train.log."""
        if self._handler is not None:
            record = logging.makeLogRecord(
                {"name": f"{ROOT}.training", "levelname": "INFO", "msg": message}
            )
            self._handler.write(record)

    def close(self) -> None:
        """Stop logging to the folder, and let another process write there."""
        if self._handler is not None:
            logging.getLogger(ROOT).removeHandler(self._handler)
            self._handler.close()
            self._handler = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(
        self, identity: dict[str, Any], recipe: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        file = self.path / IDENTITY_FILE
        self.refuse_other(identity, recipe=recipe)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        private_folder(self.path)
        self._take()
        # Once more, now that no other process can change it.
        if self.refuse_other(identity, recipe=recipe):
            (self.path / EVENTS_FILE).unlink(missing_ok=True)  # attempts at something else
        document = {"format": FORMAT, "identity": identity, "recipe": recipe, "settings": settings}
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        if not file.is_file() or file.read_text() != text:  # a full disk must not stop a restart
            write_text(file, text, private=True)
        handler = _RunLog(self.path / LOG_FILE, encoding="utf-8")
        handler.setLevel(logging.WARNING)
        handler.setFormatter(TextFormatter())
        logging.getLogger(ROOT).addHandler(handler)
        self._handler = handler

    def _take(self) -> None:
        """Become the one process that writes here, before anything here is changed."""
        lock = WriterLock(self.path / LOCK)
        # The process of the attempt before may still be ending, on a host that was given up.
        is_again = int(os.environ.get("TPUKIT_ATTEMPT") or 0) > 1
        lock.take(
            wait_s=ENDING_S if is_again else 0.0,
            what=f"The run directory {self.path}",
            instead="end that run, or choose another run_dir. Nothing was changed.",
        )
        self._lock = lock

    def _unusable(self, error: OSError) -> TPUError:
        """Return what to raise: storage that has worked may work again, a wrong path never."""
        said = f"the run directory {self.path} cannot be written ({error.strerror or error})"
        if (self.path / LOCK).exists() or error.errno in PASSING_ERRORS:
            return TPUStorageError(f"{said}; free space or mend the storage, and start again.")
        return TPUValidationError(f"{said}; choose another.")

    def _differs(
        self, identity: dict[str, Any], recipe: dict[str, Any], found: dict[str, Any]
    ) -> bool:
        """Refuse another run, unless that one never took a step: then there is nothing to lose."""
        different = _differences(found.get("identity", {}), identity)
        if not different:
            self.changes = tuple(_differences(found.get("recipe", {}), recipe))
            return False
        began = self.metrics.is_file() and self.metrics.stat().st_size
        saved = self.checkpoints.is_dir() and any(
            path.name.isdigit() for path in self.checkpoints.iterdir()
        )
        if not began and not saved:
            return True
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise TPUValidationError(
            f"{self.path} belongs to another run: {'; '.join(different[:3])}{more}. Choose another "
            "run_dir, or continue with the settings in its run.json; nothing was changed."
        )


def read_run(path: str | Path) -> dict[str, Any]:
    """What `run.json` of a run directory says: `identity` and `settings`.

    Raises:
        TPUValidationError: It is damaged, or of another tpukit.
    """
    return _read(Path(path) / IDENTITY_FILE)


class _RunLog(logging.FileHandler):
    """Keeps what is logged, and still shows it where nobody has set up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record)
        others = [*logging.getLogger(ROOT).handlers, *logging.getLogger().handlers]
        if logging.lastResort is not None and others == [self]:
            logging.lastResort.handle(record)

    def write(self, record: logging.LogRecord) -> None:
        """Write to the file alone."""
        super().emit(record)

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return TextIOWrapper(
            os.fdopen(open_private(self.baseFilename, flags), "ab"), encoding="utf-8"
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the line: a disk that is full must not fill the terminal with tracebacks."""


def name_for(model: str) -> Path:
    """A new folder under runs/, the same on every process."""
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
            f"{file} cannot be read ({error}), so nobody knows which run this is; choose another "
            "run_dir."
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
        raise TPUValidationError(f"{file} is not a run of this tpukit; choose another run_dir.")
    return data  # pyright: ignore[reportUnknownVariableType]  compared key by key


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back: tuples are lists in JSON."""
    return json.loads(json.dumps(data))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    old, new = _flat(before), _flat(now)
    return [
        "the data have another content"
        if key == "data"
        else f"{key} was {old.get(key)}, is {new.get(key)}"
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


def write_placement(state: Any, folder: Path) -> Path:
    """Write one line an array: path, shape, split over the mesh, devices, bytes on each."""
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
