"""`tpukit check --decode`: what was typed, as a question about prefill and decode."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checker.decoding import DecodingCheck
    from ..runtime.progress import Progress

# What a check of decoding is about; everything else that can be typed is of training.
_ASKED = ("on", "batch_size", "sequence_length", "mesh", "options")


def check_decode(
    target: str,
    asked: Mapping[str, Any],
    *,
    prompt_length: int | None,
    refused: Mapping[str, object],
    progress: "Progress",
    **how: Any,
) -> "DecodingCheck":
    """Check what was typed.

    Args:
        target: The model or the job.
        asked: Keys of the job that options and `--set` state.
        prompt_length: Of `--prompt-length`.
        refused: Options that a check of decoding has no use for, by name, where they were given.
        progress: Called with each stage.
        **how: More arguments of `check_decoding`.

    Raises:
        ConfigError: Something was typed that only training has.
    """
    from ..checker.check import as_job
    from ..checker.decoding import check_decoding
    from ..errors import ConfigError
    from ..hardware.mesh_sizes import read_mesh

    wrong = [key for key in asked if key not in _ASKED and not key.startswith("model")]
    wrong += [f"--{name}" for name, value in refused.items() if value]
    if wrong:
        raise ConfigError(
            f"--decode checks generation, which has no {', '.join(wrong)}; leave it out, or check "
            "the training step without --decode."
        )
    own = {key: value for key, value in asked.items() if key == "on" or key.startswith("model")}
    mesh = asked.get("mesh")
    return check_decoding(
        as_job(target, own),
        mesh=None if mesh is None else read_mesh(mesh),
        batch_size=int(asked.get("batch_size") or 1),
        context=asked.get("sequence_length"),
        prompt=prompt_length,
        options=asked.get("options"),
        progress=progress,
        **how,
    )


def write_pages(result: "DecodingCheck", html: Path, progress: "Progress") -> None:
    """Write a page for each program: decode where it was asked for, prefill beside it."""
    from ..checker.report import write_html

    beside = html.with_name(f"{html.stem}-prefill{html.suffix}")
    progress(f"wrote {write_html(result.decode.to_report(), html)}")
    progress(f"wrote {write_html(result.prefill.to_report(), beside)}")
