"""Prefill and decode of `tpukit.models.generation`, compiled as a published server holds its model.

These are the programs that `generate` runs. Narrow weights are as `check_decoding` compiles them:
those that are multiplied in fp8 with one constant scale, where published servers have one for each
column, and one for each row of activations.
"""

from dataclasses import dataclass
from typing import Any

from tpukit.checker.check import predict
from tpukit.checker.decoding.weights import held_params, stored_params
from tpukit.compiler.aot import run_request
from tpukit.compiler.program.request import as_abstract_mesh, make_request
from tpukit.hardware import Slice
from tpukit.models.generation.cache import CacheSpec
from tpukit.models.generation.decoding import Sampling
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.models.transformer.config import TransformerConfig
from tpukit.planner.cost.serving_model import ServedFormats
from tpukit.runtime.environment import configure_tpu_environment

configure_tpu_environment()  # or jax would look for a TPU, slowly
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
        found, why = predict(compiled, tokens_per_step=1, one_turn=is_loop)
        if found is None:
            raise SystemExit(f"{self.config.name} on {self.on}: {why}")
        return found.step_time_s
