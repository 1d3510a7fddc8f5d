"""Shorten answers for a model's context: figures without sources, lists cut to fit.

`left_out` counts what was cut, by key.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..plain_data import JsonMapping, JsonObject

LONGEST_ANSWER = 8000
"""Characters of an answer, as the SDK writes it; a client's model reads all of them."""
_WHOLE = "job"  # what `write_job` takes back
_OF_A_FIGURE = frozenset({"value", "unit"})
_KEPT_OF_A_FIGURE = ("value", "unit", "origin", "reason")


def fit(answer: JsonMapping, limit: int = LONGEST_ANSWER) -> JsonObject:
    """Return an answer whose text has no more than `limit` characters.

    Figures keep value, unit, origin and the reason why they are missing; commands print sources.
    Numbers keep six digits. Then the largest list loses its last quarter until the answer fits,
    because lists begin with what counts most.
    """
    kept = cast("JsonObject", _shortened(answer))
    left_out: dict[str, str] = {}
    while _size({**kept, "left_out": left_out}) > limit:
        found = _largest_list(kept, "")
        if found is None:
            break
        path, held = found
        total = left_out.get(path, f"of {len(held)}").rpartition(" ")[2]
        del held[max(1, 3 * len(held) // 4) :]
        left_out[path] = f"{len(held)} of {total}"
    return {**kept, "left_out": left_out} if left_out else kept


def _size(answer: object) -> int:
    return len(json.dumps(answer, indent=2, ensure_ascii=False, default=str))


def _shortened(value: object, *, is_whole: bool = False) -> object:
    if isinstance(value, Mapping):
        held = cast("Mapping[str, object]", value)
        if held.keys() >= _OF_A_FIGURE and not is_whole:
            held = {name: held[name] for name in _KEPT_OF_A_FIGURE if name in held}
        return {
            _encodable(name): _shortened(one, is_whole=is_whole or name == _WHOLE)
            for name, one in held.items()
        }
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, Sequence):
        return [_shortened(one, is_whole=is_whole) for one in cast("Sequence[object]", value)]
    return float(f"{value:.6g}") if isinstance(value, float) and not is_whole else value


def _encodable(text: str) -> str:
    """Return the text with "?" for halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _largest_list(value: object, path: str) -> tuple[str, list[Any]] | None:
    """Return the list of two or more with the longest text, and its path."""
    found: list[tuple[str, list[Any]]] = []
    if isinstance(value, dict):
        for name, one in cast("dict[str, object]", value).items():
            if name == _WHOLE:
                continue
            below = _largest_list(one, f"{path}.{name}" if path else name)
            found += [below] if below else []
    elif isinstance(value, list):
        held = cast("list[Any]", value)
        if len(held) > 1:
            return path, held
        below = _largest_list(held[0], f"{path}[0]") if held else None
        found += [below] if below else []
    return max(found, key=lambda pair: _size(pair[1]), default=None)
