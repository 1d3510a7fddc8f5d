"""The MCP server: tools by name, errors as one sentence, progress as notifications."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from .. import __version__
from ..errors import MissingExtraError, TPUError, in_few_words
from ..plain_data import JsonObject
from ..runtime.progress import Progress
from . import tools
from .access import Access

try:
    import anyio.from_thread
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations
except ModuleNotFoundError as error:
    raise MissingExtraError("mcp", needed_for="tpukit mcp", module=str(error.name)) from error

INSTRUCTIONS = (
    "Ask the real TPU compiler before anybody rents a chip. `plan` ranks slices for a model, "
    "`check` compiles a training step for a slice and says whether it fits and how long it takes, "
    "`kernel` estimates one op on chips that are not here, `slices` and `slice` describe hardware, "
    "`check_flags`, `flags` and `flag` know every XLA and libtpu flag that is installed. Every "
    "figure says its origin: measured, compiler, model, datasheet, third-party or user; one that "
    "is null says why. A check takes seconds to minutes, and tells its progress."
)
"""What a client tells its model of the server."""
Answer = JsonObject
Model = Annotated[str, Field(description="a preset such as llama3.1-8b, or a config.json")]
ModelOrJob = Annotated[
    str, Field(description="a preset such as llama3.1-8b, a config.json, or a job.yaml")
]
On = Annotated[str, Field(description="a slice such as v6e-8 or 2xv6e-256")]
Chips = Annotated[str, Field(description="generations such as v6e or v5e,v5p,v6e,7x")]
Settings = Annotated[
    JsonObject,
    Field(description='keys of the job: {"batch_size": 24, "remat": "full", "mesh": "fsdp=8"}'),
]


def make_server(access: Access | None = None) -> MCPServer[Any]:
    """Return a server that has not started.

    Args:
        access: Permissions of clients; by default reading and compiling.
    """
    allowed = access or Access()
    server: MCPServer[Any] = MCPServer(
        "tpukit", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    @server.tool(annotations=reads)
    def plan(
        model: Model,
        tokens: Annotated[str, Field(description="to train on: 15e12 or 15T")],
        context: Context[Any],
        deadline: Annotated[str | None, Field(description="30d, 12h or 2w")] = None,
        budget: Annotated[str | None, Field(description="dollars: 50000 or 50k")] = None,
        objective: Annotated[
            str | None, Field(description="cheapest, fastest or fewest-chips")
        ] = None,
        on: Annotated[
            str | None, Field(description="generations or slices: v6e,v5p or v6e-64")
        ] = None,
        spot: bool = False,
        max_chips: int | None = None,
        sequence_length: int | None = None,
        top: int = 5,
        verify: Annotated[
            int, Field(description="choices that the compiler checks; each takes a minute")
        ] = 0,
    ) -> Answer:
        """Rank slices, meshes and batches for a training run by money and days."""
        with in_one_sentence():
            return tools.plan(
                *(allowed, model, tokens),
                deadline=deadline,
                budget=budget,
                objective=objective,
                on=on,
                spot=spot,
                max_chips=max_chips,
                sequence_length=sequence_length,
                top=top,
                verify=verify,
                progress=telling(context),
            )

    @server.tool(annotations=reads)
    def check(
        model: ModelOrJob,
        context: Context[Any],
        on: On | None = None,
        settings: Settings | None = None,
        memory_only: Annotated[bool, Field(description="stop at the verdict on memory")] = False,
        fix: Annotated[bool, Field(description="prove fixes, each by a compile: minutes")] = False,
        whole: Annotated[
            bool, Field(description="also every op and live memory over time: 100 kB and more")
        ] = False,
    ) -> Answer:
        """Compile a training step with the TPU compiler: does it fit, how long is a step."""
        with in_one_sentence():
            return tools.check(
                *(allowed, model),
                on=on,
                settings=settings,
                memory_only=memory_only,
                fix=fix,
                whole=whole,
                progress=telling(context),
            )

    @server.tool(annotations=reads)
    def kernels() -> Answer:
        """List ops with their cases and implementations, for `kernel`."""
        with in_one_sentence():
            return tools.kernels()

    @server.tool(annotations=reads)
    def kernel(
        op: Annotated[str, Field(description="as `kernels` names it")],
        on: Chips,
        context: Context[Any],
        case: Annotated[str | None, Field(description="one of its cases; the first")] = None,
        backward: bool = False,
    ) -> Answer:
        """Estimate an op's time on chips that are not here: cycles, bound, against XLA."""
        with in_one_sentence():
            return tools.kernel(op, on, case=case, backward=backward, progress=telling(context))

    @server.tool(annotations=reads)
    def slices(
        generation: Annotated[str | None, Field(description="v2 … v6e, 7x; all")] = None,
    ) -> Answer:
        """List TPU generations, or the slices of one with size, peak, memory and price."""
        with in_one_sentence():
            return tools.slices(generation)

    @server.tool(name="slice", annotations=reads)
    def slice_info(name: On) -> Answer:
        """Describe one slice, each figure with its source."""
        with in_one_sentence():
            return tools.slice_info(name)

    @server.tool(annotations=reads)
    def check_flags(
        flags: Annotated[str, Field(description="--xla_tpu_rwb_fusion=false …")],
    ) -> Answer:
        """Return which XLA and libtpu flags would stop a job, with the nearest names."""
        with in_one_sentence():
            return tools.check_flags(flags)

    @server.tool(annotations=reads)
    def flags(
        pattern: Annotated[str, Field(description="part of a name, as plain text")],
    ) -> Answer:
        """Find flags of the installed libtpu and jaxlib by name."""
        with in_one_sentence():
            return tools.flags(pattern)

    @server.tool(annotations=reads)
    def flag(name: str) -> Answer:
        """Return a flag's type, default, variable and effect."""
        with in_one_sentence():
            return tools.flag(name)

    if allowed.folder is not None:

        @server.tool(
            annotations=ToolAnnotations(
                read_only_hint=False, destructive_hint=False, open_world_hint=False
            )
        )
        def write_job(
            name: Annotated[str, Field(description="a file name that ends in .yaml")],
            job: Annotated[Answer, Field(description="the job of a choice of `plan`, or yours")],
        ) -> Answer:
            """Write a job file into the folder that the server may write to."""
            with in_one_sentence():
                return tools.write_job(allowed, name, job)

    return server


@contextmanager
def in_one_sentence() -> Generator[None]:
    """Report a user's error to the client as one sentence."""
    try:
        yield
    except TPUError as error:
        raise ToolError(in_few_words(error)) from error
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        raise ToolError(f"{error.filename}: {error.strerror}.") from error


def telling(context: Context[Any]) -> Progress:
    """Return a callback that sends progress to the client from the thread of a tool."""
    told = 0

    def tell(line: str) -> None:
        nonlocal told
        told += 1
        anyio.from_thread.run(context.report_progress, float(told), None, line)

    return tell
