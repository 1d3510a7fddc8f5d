"""Which kind of data a file or folder holds, told from its names."""

from dataclasses import dataclass

from ...errors import TPUValidationError
from ...plain_data import parse_json
from .locations import Location
from .manifest import MANIFEST

TEXT_KINDS = ("text", "jsonl", "array_record", "huggingface")

_SUFFIXES = {
    "tokens": (".npy", ".bin"),
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson"),
    "text": (".txt", ".txt.gz", ".md"),
    "array_record": (".array_record", ".arrayrecord"),
}
_HUGGINGFACE, _SPLIT_LIST = ("dataset_info.json", "state.json"), "dataset_dict.json"
# Files of one folder that are parts of an experiment and not shards of one data set.
_SPLITS = ("train", "val", "valid", "validation", "test", "eval", "dev")


@dataclass(frozen=True)
class DataKind:
    """What there is and the files that make it up, in reading order."""

    name: str
    files: tuple[str, ...]


def kind_of(location: Location) -> DataKind:
    """Tell what a location holds.

    Raises:
        TPUValidationError: Nothing known, more than one kind, or several splits.
    """
    names = location.names
    if not location.is_file:
        if MANIFEST in names:
            return DataKind("prepared", (MANIFEST,))
        if _SPLIT_LIST in names:
            raise _name_a_split(location)
        if any(name in names for name in _HUGGINGFACE):
            return DataKind("huggingface", names)
        if "tokens.npy" in names:
            return DataKind("tokens", ("tokens.npy",))
    elif names[0] == MANIFEST:
        raise TPUValidationError(f"{location.path} describes a folder; give the folder itself.")
    found: dict[str, list[str]] = {}
    for name in names:
        for kind, suffixes in _SUFFIXES.items():
            if name.lower().endswith(suffixes):
                found.setdefault(kind, []).append(name)
    if not found:
        raise TPUValidationError(
            f"{location.path} holds no data of a known kind ({', '.join(names[:3])}"
            f"{', …' if len(names) > 3 else ''}); known are .npy and .bin tokens, .jsonl, .txt, "
            ".array_record, a folder of Hugging Face datasets, and what 'tpukit data prepare' "
            "writes; for models that read no tokens, an .npz file, a folder with one folder of "
            "images per class, and file.py:function."
        )
    if len(found) > 1:
        raise TPUValidationError(
            f"{location.path} holds several kinds of data ("
            + ", ".join(f"{files[0]}: {kind}" for kind, files in found.items())
            + "); name one file, or keep each kind in a folder of its own."
        )
    kind, files = next(iter(found.items()))
    _refuse_splits(location, files)
    return DataKind(kind, tuple(files))


def _name_a_split(location: Location) -> TPUValidationError:
    try:
        splits = parse_json(location.content(_SPLIT_LIST))["splits"]
    except (ValueError, KeyError, TypeError):
        splits = []
    return TPUValidationError(
        f"{location.path} holds the splits {', '.join(splits) or '(unreadable)'} of a Hugging Face "
        f"data set; name one: {location.path}/{splits[0] if splits else 'train'}."
    )


def _refuse_splits(location: Location, files: list[str]) -> None:
    splits = {name for name in files if name.split(".")[0].split("-")[0].lower() in _SPLITS}
    beginnings = {name.split(".")[0].split("-")[0].lower() for name in splits}
    if len(beginnings) > 1:
        raise TPUValidationError(
            f"{location.path} holds {' and '.join(sorted(splits)[:4])}, which look like splits; "
            f"trained on together they would leak. Name one: {location.path}/{sorted(splits)[0]}."
        )
