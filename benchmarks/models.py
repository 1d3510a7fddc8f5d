"""Every model family: does its training step compile, and does it equal transformers?

python benchmarks/models.py compile
python benchmarks/models.py equality
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import DATA, HELD_TO_TARGET, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "compile",
        "compile narrow models of every family on every slice and axis",
        options={
            "--slices": {"help": "separated by commas; all by default"},
            "--families": {"help": "separated by commas; all by default"},
            "--meshes": {"help": "separated by semicolons; all by default"},
            "--compile": {"action": "store_true", "help": "what was not compiled before"},
            "--again": {"action": "store_true", "help": "what was compiled before too"},
            "--codegen": {"action": "store_true", "help": "generate code too"},
        },
    ),
    Subcommand(
        "equality",
        "logits and greedy tokens beside transformers",
        options={"words": {"nargs": "*", "help": "words of a model's name; all by default"}},
        needs=("transformers", "torch"),
        environment={"JAX_PLATFORMS": "cpu"},
    ),
)

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from huggingface_models import MODELS, VOCABULARY, greedy_tokens, logits_of, make_model
from rich.console import Console
from rich.table import Table

import tpukit
from tpukit.compiler import compile_for
from tpukit.compiler.kernel_traces import kernel_calls
from tpukit.errors import ShardingError, TPUError, TPUModelError
from tpukit.models import TransformerConfig, export_huggingface, get_preset, import_huggingface
from tpukit.models.generation import Generator, Sampling
from tpukit.models.huggingface.weights import ImportedModel
from tpukit.runtime.files import write_text
from tpukit.step import Workload

SLICES = ("v5p-16", "v6e-8", "7x-2x2x1")  # eight devices each
NARROW = {"d_model": 1024, "d_ff": 1024, "vocab_size": 8192, "max_seq_len": 8192}
EXPERTS = {"n_experts": 8, "experts_per_token": 2, "expert_d_ff": 512}
TOKENS, BATCH = 2048, 16
CELLS = DATA / "compiled_models.json"


def narrow(preset: str, **changes: Any) -> TransformerConfig:
    """A preset with few, narrow layers; kinds of layers change in the fields they name."""
    given = get_preset(preset)
    kinds = {name: dict(fields) for name, fields in given.layer_kinds.items()}
    for name, fields in changes.pop("kinds", {}).items():
        kinds[name] |= fields
    return given.replace(**{**NARROW, **changes}, layer_kinds=kinds)


FAMILIES: dict[str, TransformerConfig] = {
    "deepseek-v3": narrow(
        "deepseek-v3",
        n_layers=5,
        n_heads=8,
        n_kv_heads=8,
        mtp_layers=1,
        layer_pattern="dense then moe",
        kinds={"moe": {**EXPERTS, "shared_d_ff": 512, "router_groups": 4, "router_groups_kept": 2}},
    ),
    "qwen3-next": narrow(
        "qwen3-next-80b-a3b",
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        **EXPERTS,
        shared_d_ff=512,
        layer_pattern="linear, full",
        kinds={
            "linear": {
                "delta": {"key_heads": 4, "value_heads": 8, "key_dim": 128, "value_dim": 128}
            }
        },
    ),
    "gpt-oss": narrow("gpt-oss-120b", n_layers=4, n_heads=16, n_kv_heads=4, **EXPERTS),
    "gemma4-31b": narrow(
        "gemma4-31b",
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        layer_pattern="local, global",
        kinds={"global": {"n_kv_heads": 4}},
    ),
    "gemma4-26b-a4b": narrow(
        "gemma4-26b-a4b",
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        **EXPERTS,
        layer_pattern="local, global",
        kinds={"global": {"n_kv_heads": 4}},
    ),
    "gemma4-e2b": narrow(
        "gemma4-e2b",
        n_layers=4,
        n_heads=4,
        n_kv_heads=1,
        layer_pattern="local, global then reading_local, reading_global",
        kinds={"reading_local": {"d_ff": 2048}, "reading_global": {"d_ff": 2048}},
    ),
    "llama4": narrow(
        "llama4-scout",
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        **{**EXPERTS, "experts_per_token": 1},
        shared_d_ff=512,
        layer_pattern="chunked, global",
        kinds={"chunked": {"attention_chunk": 1024}},
    ),
}


@dataclass(frozen=True)
class Layout:
    """A mesh of eight devices, and the strategy that uses its axes."""

    strategy: str
    mesh: dict[str, int]
    microbatches: int = 1


LAYOUTS = {
    "fsdp": Layout("fsdp", {"fsdp": 8}),
    "tensor": Layout("fsdp+megatron", {"fsdp": 2, "tensor": 4}),
    "expert": Layout("fsdp+expert", {"fsdp": 2, "expert": 4}),
    "expert, tensor": Layout("fsdp+expert+megatron", {"fsdp": 2, "expert": 2, "tensor": 2}),
    "context": Layout("fsdp+context", {"fsdp": 2, "context": 4}),
    "pipeline": Layout("pipeline+fsdp", {"stage": 2, "fsdp": 4}, microbatches=4),
}


@dataclass(frozen=True)
class Cell:
    """What became of one family on one mesh of one slice."""

    family: str
    layout: str
    slice: str
    outcome: str  # "compiled", "refused" (before the compiler was asked) or "failed"
    seconds: float
    libtpu: str
    reason: str = ""
    hbm_bytes: int | None = None
    kernels: dict[str, int] | None = None  # calls by name; a loop's body counts once

    def __str__(self) -> str:
        if self.outcome != "compiled":
            return f"{self.outcome}: {self.reason}"
        assert self.hbm_bytes is not None
        assert self.kernels is not None
        found = ", ".join(self.kernels) or "no kernels"
        return f"{self.hbm_bytes / 2**30:.2f} GiB; {found}"


def workload(family: str, layout: str) -> Workload:
    """The training step of one cell."""
    how = LAYOUTS[layout]
    return Workload(
        FAMILIES[family],
        batch_size=BATCH,
        sequence_length=TOKENS,
        strategy=how.strategy,
        microbatches=how.microbatches,
        remat="full",
    )


def compile_cell(family: str, layout: str, on: str, *, until: Any = "schedule") -> Cell:
    """Compile one cell, or say why there is no such program."""
    began = time.monotonic()

    def cell(outcome: str, **rest: Any) -> Cell:
        took = round(time.monotonic() - began, 1)
        return Cell(family, layout, on, outcome, took, libtpu=version("libtpu"), **rest)

    try:
        work = workload(family, layout)
        compiled = compile_for(work, on, mesh=LAYOUTS[layout].mesh, until=until)
    except (ShardingError, TPUModelError) as error:
        return cell("refused", reason=str(error))
    except TPUError as error:
        return cell("failed", reason=str(error))
    if not compiled.fits:
        return cell("failed", reason="does not fit")
    calls = Counter(call.name.split(".")[0] for call, _ in kernel_calls(compiled.module))
    return cell(
        "compiled", hbm_bytes=compiled.memory.total_bytes, kernels=dict(sorted(calls.items()))
    )


def table_of(cells: list[Cell]) -> Table:
    """One line for each family and mesh, a column for each slice."""
    slices = list(dict.fromkeys(cell.slice for cell in cells))
    table = Table("family", "mesh", *slices)
    by_place = {(cell.family, cell.layout, cell.slice): cell for cell in cells}
    for family, layout in dict.fromkeys((cell.family, cell.layout) for cell in cells):
        row = [by_place.get((family, layout, one)) for one in slices]
        table.add_row(family, layout, *("-" if cell is None else str(cell) for cell in row))
    return table


def asked_cells(asked: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Family, mesh and slice of every cell that is asked for and makes sense."""
    return [
        (family, layout, on)
        for family in asked.families.split(",")
        for layout in asked.meshes.split(";")
        for on in asked.slices.split(",")
        if "expert" not in layout or FAMILIES[family].has_experts
    ]


