"""`quantization_verdict`: how each chip runs a checkpoint that was published quantized."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ..errors import TPUModelError
from ..hardware import Chip, Figure, get_chip
from ..hardware.catalog import chips_considered_for
from ..hardware.formats import BFLOAT16, FORMATS
from ..hardware.stored_formats import WEIGHT_FORMATS
from ..models.defaults import SERVING_CONTEXT
from ..models.huggingface.config import config_from_huggingface
from ..models.huggingface.files import INDEX_FILE, SINGLE_FILE, TensorFiles, read_json
from ..models.huggingface.published.reading import quantization_of
from ..models.huggingface.published.scheme import Scheme
from ..quantization.published import held_as
from ..shown import Facts, Shown
from .cost.candidates import named_slice
from .cost.serving_model import ServedModel
from .memory_optimizer import transformer_config
from .serving import ServingChoice, plan_serving

Answer = Literal["native", "emulated", "refused"]
CHIPS = chips_considered_for("published_checkpoints")
CAPTION = (
    "native: the matrix unit multiplies the stored values and the activations they were made for. "
    "emulated: they are\nwidened to bfloat16, in the kernel where they are held narrow, else when "
    "they are read. refused: no slice of that\ngeneration holds them. Rates are of `held as`, at "
    "most, by roofs (model)."
)


@dataclass(frozen=True, kw_only=True)
class ChipVerdict(Facts):
    """How one generation runs the checkpoint.

    Attributes:
        on: The generation or slice.
        held: The weight format in which tpukit stores it without loss; otherwise bf16.
        serving: The smallest slice for it in that format.
        way_out: A better alternative; empty if there is none.
        better: The smallest slice for the format of the alternative.
    """

    on: str
    answer: Answer
    held: str
    why: str
    serving: ServingChoice
    way_out: str = ""
    better: ServingChoice | None = None
    _facts = "on answer held_as=held why serving way_out better"


@dataclass(frozen=True, kw_only=True)
class QuantizationVerdict(Shown):
    """How each chip runs a published checkpoint.

    Attributes:
        stored: Bytes of all weights as published, measured from the files, or modelled from
            config.json alone.
    """

    model: str
    scheme: Scheme
    stored: Figure
    batch: int
    context: int
    chips: tuple[ChipVerdict, ...]
    _facts = "model scheme stored_bytes=stored batch context chips"

    def __rich__(self) -> Table:
        size = "unknown" if self.stored.value is None else f"{self.stored.value / 2**30:.1f} GiB"
        title = f"{self.model}: {self.scheme}; {size} stored ({self.stored.origin})"
        table = Table("on", "answer", "held as", "GiB", "slice", title=title, caption=CAPTION)
        table.add_column("decode tokens/s")
        table.add_column("why, and the way out")
        for one in self.chips:
            words = f"{one.why} {one.way_out}".strip()
            if one.better is not None and one.better.slice:
                words += f" ({one.better.slice}: {_rate(one.better)} tokens/s)"
            table.add_row(
                one.on,
                one.answer,
                one.held,
                f"{one.serving.weight_bytes / 2**30:.1f}",
                one.serving.slice or "none",
                _rate(one.serving),
                words,
            )
        return table


def quantization_verdict(
    source: str | Path,
    *,
    on: Sequence[str] = CHIPS,
    batch: int = 1,
    context: int = SERVING_CONTEXT,
) -> QuantizationVerdict:
    """Return for each chip whether a quantized checkpoint runs natively, emulated or not at all.

    Args:
        source: A folder with config.json, with or without weights, or a config.json.
        on: Generations, or slices such as "v6e-8".
        batch: Concurrent sequences.
        context: Tokens per sequence, at most the model's maximum.

    Raises:
        TPUModelError: It is not quantized, or in an unsupported format.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    data = read_json(path)
    found = quantization_of(data)
    if found is None:
        raise TPUModelError(
            f"{path} has no quantization_config: its weights are not quantized, and every chip "
            "multiplies bfloat16. `tpukit plan --serve` sizes a slice for it."
        )
    config = config_from_huggingface(data)
    context = min(context, config.max_seq_len)
    model = ServedModel.of(transformer_config(config))
    verdicts = [_on(name, found.scheme, config, batch, context) for name in on]
    return QuantizationVerdict(
        model=config.name,
        scheme=found.scheme,
        stored=_stored(path.parent, found.scheme, model),
        batch=batch,
        context=context,
        chips=tuple(verdicts),
    )


def _on(name: str, scheme: Scheme, config: Any, batch: int, context: int) -> ChipVerdict:
    one = named_slice(name)
    chip = get_chip(name) if one is None else one.chip
    held, obstacle = held_as(scheme)
    better = _better(chip, scheme, held)
    formats = [held, *([better] if better else [])]
    plan = plan_serving(config, batch=batch, context=context, formats=formats, generations=[name])
    serving = plan.choices[0]
    native = _multiplies(chip, scheme) and not obstacle
    answer: Answer = "native" if native else "emulated"
    if serving.slice is None:
        answer = "refused"
    return ChipVerdict(
        on=name,
        answer=answer,
        held=held,
        why=serving.reason or _why(chip, scheme, native, obstacle),
        serving=serving,
        way_out=_way_out(chip, scheme, better),
        better=plan.choices[1] if better else None,
    )


def _multiplies(chip: Chip, scheme: Scheme) -> bool:
    known = any(scheme.values in (one.name, one.hlo) for one in FORMATS)
    return known and chip.multiplies(scheme.activations, scheme.values)


def _why(chip: Chip, scheme: Scheme, native: bool, obstacle: str) -> str:
    pair = f"{scheme.activations} by {scheme.values}"
    if native:
        return f"{chip.title} multiplies {pair}."
    if obstacle:
        also = f"{chip.title} multiplies {pair}, but " if _multiplies(chip, scheme) else ""
        return f"{also}{obstacle}: read as numbers."
    return f"{chip.title} does not multiply {pair}: the kernel widens them."


def _better(chip: Chip, scheme: Scheme, held: str) -> str | None:
    """Return a narrower or native format to convert it to; None if there is none."""
    if held != "bf16":
        return None
    if scheme.bits <= 4:
        return "int4"
    return "fp8" if chip.multiplies("float8_e4m3fn") else "int8"


def _way_out(chip: Chip, scheme: Scheme, better: str | None) -> str:
    if better is not None:
        return f"Way out: round it anew to {better} (tpukit quantize)."
    if scheme.bits == 8 and not _multiplies(chip, scheme):
        native = "fp8" if chip.multiplies("float8_e4m3fn") else "int8"
        held, _ = held_as(scheme)
        if held != native and native in WEIGHT_FORMATS:
            return f"Way out: its products are native in {native}; round it anew to that."
    return ""


def _stored(folder: Path, scheme: Scheme, model: ServedModel) -> Figure:
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        with ExitStack() as stack:
            files = TensorFiles(folder, stack)
            total = sum(map(files.nbytes, files))
        return Figure(float(total), "B", "measured", f"tensors of {folder}")
    matrices = [one for one in model.matrices if one.narrow]
    narrow = [one for one in matrices if one.of_experts or not scheme.experts_only]
    others = model.parameters - sum(one.parameters for one in narrow)
    held = sum(one.count * scheme.nbytes(one.columns, one.rows) for one in narrow)
    return Figure(
        float(held + BFLOAT16.nbytes(others)), "B", "model", "the definition of its format"
    )


def _rate(choice: ServingChoice) -> str:
    rate = choice.tokens_per_s
    return "–" if rate is None else f"{rate:,.0f}"
