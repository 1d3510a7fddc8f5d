"""`tpukit compile`: one function through the real TPU compiler, for a slice nobody rented."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.ranges import SECONDS
from . import job_options as options
from .values import output_file, within


def compile_function(
    function: Annotated[str, typer.Argument(help="module:function or path/to/file.py:function.")],
    on: Annotated[str, typer.Option(help="Slice to compile for, e.g. v6e-8 or v5p:4x4x4.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(help="An argument, e.g. bf16[8,128]; repeat."),
    ] = None,
    donate: options.Donate = None,
    flags: options.Flags = "",
    hlo: Annotated[
        Path | None,
        typer.Option(help="Write the scheduled HLO text here.", callback=output_file),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Save the program here, for load_executable on the slice.", callback=output_file
        ),
    ] = None,
    until: Annotated[
        str, typer.Option(help="memory, schedule (seconds) or codegen (minutes, FLOPs).")
    ] = "codegen",
    timeout: Annotated[
        float, typer.Option(help="Seconds until it is killed.", callback=within(SECONDS))
    ] = 1800,
    json: options.Json = False,
) -> None:
    """Compile a function for one device of a slice with the real TPU compiler; no TPU needed."""
    from ..compiler import make_request, save_executable
    from ..compiler.aot import run_request
    from ..compiler.compiled import parse_until
    from ..compiler.program.entry import load_function, parse_argument
    from ..errors import ConfigError
    from ..hardware import Slice
    from ..runtime.environment import configure_tpu_environment
    from ..runtime.files import write_output
    from ..runtime.flags import as_compiler_options, parse_flags
    from .output import show, working

    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    target, stage = Slice.parse(on), parse_until(until)
    if save is not None and (stage != "codegen" or hlo is not None):
        raise ConfigError("--save needs the whole compile: leave out --until and --hlo.")
    arguments = [parse_argument(text) for text in arg or ()]
    compiler_options = as_compiler_options(parse_flags(flags)) if flags else {}
    loaded = load_function(function)
    with working(f"compiling {function} for {target} with the TPU compiler"):
        request = make_request(
            loaded, target, *arguments, donate_argnums=donate or (), options=compiler_options
        )
        if save is not None:
            header = save_executable(request, save, timeout_s=timeout)
            show(header, json=json)
            return
        compiled = run_request(request, until=stage, timeout_s=timeout)
    if hlo is not None:
        write_output(hlo, compiled.hlo)
    show(compiled, json=json)
