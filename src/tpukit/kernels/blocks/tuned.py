"""Tuned blocks: read by generation and shape from JSON beside each op or from the user's folder."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast

from ...errors import TPUKernelError
from ...hardware.target import current_target
from ...plain_data import JsonObject, read_json
from ...runtime.files import write_text
from ..registry.op import BlockSizes, KernelCase, shape_bucket
from ..registry.registry import get_tpu_op
from .vmem import check_vmem

Sizes = TypeVar("Sizes", bound=BlockSizes)
# Folders that come before the shipped ones: none, or that of `use_tuned_blocks`.
_own: list[Path] = []


@dataclasses.dataclass(frozen=True)
class TunedEntry:
    """The best blocks found for one bucket of shapes on one generation.

    Attributes:
        bucket: The key from `Op.bucket`.
        blocks: The sizes by name.
        time_us: Time of the forward pass at the tuned shape, with these blocks.
        default_us: Time with the default blocks; None where the compiler refused those.
        tried: How many choices were timed or refused by the compiler.
        origin: Origin of `time_us`: "measured" or "model".
        versions: Versions of the tools that found it.
    """

    bucket: str
    blocks: Mapping[str, int | bool]
    time_us: float
    origin: str
    versions: Mapping[str, str]
    default_us: float | None
    tried: int

    def to_dict(self) -> JsonObject:
        """Return the entry as the data file stores it."""
        return dataclasses.asdict(self)


def blocks_for(op: str, case: KernelCase, given: Sizes | None) -> Sizes:
    """Return the blocks for a built-in kernel: those given, or those of `choose_blocks`.

    Raises:
        TPUKernelError: The given blocks do not fit in VMEM; the message names the largest that do.
    """
    known = get_tpu_op(op)
    if given is None:
        default = cast(Callable[[KernelCase, str | None], Sizes], known.default_blocks)
        return choose_blocks(op, case, default, bucket=known.bucket)
    check_vmem(known, case, given, current_target())
    return given


def choose_blocks(
    op: str,
    case: KernelCase,
    default_blocks: Callable[[KernelCase, str | None], Sizes],
    *,
    bucket: Callable[[KernelCase], str] = shape_bucket,
    folder: Path | None = None,
) -> Sizes:
    """Return the blocks for a case on the target generation: tuned ones, else the default.

    Args:
        op: The op's name, which is its folder's unless `folder` is given.
        case: The shapes to choose for.
        default_blocks: (case, chip or None) -> the op's default blocks.
        bucket: The op's own, as in `Op.bucket`.
        folder: Folder of `<chip>.json` files; by default the user's, then `data/` in the op's
            folder.
    """
    chip = current_target()
    fallback = default_blocks(case, chip)
    if chip is None:
        return fallback
    folders = tuned_folders(op) if folder is None else [folder]
    entries = (load_tuned(place, chip).get(bucket(case)) for place in folders)
    entry = next((entry for entry in entries if entry is not None), None)
    if entry is None:
        return fallback
    known = {field.name for field in dataclasses.fields(fallback)}
    if set(entry.blocks) != known:
        raise TPUKernelError(
            f"The tuned blocks of {op} on {chip} for {entry.bucket} name "
            f"{', '.join(sorted(entry.blocks))}, but the kernel takes {', '.join(sorted(known))}; "
            "tune it again."
        )
    return dataclasses.replace(fallback, **entry.blocks)


def data_folder(op: str) -> Path:
    """Return the folder of a built-in op's tuned blocks."""
    return Path(__file__).parents[1] / "ops" / op / "data"


def use_tuned_blocks(folder: str | Path | None) -> None:
    """Use the blocks that `tpukit kernel tune -o FOLDER` wrote before those that tpukit ships.

    This applies to programs that this process traces from now on.

    Args:
        folder: Folder of `OP/CHIP.json` files. Ops and shapes that are not in them keep their
            blocks. None returns to the shipped ones.

    Raises:
        TPUKernelError: There is no such file in the folder, or one cannot be read.
    """
    if folder is None:
        _own.clear()
        return
    root = Path(folder).expanduser().resolve()
    files = sorted(root.glob("*/*.json"))
    if not files:
        raise TPUKernelError(
            f"{root} holds no tuned blocks (OP/CHIP.json); write them with "
            f"`tpukit kernel tune OP --on CHIP -o {folder}`."
        )
    load_tuned.cache_clear()
    for file in files:
        load_tuned(file.parent, file.stem)
    _own[:] = [root]


def tuned_folders(op: str) -> list[Path]:
    """Return the folders to search for an op's tuned blocks, the user's first."""
    return [*(root / op for root in _own), data_folder(op)]


@lru_cache(maxsize=128)
def load_tuned(folder: Path, chip: str) -> Mapping[str, TunedEntry]:
    """Return every tuned entry of one op on one generation, by bucket; empty without a file.

    Raises:
        TPUKernelError: The file is not one that `save_tuned` writes.
    """
    path = folder / f"{chip}.json"
    if not path.exists():
        return {}
    try:
        data = read_json(path)
        entries = [TunedEntry(**entry) for entry in data["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TPUKernelError(
            f"{path} is not a file of tuned blocks ({error}); tune the op again, or remove it."
        ) from error
    bad = [
        entry.bucket
        for entry in entries
        if not entry.blocks or not all(_is_size(size) for size in entry.blocks.values())
    ]
    if bad or data.get("chip") != chip:
        what = f"the blocks of {bad[0]} are not positive integers" if bad else "of another chip"
        raise TPUKernelError(f"{path} cannot be used: {what}; tune the op again, or remove it.")
    return {entry.bucket: entry for entry in entries}


def save_tuned(folder: Path, chip: str, entries: Mapping[str, TunedEntry]) -> Path:
    """Write the entries of one op on one generation, sorted for small diffs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{chip}.json"
    ordered = [entries[bucket].to_dict() for bucket in sorted(entries)]
    write_text(path, json.dumps({"chip": chip, "entries": ordered}, indent=1) + "\n")
    load_tuned.cache_clear()
    return path


def _is_size(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, int) and value > 0)
