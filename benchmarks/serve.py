"""Serving throughput by the planner and by compiled programs, beside published measurements.

python benchmarks/serve.py
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from harness import DATA, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "",
        "",
        options={
            "--only": {"help": "rows whose id contains this"},
            "--no-compile": {"action": "store_true", "help": "arithmetic alone"},
            "--fit": {"action": "store_true", "help": "fit the share of HBM anew"},
        },
    ),
)

import numpy as np

from tpukit.checker.check import predict as predict_request
from tpukit.checker.decoding.weights import held_params, stored_params
from tpukit.compiler.aot import run_request
from tpukit.compiler.program.request import as_abstract_mesh, make_request
from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.models.generation.cache import CacheSpec
from tpukit.models.generation.decoding import Sampling
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.models.transformer.config import TransformerConfig
from tpukit.planner.cost.serving_model import ServedFormats, ServedModel, Server, ServingTraffic
from tpukit.runtime.environment import configure_tpu_environment


@dataclass(frozen=True, kw_only=True)
class ClientRun:
    """What a client measures.

    Attributes:
        tokens_per_s: New tokens over the time of the whole run.
        token_s: Time per output token after the first, in the mean over requests.
    """

    tokens_per_s: float
    token_s: float


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What a client sends.

    Attributes:
        count: Of requests.
        prompt: The longest prompt.
        new: The longest answer.
        shortest: The shortest of both over the longest; lengths between are as likely.
    """

    count: int
    prompt: int
    new: int
    shortest: float = 1.0

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and answer, the same in every run."""
        random = np.random.default_rng(0)
        sides = (
            random.integers(max(1, int(longest * self.shortest)), longest + 1, self.count)
            for longest in (self.prompt, self.new)
        )
        return [(int(prompt), int(new)) for prompt, new in zip(*sides, strict=True)]


@dataclass
class _Sequence:
    left: int
    new: int
    began_s: float


def run_client(
    requests: Requests,
    *,
    at_once: int,
    step_s: Callable[[int], float],
    prompt_s: Callable[[int], float],
) -> ClientRun:
    """Send all requests, `at_once` at a time.

    Args:
        requests: What is sent.
        at_once: Sequences that the server works on.
        step_s: Seconds of a step, by the number of sequences.
        prompt_s: Seconds of a prompt, by its tokens; no sequence goes on meanwhile.
    """
    waiting = deque(requests.lengths())
    total = sum(new for _, new in waiting)
    active: list[_Sequence] = []
    now, tokens_s = 0.0, []
    while waiting or active:
        while waiting and len(active) < at_once:
            prompt, new = waiting.popleft()
            now += prompt_s(prompt)  # gives the first token as well
            active.append(_Sequence(new - 1, new, now))
        steps = min(one.left for one in active)
        now += steps * step_s(len(active))
        for one in active:
            one.left -= steps
            if not one.left and one.new > 1:
                tokens_s.append((now - one.began_s) / (one.new - 1))
        active = [one for one in active if one.left]
    return ClientRun(tokens_per_s=total / now, token_s=float(np.mean(tokens_s)))


GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class PublishedPrograms:
    """The programs of one server.

    Attributes:
        config: Of the model.
        on: Its slice.
        tensor: Devices of a replica, all that there are.
    """

    config: TransformerConfig
    on: Slice
    tensor: int
    formats: ServedFormats

    @property
    def programs(self) -> DecodingPrograms:
        matmul = "float8_static" if self.formats.multiplied(self.on) == "fp8" else "dtype"
        config = self.config.replace(
            param_dtype="bfloat16", dtype="bfloat16", mtp_layers=0, matmul=matmul
        )
        mesh = as_abstract_mesh({"tensor": self.tensor}, self.on)
        return DecodingPrograms(config, mesh, kv=CacheSpec.of(self.formats.cache))

    def decode_s(self, *, rows: int, slots: int) -> float:
        """One more token for every row, whose caches have so many slots."""
        programs = self.programs
        arguments = programs.decode_arguments(rows=rows, slots=slots)
        run = programs.decode(sampling=GREEDY)
        return self._seconds(programs, run, arguments, is_loop=True)

    def prefill_s(self, *, tokens: int) -> float:
        """One prompt of so many tokens."""
        programs = self.programs
        run = programs.prefill(sampling=GREEDY, slots=tokens)
        return self._seconds(programs, run, programs.prefill_arguments(rows=1, prompt=tokens))

    def _seconds(
        self, programs: DecodingPrograms, run: Any, rest: tuple[Any, ...], *, is_loop: bool = False
    ) -> float:
        params = programs.abstract_params()
        if self.formats.multiplied(self.on) == "fp8":
            params = held_params(programs)
        elif self.formats.weights != "bf16":
            params = stored_params(programs, self.formats.weights)

        def program(state: dict[str, Any], *arguments: Any) -> Any:
            return run(state["params"], *arguments)

        donated = (1,) if is_loop else ()
        request = make_request(program, self.on, {"params": params}, *rest, donate_argnums=donated)
        compiled = run_request(request, until="schedule", timeout_s=1800)
        found, why = predict_request(compiled, tokens_per_step=1, one_turn=is_loop)
        if found is None:
            raise SystemExit(f"{self.config.name} on {self.on}: {why}")
        return found.step_time_s


ROWS = DATA / "published_serving.json"
BAR = 0.20
WAVES = 4  # requests of a client that says only how many it sends at once, over those


@dataclass(frozen=True)
class PublishedServer:
    """One row: a server, and what a client measured of it."""

    row: dict[str, Any]

    @property
    def slice(self) -> Slice:
        return Slice.parse(self.row["slice"])

    @property
    def requests(self) -> Requests:
        row = self.row
        count = row.get("requests", WAVES * row["concurrency"])
        lengths = (row["prompt_tokens"], row["new_tokens"], row.get("shortest", 1.0))
        return Requests(count=count, prompt=lengths[0], new=lengths[1], shortest=lengths[2])

    @property
    def traffic(self) -> ServingTraffic:
        """Mean lengths, and as many requests as the server works on at once."""
        lengths = self.requests.lengths()
        prompt, new = (round(statistics.mean(side)) for side in zip(*lengths, strict=True))
        asked = ServingTraffic(batch=1, prompt=prompt, new=new)
        most = min(self.row["concurrency"], self.row.get("most_sequences", math.inf))
        return replace(asked, batch=int(min(most, self._room(asked))))

    def _room(self, asked: ServingTraffic) -> float:
        """Sequences of the mean length that its share of HBM has room for: pages are shared."""
        chip = self.slice.chip
        usable = chip.per_device(chip.hbm_usable_bytes).require("serving") * self.slice.devices
        free = usable * self.row.get("hbm_share", 0.9) - self.model.weight_bytes(
            self.formats.weights
        )
        return free // self.model.cache_bytes(asked.mean_context, self.formats.cache)

    @property
    def model(self) -> ServedModel:
        return ServedModel.of(get_preset(self.row["model"]))

    @property
    def formats(self) -> ServedFormats:
        names = ("weights", "cache", "activations")
        return ServedFormats(**{name: self.row[name] for name in names if name in self.row})

    @property
    def server(self) -> Server:
        return Server(self.model, self.slice, self.traffic, self.row["tensor"], self.formats)

    @property
    def tokens_per_s(self) -> float:
        """As published, of the whole slice."""
        return self.row["tokens_per_s_per_chip"] * self.slice.chips


@dataclass(frozen=True)
class Times:
    """What a server takes.

    Attributes:
        step_s: Of a step with as many sequences as it works on.
        prompt_token_s: Of one token of a prompt.
    """

    step_s: float
    prompt_token_s: float


def by_arithmetic(run: PublishedServer) -> Times:
    """Times of the serving model."""
    server = run.server
    return Times(server.decode().seconds, server.prefill().seconds / run.traffic.prompt)


def by_compiler(run: PublishedServer) -> Times:
    """Times of compiled programs."""
    traffic = run.traffic
    config = get_preset(run.row["model"])
    programs = PublishedPrograms(config, run.slice, run.row["tensor"], run.formats)
    below = 2 ** int(math.log2(traffic.mean_context))
    beyond = traffic.mean_context / below - 1
    few, many = (programs.decode_s(rows=traffic.batch, slots=n) for n in (below, 2 * below))
    prompt = 2 ** math.ceil(math.log2(traffic.prompt))
    step = few + (many - few) * beyond
    return Times(step, programs.prefill_s(tokens=prompt) / prompt)


def predict(run: PublishedServer, times: Times) -> ClientRun:
    """What the client would measure of the server."""
    server, traffic = run.server, run.traffic
    full = server.decode().seconds

    @cache
    def step_s(sequences: int) -> float:
        fewer = replace(server, traffic=replace(traffic, batch=sequences))
        return times.step_s * fewer.decode().seconds / full

    return run_client(
        run.requests,
        at_once=traffic.batch,
        step_s=step_s,
        prompt_s=lambda tokens: times.prompt_token_s * tokens,
    )


def off(run: PublishedServer, times: Times | None = None) -> float:
    """Predicted tokens a second over published ones, less 1; by arithmetic without times."""
    return predict(run, times or by_arithmetic(run)).tokens_per_s / run.tokens_per_s - 1


def line(run: PublishedServer, times: Times) -> str:
    found, chips = predict(run, times), run.slice.chips
    token = run.row.get("token_ms")
    beside = "" if token is None else f", {token} published"
    return (
        f"{run.row['id']:<34} {run.traffic.batch:4d} at once "
        f"{run.row['tokens_per_s_per_chip']:8,.1f} published "
        f"{found.tokens_per_s / chips:8,.1f} tokens/s/chip {100 * off(run, times):+6.1f} %  "
        f"{1e3 * found.token_s:.1f} ms a token{beside}"
    )


def load(only: str | None = None) -> list[PublishedServer]:
    rows = json.loads(ROWS.read_text("utf-8"))["rows"]
    return [PublishedServer(row) for row in rows if not only or only in row["id"]]


def fit(rows: list[PublishedServer]) -> float:
    """The share of the HBM rate by which the rows to fit on are right in the geometric mean."""
    from tpukit.hardware import rates

    fitted = [run for run in rows if run.row.get("fitted")]
    low, high = 0.1, 1.0
    whole = rates.rates_file()
    for _ in range(20):
        share = math.sqrt(low * high)
        entry = {"default": {"value": share, "source": "serving"}, "unit": "", "what": ""}
        rates.rates_file = lambda entry=entry: {**whole, "serving": {"cache_share": entry}}
        rates._load.cache_clear()  # pyright: ignore[reportPrivateUsage]
        error = statistics.mean(math.log(1 + off(run)) for run in fitted)
        low, high = (low, share) if error > 0 else (share, high)
    return math.sqrt(low * high)


def run_published(options):
    """The serving model on published throughput of servers.

    Every row of data/published_serving.json is served by its own slice, split, formats and limits,
    to a client that sends what was sent: so many requests of such lengths, so many at once. One
    constant, the share of the HBM rate that attention over a paged cache reaches
    (`serving.cache_share` in rates.toml), was fitted: on the four rows of sglang-jax with Qwen3-8B
    and on no other (`--fit` does it again). All rows were in view when it was decided what is
    counted.

    The rows that a target is stated for are predicted by compiled programs too: prefill and decode
    of `tpukit.models.generation` (see `PublishedPrograms`) by their timelines. These read every
    slot of a cache, which is a power of two, so that decode is compiled for the two around the
    mean length and taken between them; with fewer sequences at the end of a run a step shrinks as
    by arithmetic.
    """
    configure_tpu_environment()  # or jax looks for a TPU, slowly
    rows = load(options.only)
    if options.fit:
        print(f"serving.cache_share = {fit(rows):.3f}")
        return
    for run in rows:
        print(line(run, by_arithmetic(run)), flush=True)
    named = [run for run in rows if run.row.get("field")]
    today = [run for run in rows if run.row["engine"] != "vllm-2025-09"]
    unseen = [abs(off(run)) for run in today if not run.row.get("fitted")]
    compiled: list[float] = []
    for run in [] if options.no_compile else named:
        times = by_compiler(run)
        steps = f"decode {1e3 * times.step_s:.2f} ms, prompts {1e6 * times.prompt_token_s:.1f} us"
        print(f"compiled: {line(run, times)} ({steps} a token)", flush=True)
        compiled.append(abs(off(run, times)))
        report(
            Result(
                f"time of one token of {run.row['id']} by the compiled decode step",
                1e3 * times.step_s,
                "ms",
                key=f"decode_{run.row['id']}",
                form=".1f",
                compares="model : model",
                sample="none",
            )
        )
    if named:
        largest = 100 * max(abs(off(run)) for run in named)
        report(
            Result(
                "serving by arithmetic on the rows a target is stated for, largest error",
                largest,
                "%",
                at_most=20,
                key="arithmetic_largest",
                form=".1f",
                compares="model : published",
                sample="in",
            )
        )
    if compiled:
        largest = 100 * max(compiled)
        report(
            Result(
                "serving by compiled prefill and decode on the same rows, largest error",
                largest,
                "%",
                at_most=20,
                key="compiled_largest",
                form=".1f",
                compares="model : published",
                sample="none",
            )
        )
    if unseen:
        report(
            Result("rows not fitted on, median error", 100 * statistics.median(unseen), "%"),
            Result("rows not fitted on, largest error", 100 * max(unseen), "%"),
            Result(
                "serving by arithmetic on rows that nothing was fitted on, within 20 %",
                (sum(error <= BAR for error in unseen), len(unseen)),
                key="within_20_percent",
                form=".0f",
                joint=" of ",
                compares="model : published",
                sample="in",
            ),
        )


if __name__ == "__main__":
    run_command(COMMAND_LINE, run_published)
