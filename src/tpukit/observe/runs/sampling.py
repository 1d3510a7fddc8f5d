"""A few records from all over a file of lines, in a time that does not depend on its length."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.plain_files import open_plain
from .records_table import parse_records

BLOCK = 4 << 10  # bytes, in which there are whole lines


def sample_records(
    path: Path, count: int, *, inside: Path | None = None
) -> list[Mapping[str, Any]]:
    """Return up to `count` records of a file in order, the last one among them.

    Args:
        path: The file; one that cannot be read has no records.
        count: How many places are read.
        inside: The folder that links must not lead out of.
    """
    lines: list[bytes] = []
    try:
        with open_plain(path, inside=inside) as file:
            size = file.seek(0, os.SEEK_END)
            if size <= count * BLOCK:
                file.seek(0)
                found = file.read().split(b"\n")[:-1]
                chosen = {round(at * (len(found) - 1) / max(1, count - 1)) for at in range(count)}
                lines = [found[at] for at in sorted(chosen)] if found else []
            else:
                for at in range(count):
                    file.seek(round(at * (size - BLOCK) / (count - 1)))
                    whole = file.read(BLOCK).split(b"\n")[:-1]
                    last = at == count - 1
                    lines += whole[-1:] if last else whole[1:2]
    except OSError:
        return []
    return [record for record in parse_records(lines) if record]
