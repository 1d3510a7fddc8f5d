"""What a job is made of on the command line, the same words for every command that takes one."""

from typing import Annotated

import typer

Target = Annotated[str, typer.Argument(help="A preset, a job.yaml, or module:function with --arg.")]
On = Annotated[str | None, typer.Option(help="Slice, e.g. v6e-8 or 2xv6e-256.")]
Batch = Annotated[int | None, typer.Option(help="Examples in a step, all devices.")]
Sequence = Annotated[int | None, typer.Option(help="Tokens in an example.")]
Mesh = Annotated[str | None, typer.Option(help="fsdp=8,tensor=4; -1 for the rest.")]
Strategy = Annotated[str | None, typer.Option(help="fsdp, fsdp+megatron, …")]
Remat = Annotated[str | None, typer.Option(help="none, minimal, full, offload=…")]
Optimizer = Annotated[str | None, typer.Option(help="adamw, 'adamw mu=bfloat16', …")]
Microbatches = Annotated[int | None, typer.Option(help="Pieces a step is cut into.")]
Attention = Annotated[str | None, typer.Option(help="Attention of the model.")]
Arg = Annotated[list[str] | None, typer.Option(help="Of a function: bf16[8,128]; repeat.")]
Donate = Annotated[list[int] | None, typer.Option(help="Arguments that may be reused.")]
Flags = Annotated[str, typer.Option(help="Compiler options: '--xla_tpu_...=true ...'.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compile again, keep nothing.")]
Timeout = Annotated[float, typer.Option(help="Seconds until a compile is killed.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
