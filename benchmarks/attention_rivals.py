"""Causal attention without a TPU: our kernel beside those of jax and tokamax at their best blocks.

python benchmarks/attention_rivals.py
"""

import argparse
import ast
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from harness import DATA, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "",
        "causal attention beside jax's and tokamax's kernels at their best blocks",
        options={
            "--chips": {"default": "v5e,v5p,v6e,7x"},
            "--cases": {"help": "separated by commas; all by default"},
            "--directions": {"default": "forward,backward"},
            "--rounds": {"type": int, "help": "steps of the search for their blocks, at most"},
            "--budget": {"type": int, "help": "choices tried around the best, at most"},
            "--grid": {"type": int, "help": "sizes of each grid tried, at most"},
            "--as-kept": {"action": "store_true", "help": "time nothing that is not kept"},
            "--kept": {
                "type": Path,
                "default": DATA / "attention_static.json",
                "help": "file of their times",
            },
        },
    ),
)

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table
from tokamax._src.ops.experimental.tpu.splash_attention import (
    splash_attention_kernel as tokamax_kernel,
)
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as tokamax_mask

import tpukit
from tpukit.errors import TPUError
from tpukit.hardware import get_chip
from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.flash_attention.api import OP
from tpukit.kernels.registry.op import PALLAS_TPU
from tpukit.kernels.timing import calibration_of, estimate_kernel


@dataclass(frozen=True)
class Case:
    """One shape of causal bfloat16 self-attention."""

    tokens: int
    heads: int = 8
    kv_heads: int = 8
    window: int | None = None
    width: int = 128

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads


BASE = "causal_4096"  # the case whose whole grid is timed; others start from its best
CASES = {
    BASE: Case(4096),
    "causal_8192": Case(8192),
    "gqa_32_8_4096": Case(4096, heads=32),
    "window_1024_4096": Case(4096, window=1024),
}


Attention = Callable[[Any, Any, Any], Any]
OURS = "tpukit"


@dataclass(frozen=True)
class Sizes:
    """Blocks of a contender: queries, keys held, keys of one tile, and a switch of tokamax's."""

    q: int
    kv: int
    compute: int
    scheduler: bool = False

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}/{self.compute}{' sched' if self.scheduler else ''}"


# For the pass that is not timed.
ANY = Sizes(512, 512, 512)


@dataclass(frozen=True)
class Family:
    """One implementation.

    Attributes:
        make: `f(case, forward sizes, backward sizes)` -> the function, or None if it cannot.
        grid: Where the search for its blocks begins.
        has_scheduler: Whether `Sizes.scheduler` means something to it.
        square: Whether all its blocks are one size, as its users set them.
    """

    name: str
    make: Callable[[Case, Sizes, Sizes], Attention | None]
    grid: tuple[Sizes, ...]
    has_scheduler: bool = False
    square: bool = False


def ours(case: Case) -> Attention:
    """With the blocks that dispatch takes."""
    return partial(OP.implementations[PALLAS_TPU], causal=True, window=case.window)


def flash_of_jax(case: Case, forward: Sizes, backward: Sizes) -> Attention | None:
    """It has neither windows nor groups: keys of a group are repeated, as its users must."""
    if case.window is not None:
        return None
    sizes = jax_flash.BlockSizes(
        block_q=forward.q,
        block_k_major=forward.kv,
        block_k=forward.compute,
        block_b=1,
        block_q_major_dkv=backward.q,
        block_k_major_dkv=backward.kv,
        block_k_dkv=backward.compute,
        block_q_dkv=backward.q,
        block_k_major_dq=backward.kv,
        block_k_dq=backward.compute,
        block_q_dq=backward.q,
    )

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, case.group, axis=2) for x in (k, v))
        by_head = [x.swapaxes(1, 2) for x in (q, k, v)]
        out = jax_flash.flash_attention(
            *by_head, causal=True, sm_scale=case.width**-0.5, block_sizes=sizes
        )
        return out.swapaxes(1, 2)

    return attend


