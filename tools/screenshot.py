"""Write docs/images/check.svg: what `tpukit check` answers, as a terminal shows it."""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

import tpukit

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "check.svg"
COMMAND = "tpukit check llama3.1-8b --on v6e-8 --batch-size 8 --sequence-length 8192"
WIDTH, LINES = 104, 60


def main() -> None:
    result = tpukit.check("llama3.1-8b", on="v6e-8", batch_size=8, sequence_length=8192)
    whole = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    whole.print(result)
    lines = whole.export_text(styles=True).splitlines()
    shown = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    shown.print(Text(f"$ {COMMAND}", style="bold"))
    for line in lines[:LINES]:
        shown.print(Text.from_ansi(line))
    if len(lines) > LINES:
        shown.print(Text(f"… {len(lines) - LINES} more lines", style="dim"))
    picture = shown.export_svg(title="tpukit check")
    # Fonts of other sites are not asked for: a picture is one file.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
