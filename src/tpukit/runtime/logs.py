"""Opt-in logging: stdlib loggers under `tpukit`, as text or as JSON lines.

Library modules call `logging.getLogger(__name__)` and pass facts as `extra={...}`; nothing is
configured until a program calls `setup_logging`.
"""

import json as json_module
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any

from ..errors import TPUValidationError, did_you_mean

ROOT = "tpukit"
LEVELS = ("debug", "info", "warning", "error", "critical")
# What every record carries; whatever else is on a record came from `extra=`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(level: str = "warning", json: bool = False) -> logging.Logger:
    """Send tpukit's log messages at `level` and above to standard error.

    Calling it again replaces the earlier set-up. Messages do not propagate to the root logger,
    because absl, which Orbax uses, adds its own handler there and every line would appear twice.

    Args:
        level: "debug", "info", "warning", "error" or "critical".
        json: Write one JSON object per line, with `extra` fields, instead of text.

    Returns:
        The logger `tpukit`.

    Raises:
        TPUValidationError: The level is not one of those.
    """
    if level.lower() not in LEVELS:
        raise TPUValidationError(
            f"The log level {level!r} is not known; use one of {', '.join(LEVELS)}."
            + did_you_mean(level.lower(), LEVELS)
        )
    logger = logging.getLogger(ROOT)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _OwnHandler)]:
        logger.removeHandler(handler)
    handler = _OwnHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


class TextFormatter(logging.Formatter):
    """`03:04:05 WARNING tpukit.runtime.multihost: message key=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Append the extra fields to the line."""
        fields = "".join(f" {name}={value}" for name, value in _extra_fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _extra_fields(record).items():
            fields[f"extra_{name}" if name in fields else name] = _finite(value)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(fields, ensure_ascii=False, default=str)


class _OwnHandler(logging.StreamHandler[Any]):
    """Marks tpukit's handler, so that a second `setup_logging` finds it."""


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _finite(value: Any) -> Any:
    # JSON has no NaN or Infinity; readers would refuse the whole line.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
