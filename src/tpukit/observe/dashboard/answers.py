"""What is sent back: JSON that any browser reads, refusals with the way out, the page's files."""

import json
import math
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from starlette.responses import Response

_NEVER_STORED = {"cache-control": "no-store"}


def encoded(data: Any) -> bytes:
    """JSON in bytes; numbers that JSON has no word for are null."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.encode()


def answer(body: bytes, *, status: int = 200) -> Response:
    """Send JSON; a browser keeps none of it, since the next moment may know more."""
    return Response(body, status, _NEVER_STORED, "application/json")


def refusal(status: int, error: str, way_out: str) -> Response:
    """Say in JSON what is wrong and what to do about it."""
    return answer(encoded({"error": error, "way_out": way_out}), status=status)


@cache
def assets_folder() -> Path:
    """Where the files of the front end are installed."""
    return Path(str(files("tpukit.observe.dashboard") / "assets"))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in cast("dict[str, Any]", data).items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in cast("list[Any]", data)]
    return data