def load() -> dict[tuple[str, str, str], Cell]:
    """What was found before, by family, mesh and slice."""
    rows = json.loads(CELLS.read_text("utf-8")) if CELLS.exists() else []
    cells = [Cell(**row) for row in rows]
    return {(cell.family, cell.layout, cell.slice): cell for cell in cells}


def save(cells: dict[tuple[str, str, str], Cell]) -> None:
    """Keep what was found, in the order of families, meshes and slices."""
    order: list[list[str]] = [list(FAMILIES), list(LAYOUTS), list(SLICES)]
    places = sorted(cells, key=lambda at: [o.index(x) for o, x in zip(order, at, strict=True)])
    lines = [json.dumps(asdict(cells[place])) for place in places]
    write_text(CELLS, "[\n" + ",\n".join(lines) + "\n]\n")


def run_compile(options):
    """Every family of models under every mesh axis, through the TPU compiler for v5p, v6e and 7x.

    Training steps of models that keep their family's heads, kinds of layers and options, and have
    few and narrow layers and few experts. A cell is compiled up to its schedule, with the HBM of a
    device and the Pallas kernels in it (origin compiler), or refused with the reason before the
    compiler is asked. Anything else is a defect: the exit code is 1. `--codegen` goes all the way.

    `--compile` writes every cell to data/compiled_models.json as it ends, and leaves out those
    that compiled before unless `--again` is given: a run that was cut goes on where it ended.
    """
    tpukit.configure_tpu_environment()
    options.slices = options.slices or ",".join(SLICES)
    options.families = options.families or ",".join(FAMILIES)
    options.meshes = options.meshes or ";".join(LAYOUTS)
    wanted, cells = asked_cells(options), load()
    for place in wanted if options.compile else []:
        known = cells.get(place)
        if known is not None and known.outcome == "compiled" and not options.again:
            continue
        cells[place] = compile_cell(*place, until="codegen" if options.codegen else "schedule")
        print(f"{' '.join(place)} ({cells[place].seconds} s): {cells[place]}", flush=True)
        save(cells)
    found = [cells[place] for place in wanted if place in cells]
    Console(width=180).print(table_of(found))
    outcomes = Counter(cell.outcome for cell in found)
    report(
        Result("cells asked for", len(wanted), ""),
        *(
            Result(
                f"training steps of narrow models of every new family, by axis and slice, {name}",
                count,
                at_least=len(wanted) - outcomes["refused"] if name == "compiled" else None,
                key=name,
                form=".0f",
                compares="compiler : target",
                sample="none",
            )
            for name, count in sorted(outcomes.items())
        ),
    )
    return int(len(found) < len(wanted) or outcomes["failed"] > 0)


