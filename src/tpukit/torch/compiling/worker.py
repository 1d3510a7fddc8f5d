"""The child that compiles a forward into jax's cache on disk, and that a time-out kills.

Started as `python -m tpukit.torch.compiling.worker`; never imported by the parent.
"""

from pathlib import Path
from typing import Any

from ...runtime.child import serve_request


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one program; what is left of it is the entry in the cache."""
    from .building import lower_exported

    lowered = lower_exported(Path(request["program"]).read_bytes())
    Path(request["begun"]).touch()  # only the compile itself counts against the time-out
    lowered.compile(compiler_options=request["options"])
    return {}


if __name__ == "__main__":
    serve_request(compile_request)
