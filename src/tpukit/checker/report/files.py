"""Write a file whole or not at all."""

import os
from pathlib import Path

from ...errors import TPUValidationError


def write_whole(path: Path, content: bytes) -> None:
    """Write beside `path` and move into place, so that nobody ever sees half a report.

    Raises:
        TPUValidationError: The place cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TPUValidationError(
            f"{path} cannot be written ({error.strerror}); choose another place."
        ) from None