LENGTH, PROMPTS, NEW = 24, (5, 11), 16
BOUND = 1e-5  # of the largest logit, or of 1 where that is less


@dataclass(frozen=True)
class Row:
    """One type.

    Attributes:
        logits: Largest difference, as a share of the largest logit or of 1.
        tokens: Whether greedy tokens are equal; None where theirs are of another model.
        export: Largest difference of what transformers makes of our files; None: not read.
    """

    name: str
    type: str
    logits: float
    tokens: bool | None
    export: float | None

    @property
    def equal(self) -> bool:
        """Whether everything is."""
        read = self.export is not None and self.export <= BOUND
        return self.logits <= BOUND and self.tokens is not False and read

    def __str__(self) -> str:
        said = {True: "equal", False: "DIFFERENT", None: "(*)"}[self.tokens]
        export = "NOT READ" if self.export is None else f"{self.export:.1e}"
        return f"{self.name:<22} {self.type:<20} {self.logits:9.1e}  {said:<10} {export:>9}"


def compare(name: str, folder: Path) -> Row:
    """Make, read, run, generate, write and read again."""
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))
    theirs = make_model(name)
    theirs.save_pretrained(folder / "theirs")
    expected = logits_of(theirs, tokens)
    scale = max(1.0, float(abs(expected).max()))
    read = import_huggingface(folder / "theirs")
    ours = ImportedModel(read.config.replace(dtype="float32"), read.params)
    module = ours.module()
    found = np.asarray(jax.jit(lambda ids: module(ids))(jnp.asarray(tokens)))

    prompts = [row[:length] for row, length in zip(tokens, PROMPTS, strict=True)]
    new = Generator(ours.config, ours.params).generate(
        prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0)
    )
    # With longrope transformers changes frequencies as a sequence grows past the original length.
    changes = "longrope" in json.dumps(ours.config.to_dict())
    same = None
    if not changes:
        same = new.tokens == tuple(greedy_tokens(theirs, prompt, NEW) for prompt in prompts)

    export_huggingface(ours.params, ours.config, folder / "ours")
    back, problems = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "ours", attn_implementation="eager", output_loading_info=True
    )
    again = None
    if not any(problems.values()):
        again = float(abs(logits_of(back.eval(), tokens) - expected).max()) / scale
    return Row(
        name, theirs.config.model_type, float(abs(found - expected).max()) / scale, same, again
    )


def run_equality(options):
    """Every Hugging Face type that is read, against `transformers` itself, on the CPU in float32.

    For tiny random configurations of each type with the same weights: the largest difference of
    logits, whether greedy tokens are equal one by one (ours with its cache, theirs without one
    that could be wrong), and whether `transformers` reads what we write and gives the same.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = [
        name for name in MODELS if all(word.lower() in name.lower() for word in options.words)
    ]
    print(f"{'model':<22} {'type':<20} {'logits':>9}  {'greedy':<10} {'export':>9}")
    rows: list[Row] = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, Path(folder)))
        print(rows[-1], flush=True)
        jax.clear_caches()
    print("(*) longrope: transformers changes frequencies while it generates")
    equal = sum(row.equal for row in rows)
    report(
        Result(
            "tiny configurations equal to transformers in logits, greedy tokens and export",
            (equal, len(rows)),
            at_least=len(rows),
            key="equal",
            form=".0f",
            joint=" of ",
            **HELD_TO_TARGET,
        ),
        Result("types among them", len({row.type for row in rows}), ""),
        Result("largest difference of logits", max(row.logits for row in rows), "", at_most=BOUND),
    )
    return len(rows) - equal


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        compile=run_compile,
        equality=run_equality,
    )
