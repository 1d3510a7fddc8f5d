"""The keys that settings know at any depth, and what whoever writes another one is told."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast, get_args

from pydantic import BaseModel

from ..errors import ConfigError, TPUValidationError, did_you_mean
from .document import Document
from .model_source import is_own_model

_Kind = type[BaseModel]


def unknown_key(path: str, known: Iterable[str], *, where: str) -> TPUValidationError:
    """Return the error for a key that does not exist, with the nearest one that does."""
    known = sorted(known)
    section, _, key = path.rpartition(".")
    beside = [one for one in known if one.rpartition(".")[0] == section]
    elsewhere = [one for one in known if _last(one) == key]
    hint = f" Did you mean '{elsewhere[0]}'?" if elsewhere else ""
    hint = hint or did_you_mean(key, beside, by=_last) or did_you_mean(key, known, by=_last)
    if not hint and section and beside:
        hint = f" Keys of {section}: are {', '.join(map(_last, beside))}."
    hint = hint or " `tpukit config show` lists every setting."
    return ConfigError(f"{where} sets {path!r}, which is no setting of tpukit.{hint}")


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def paths_beside(kind: _Kind, path: str) -> list[str]:
    """Return the keys that stand beside the last one of `path` in settings of a kind.

    Example:
        >>> paths_beside(Job, "train.lora.rnk")
        ['train.lora.rank', 'train.lora.alpha', 'train.lora.targets', 'train.lora.base']
    """
    section = path.rpartition(".")[0]
    inner: _Kind | None = kind
    for name in section.split(".") if section else ():
        if not name.isdigit():  # a row of a list: each is of the list's kind
            inner = None if inner is None else _kind_of(inner, name)
    return [] if inner is None else [f"{section}.{name}" for name in inner.model_fields]


def fold_inner_keys(document: Document, kind: _Kind, known: Iterable[str]) -> None:
    """Put keys of settings within a value, such as `train.lora.rank`, into that value.

    `--set` and Python name them by dotted path; a file has them below the value already.
    """
    settings = frozenset(known)
    for path in [path for path in document.values if path not in settings]:
        section, _, key = path.rpartition(".")
        if section not in settings or not paths_beside(kind, path):
            continue
        held = document.values.get(section)
        held = held.model_dump(exclude_unset=True) if isinstance(held, BaseModel) else held
        whole = cast("Mapping[str, Any]", held) if isinstance(held, Mapping) else {}
        document.values[section] = {**whole, key: document.values.pop(path)}
        document.origins[section] = document.origins.pop(path)


def refuse_unknown_inside(document: Document, kind: _Kind) -> None:
    """Refuse an unknown key within one value of a document, such as `train.lora` or `model`.

    Raises:
        ConfigError: It names the line of the key, and the nearest known one.
    """
    for path, value in document.values.items():
        if path == "model":
            _refuse_unknown_changes(document, value)
            continue
        for inner in _paths_inside(path, value):
            known = paths_beside(kind, inner)
            if known and inner not in known:
                raise unknown_key(inner, known, where=document.place_of(inner))


def _refuse_unknown_changes(document: Document, model: object) -> None:
    """Refuse a field of `model: {preset: tiny, …}` that no transformer has."""
    if not isinstance(model, Mapping) or is_own_model(str(cast("Any", model).get("preset", ""))):
        return
    from ..models.transformer.config import TransformerConfig

    known = ["model.preset", *(f"model.{one.name}" for one in fields(TransformerConfig))]
    for name in cast("Mapping[str, object]", model):
        if (path := f"model.{name}") not in known:
            raise unknown_key(path, known, where=document.place_of(path))


def _paths_inside(path: str, value: object) -> Iterable[str]:
    """Yield the path of every key below `path`, rows of lists by their number."""
    if isinstance(value, Mapping):
        for name, below in cast("Mapping[str, object]", value).items():
            yield f"{path}.{name}"
            yield from _paths_inside(f"{path}.{name}", below)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, row in enumerate(cast("Sequence[object]", value)):
            yield from _paths_inside(f"{path}.{number}", row)


def _kind_of(kind: _Kind, name: str) -> _Kind | None:
    """Return the settings that a field holds, alone, optional or as rows; None of a plain value."""
    field = kind.model_fields.get(name)
    within: list[Any] = [] if field is None else [field.annotation]
    while within:
        one = within.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
        within += get_args(one)
    return None
