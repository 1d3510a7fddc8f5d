"""The child that asks libtpu's SDK: `python -m tpukit.observe.sources.libtpu_sdk_child`."""

from typing import Any

from ...runtime.child import serve_request


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of text that the SDK has of each metric, or its error."""
    from libtpu.sdk import tpumonitoring  # pyright: ignore[reportMissingImports]  an extra

    said: dict[str, Any] = {}
    for name in request["metrics"]:
        try:
            said[name] = {"rows": [str(row) for row in tpumonitoring.get_metric(name).data()]}
        except RuntimeError as error:
            said[name] = {"error": str(error)}
    return said


if __name__ == "__main__":
    serve_request(answer)