def splash_of_jax(case: Case, forward: Sizes, backward: Sizes) -> Attention:
    """With its fused backward kernel."""
    masks = jax_splash.MultiHeadMask([_mask(jax_splash, case)] * case.group)
    sizes = jax_splash.BlockSizes(**_splash_sizes(forward, backward), use_fused_bwd_kernel=True)
    kernel = jax_splash.make_splash_mqa_single_device(masks, block_sizes=sizes)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q * case.width**-0.5, k, v))
        grouped = q.reshape(q.shape[0], case.kv_heads, case.group, *q.shape[2:])
        out = jax.vmap(jax.vmap(kernel))(grouped, k, v)
        return out.reshape(q.shape).swapaxes(1, 2)

    return attend


def splash_of_tokamax(case: Case, forward: Sizes, backward: Sizes) -> Attention:
    """Its scheduler switch is one for both passes."""
    config = tokamax_kernel.SplashConfig(
        **_splash_sizes(forward, backward),
        use_experimental_scheduler=forward.scheduler or backward.scheduler,
    )
    # Outside of any trace, so that its tables and its grid are constants.
    mask = _mask(tokamax_mask, case)
    kernel = tokamax_kernel.make_splash_mha(mask, config=config, q_seq_shards=1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        by_head = [x[0].swapaxes(0, 1) for x in (q * case.width**-0.5, k, v)]
        return kernel(*by_head).swapaxes(0, 1)[None]

    return attend


def _mask(library: Any, case: Case) -> Any:
    shape = (case.tokens, case.tokens)
    if case.window is None:
        return library.CausalMask(shape)
    return library.LocalMask(shape, window_size=(case.window - 1, 0), offset=0)


def _splash_sizes(forward: Sizes, backward: Sizes) -> dict[str, int]:
    return {
        "block_q": forward.q,
        "block_kv": forward.kv,
        "block_kv_compute": forward.compute,
        "block_q_dkv": backward.q,
        "block_kv_dkv": backward.kv,
        "block_kv_dkv_compute": backward.compute,
    }


RIVALS = (
    Family(
        "tokamax",
        splash_of_tokamax,
        (
            Sizes(1024, 1024, 512, True),
            Sizes(1024, 1024, 512),
            Sizes(1024, 1024, 1024),
        ),
        has_scheduler=True,
    ),
    Family(
        "jax splash",
        splash_of_jax,
        (Sizes(1024, 1024, 512), Sizes(1024, 1024, 1024), Sizes(2048, 2048, 1024)),
    ),
    Family("jax flash", flash_of_jax, (Sizes(1024, 1024, 1024), Sizes(512, 512, 512)), square=True),
)


KINDS = {"forward": "flash_attention", "backward": "flash_attention_backward"}
PACKAGES = ("jax", "jaxlib", "libtpu", "tokamax")


@dataclass(frozen=True)
class Timing:
    """Static figures of one direction."""

    time_us: float
    kernel_cycles: float


def time_of(attend: Attention, case: Case, chip: str, direction: str) -> Timing | str:
    """Of the result alone; or of the gradient alone, given what the forward pass keeps for it."""
    facts = get_chip(chip)
    kind = jax.sharding.AbstractDevice(facts.device_kinds[0], facts.cores_per_device, "tpu")
    mesh = AbstractMesh((), (), abstract_device=kind)
    flat = [
        jax.ShapeDtypeStruct((1, case.tokens, heads * case.width), jnp.bfloat16)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    ]

    def forward(q: Any, k: Any, v: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return attend(*_heads(case, q, k, v)).reshape(q.shape)

    def kept(q: Any, k: Any, v: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh):
            _, pull = jax.vjp(attend, *_heads(case, q, k, v))
        return [_flat(case, x) for x in jax.tree.leaves(pull) if _is_kept(case, x)]

    def backward(q: Any, k: Any, v: Any, cotangent: Any, residuals: list[Any]) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            # What the forward pass made is given, so that its kernel is nobody's and goes.
            _, pull = jax.vjp(attend, *_heads(case, q, k, v))
            leaves, tree = jax.tree.flatten(pull)
            given = iter(residuals)
            leaves = [next(given).reshape(x.shape) if _is_kept(case, x) else x for x in leaves]
            gradients = jax.tree.unflatten(tree, leaves)(*_heads(case, cotangent))
        return [x.reshape(1, case.tokens, -1) for x in gradients]

    try:
        if direction == "forward":
            found = estimate_kernel(forward, flat, chip, kind=KINDS[direction])
        else:
            with target_chip(chip):
                shapes = jax.eval_shape(kept, *flat)
            arguments = [*flat, flat[0], shapes]
            found = estimate_kernel(backward, arguments, chip, kind=KINDS[direction])
    except TPUError as error:
        return str(error).splitlines()[0][:160]
    if found.time_s is None:
        return found.reason[:160]
    return Timing(found.time_s * 1e6, found.cycles)


def _heads(case: Case, *arrays: Any) -> list[Any]:
    return [x.reshape(1, case.tokens, -1, case.width) for x in arrays]


def _flat(case: Case, x: Any) -> Any:
    """As a projection makes it, if it is one of those arrays; else as the kernel left it."""
    rows = x.ndim == 4 and x.shape[:2] == (1, case.tokens)
    return x.reshape(1, case.tokens, -1) if rows else x


def _is_kept(case: Case, x: Any) -> bool:
    """Whether it is kept for each token; tables of a mask are made again, for their values."""
    traced = isinstance(x, jax.core.Tracer)
    return traced and jnp.issubdtype(x.dtype, jnp.floating) and x.size >= case.tokens


class Kept:
    """Times on disk, each good for the versions, rates and programs it was made with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = (
            json.loads(path.read_text("utf-8")) if path.exists() else {}
        )

    def load(self, label: str, identity: str) -> Timing | str | None:
        """What was stored under a label, if nothing it depends on has changed."""
        entry = self._entries.get(label)
        if entry is None or entry["identity"] != identity:
            return None
        return entry["reason"] if "reason" in entry else _timing(entry)

    def labels(self, start: str, identity: str) -> list[str]:
        """The labels with that start whose entries still hold."""
        return [
            label
            for label, entry in self._entries.items()
            if label.startswith(start) and entry["identity"] == identity
        ]

    def store(self, label: str, identity: str, found: Timing | str) -> None:
        """Keep a time, or why there is none, at once."""
        entry: dict[str, Any] = {"identity": identity, "origin": "model"}
        if isinstance(found, str):
            entry["reason"] = found
        else:
            entry |= {
                "time_us": round(found.time_us, 2),
                "kernel_cycles": round(found.kernel_cycles),
            }
        self._entries[label] = entry
        ordered = {name: self._entries[name] for name in sorted(self._entries)}
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in ordered.items())
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(f"{{\n{lines}\n}}\n", "utf-8")


# A kept time holds as long as none of these changes.
PROGRAMS = (
    *("Sizes", "ANY", "Family", "flash_of_jax", "splash_of_jax", "splash_of_tokamax"),
    *("_mask", "_splash_sizes", "RIVALS"),
)


def identity_of(chip: str, direction: str) -> str:
    """What a time of another's kernel depends on, beside the case and its blocks.

    Not the share of HBM: most times in the file were made when kernels were credited with .88 of
    it. Today's is lower, so that a kept time is the least that their kernel takes, and ours, timed
    by today's rates, is compared with that. v6e's gradients were timed with .95 of it and 50 cycles
    more a turn: three of them timed again took -0.4, +2.9 and +9.5 %.
    """
    rates = asdict(calibration_of(chip, KINDS[direction]))
    del rates["hbm_efficiency"]
    parts = {
        "versions": {name: version(name) for name in PACKAGES},
        "rates": rates,
        "programs": _programs(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _programs() -> str:
    """Return the source of the rivals' programs, without docstrings and comments."""
    tree = ast.parse(Path(__file__).read_text("utf-8"))
    parts = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        if getattr(targets[0], "name", getattr(targets[0], "id", "")) in PROGRAMS:
            parts.append(node)
    for node in (inner for part in parts for inner in ast.walk(part)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return "\n".join(ast.dump(part) for part in parts)


def _timing(entry: Mapping[str, Any]) -> Timing:
    return Timing(entry["time_us"], entry["kernel_cycles"])


LEAST_GAIN = 0.01
NEAR = 1.05  # a kernel further than this behind the fastest begins with its first sizes alone
# Nor does one further than this take part in the steps. Kernels step by turns: the best of one
# moves by up to a tenth before the other has had the same step.
WITHIN_STEPS = 1.15
# Larger tiles of scores than 8 MiB take minutes to compile and spill.
LARGEST_TILE = 2048 * 1024
SMALLEST = 256
SIZES = ("compute", "kv", "q")
Timer = Callable[[Family, Sizes], Timing | str]
Found = dict[tuple[str, Sizes], Timing | str]


class Searched(NamedTuple):
    """Everything that was timed, and whether the search ended because no step gained."""

    found: Found
    to_the_end: bool


def search(
    starts: Mapping[Family, Sequence[Sizes]],
    case: Case,
    timer: Timer,
    *,
    rounds: int | None,
    budget: int | None = None,
) -> Searched:
    """Time the families at where they begin, then around the best.

    Args:
        starts: The families, and where the search of each begins.
        case: Its length bounds the blocks.
        timer: Times one choice, or says why it has no time.
        rounds: Steps around the best at most; None goes on until none gains.
        budget: Choices timed around the best at most; None knows no end.
    """
    found: Found = {}
    begun: int | None = None  # choices timed before the steps began

    def time(family: Family, choices: Iterable[Sizes]) -> None:
        for sizes in choices:
            spent = budget is not None and begun is not None and len(found) - begun >= budget
            if (family.name, sizes) not in found and not spent:
                found[family.name, sizes] = timer(family, sizes)

    for family, choices in starts.items():
        time(family, choices[:1])
    for family in near(starts, found):
        time(family, starts[family][1:])
    step, moving, begun = 0, True, len(found)
    while moving and (rounds is None or step < rounds):
        step, moving = step + 1, False
        for family in near(starts, found, WITHIN_STEPS):
            before = fastest(found, family.name)
            assert before is not None
            time(family, around(family, before[0], case))
            now = fastest(found, family.name)
            moving |= now is not None and now[1] < before[1] * (1 - LEAST_GAIN)
    return Searched(found, is_ended(starts, found, case))


def is_ended(families: Iterable[Family], found: Found, case: Case) -> bool:
    """Whether every kernel that takes part in the steps has a best around which none gains."""
    return all(_is_settled(family, found, case) for family in near(families, found, WITHIN_STEPS))


def _is_settled(family: Family, found: Found, case: Case) -> bool:
    best = fastest(found, family.name)
    return best is not None and any(
        one.time_us * (1 - LEAST_GAIN) <= best[1]
        and all((family.name, other) in found for other in around(family, sizes, case))
        for (name, sizes), one in found.items()
        if name == family.name and isinstance(one, Timing)
    )


def near(families: Iterable[Family], found: Found, most: float = NEAR) -> list[Family]:
    """The families whose best is not more than so many times the fastest of all."""
    best = {family: one for family in families if (one := fastest(found, family.name))}
    leader = min((time_us for _, time_us in best.values()), default=0.0)
    return [family for family, (_, time_us) in best.items() if time_us <= most * leader]


def fastest(found: Found, family: str) -> tuple[Sizes, float] | None:
    """The best sizes of a family, and their microseconds."""
    timed = [
        (sizes, one.time_us)
        for (name, sizes), one in found.items()
        if name == family and isinstance(one, Timing)
    ]
    return min(timed, key=lambda pair: pair[1], default=None)


def around(family: Family, sizes: Sizes, case: Case) -> Iterator[Sizes]:
    """The switch the other way, and sizes half and twice as large, one at a time.

    What gained in cells searched to the end comes first, for a search that is cut short.
    """
    if family.has_scheduler:
        yield dataclasses.replace(sizes, scheduler=not sizes.scheduler)
    together = [SIZES] if family.square else [(name,) for name in SIZES]
    for names, factor in product(together, (0.5, 2.0)):
        step = {name: int(getattr(sizes, name) * factor) for name in names}
        other = dataclasses.replace(sizes, **step)
        if _possible(other, case):
            yield other


def _possible(sizes: Sizes, case: Case) -> bool:
    largest = max(sizes.q, sizes.kv)
    return (
        SMALLEST <= sizes.compute <= sizes.kv
        and sizes.q >= SMALLEST
        and largest <= case.tokens
        and sizes.q * sizes.compute <= LARGEST_TILE
    )


BARS = {"forward": 0.90, "backward": 1.00}


def run_static(options):
    """Compare our kernel with jax's and tokamax's, each at its best blocks.

    Every contender gets queries, keys and values as a projection makes them, (B, S, H * D), and
    gives its result the same way, so scaling and transposes count on all sides. Times are static:
    the real compiler's bundles, followed by `tpukit.kernels.timing`. The backward time is that of
    the gradient alone, given what the forward pass keeps, each as it left it.

    Ours runs with the blocks it ships with. Theirs are searched. At causal_4096 each kernel is
    timed at the first sizes of the grid that `RIVALS` states; those not more
    than 5 % behind the fastest at the rest of it. The other cases begin with the best sizes found
    there, of the kernels that were not more than 5 % behind. Then one size at a time is doubled or
    halved around the best of each kernel not more than 15 % behind, until no step gains 1 %. Times
    are kept in a file, so that a run that was cut short goes on where it stopped; `--grid`,
    `--rounds` and `--budget` bound the search, and the table then says so. `--as-kept` makes the
    table of what is in the file.
    """
    tpukit.configure_tpu_environment()
    # Places in the source are part of a kernel, and would make it another one for the cache.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    console = Console(width=150)
    kept, rows = Kept(options.kept), list[dict[str, Any]]()
    for direction in options.directions.split(","):
        for name in (options.cases or ",".join(CASES)).split(","):
            for chip in options.chips.split(","):
                mine = time_of(ours(CASES[name]), CASES[name], chip, direction)
                theirs = rivals(name, chip, direction, kept, options)
                console.print(table_of(chip, name, direction, mine, theirs.found))
                rows.append(summary(chip, name, direction, mine, theirs))
                best = rows[-1]["best_other_us"]
                if best is not None and rows[-1]["ours_us"] is not None:
                    report(
                        Result(
                            f"µs of {name} {direction} on {chip}, ours over the best of theirs",
                            (rows[-1]["ours_us"], best),
                            key=f"{name}_{chip}_{direction}",
                            form=".0f",
                            joint=" : ",
                            compares="model : model",
                            sample="none",
                        )
                    )
    console.print(summary_table(rows))
    return 0


def rivals(name: str, chip: str, direction: str, kept: Kept, asked: argparse.Namespace) -> Searched:
    """The times of the other kernels, from the file or made now, in the bounds that are asked."""
    bounds = {"rounds": asked.rounds, "budget": asked.budget}
    identity = identity_of(chip, direction)
    if asked.as_kept:
        base, found = (as_kept(f"{chip} {n} {direction}", identity, kept) for n in (BASE, name))
        searched = RIVALS if name == BASE else near(RIVALS, base)
        return Searched(found, is_ended(searched, found, CASES[name]))

    def timer_of(case: str) -> Callable[[Family, Sizes], Timing | str]:
        def timer(family: Family, sizes: Sizes) -> Timing | str:
            label = f"{chip} {case} {direction} {family.name} {sizes}"
            found = kept.load(label, identity)
            if found is None:
                forward, backward = (sizes, ANY) if direction == "forward" else (ANY, sizes)
                attend = family.make(CASES[case], forward, backward)
                found = (
                    "it cannot do this case"
                    if attend is None
                    else time_of(attend, CASES[case], chip, direction)
                )
                kept.store(label, identity, found)
            return found

        return timer

    starts: dict[Family, Sequence[Sizes]] = {family: family.grid[: asked.grid] for family in RIVALS}
    if name != BASE:
        base = search(starts, CASES[BASE], timer_of(BASE), **bounds).found
        best = {family: fastest(base, family.name) for family in near(RIVALS, base)}
        starts = {family: [one[0]] for family, one in best.items() if one is not None}
    return search(starts, CASES[name], timer_of(name), **bounds)


def as_kept(cell: str, identity: str, kept: Kept) -> Found:
    """All times of a cell that are in the file."""
    found: Found = {}
    for family in RIVALS:
        start = f"{cell} {family.name} "
        for label in kept.labels(start, identity):
            numbers, *scheduler = label.removeprefix(start).split()
            sizes = Sizes(*map(int, numbers.split("/")), scheduler=bool(scheduler))
            entry = kept.load(label, identity)
            if entry is not None:
                found[family.name, sizes] = entry
    return found


def summary(
    chip: str, case: str, direction: str, mine: Timing | str, theirs: Searched
) -> dict[str, Any]:
    """Ours, the best of the others, and the ratio the bar is on."""
    best = {family.name: fastest(theirs.found, family.name) for family in RIVALS}
    timed = {name: one for name, one in best.items() if one is not None}
    leader = min(timed, key=lambda name: timed[name][1], default=None)
    ratio = (
        mine.time_us / timed[leader][1] if leader is not None and isinstance(mine, Timing) else None
    )
    return {
        "chip": chip,
        "case": case,
        "direction": direction,
        "origin": "model",
        "ours_us": mine.time_us if isinstance(mine, Timing) else None,
        "best_other": leader,
        "best_other_blocks": None if leader is None else str(timed[leader][0]),
        "best_other_us": None if leader is None else timed[leader][1],
        "ratio": ratio,
        "bar": BARS[direction],
        "their_choices_timed": len(theirs.found),
        "searched_to_the_end": theirs.to_the_end,
    }


def summary_table(rows: list[dict[str, Any]]) -> Table:
    """One line a cell."""
    names = ("chip", "case", "direction", "ours us", "best other us", "who", "ratio", "bar")
    table = Table(*names, "their search")
    for row in rows:
        ours_us, other_us, ratio = (row[key] for key in ("ours_us", "best_other_us", "ratio"))
        extent = "to the end" if row["searched_to_the_end"] else "cut short"
        table.add_row(
            *(row[key] for key in ("chip", "case", "direction")),
            "-" if ours_us is None else f"{ours_us:.1f}",
            "-" if other_us is None else f"{other_us:.1f}",
            f"{row['best_other']} {row['best_other_blocks']}",
            "-" if ratio is None else f"{ratio:.2f}",
            "" if ratio is None else "met" if ratio <= row["bar"] else "MISSED",
            f"{row['their_choices_timed']} timed, {extent}",
        )
    return table


def table_of(chip: str, case: str, direction: str, mine: Timing | str, theirs: Found) -> Table:
    """The contenders from fast to slow."""
    rows = [(OURS, "as shipped", mine)]
    rows += [(family, str(sizes), found) for (family, sizes), found in theirs.items()]
    rows.sort(key=lambda row: row[2].time_us if isinstance(row[2], Timing) else float("inf"))
    title = f"{chip} {case} {direction} (static estimate, origin model)"
    table = Table("contender", "blocks", "total us", "kernel cycles", title=title)
    for family, blocks, found in rows:
        if isinstance(found, Timing):
            table.add_row(family, blocks, f"{found.time_us:.1f}", f"{found.kernel_cycles:,.0f}")
        else:
            table.add_row(family, blocks, "-", found)
    return table


if __name__ == "__main__":
    run_command(COMMAND_LINE, run_static)
