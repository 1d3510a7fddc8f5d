"""The Grafana dashboard that goes with the Prometheus exporter."""

import json
from importlib import resources
from pathlib import Path
from typing import Any


def load_dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    file = resources.files(__package__ or "") / "data" / "grafana.json"
    return json.loads(file.read_text(encoding="utf-8"))


def write_dashboard(path: str | Path) -> Path:
    """Write the dashboard to a file, for Grafana's import or its provisioning folder."""
    target = Path(path)
    target.write_text(json.dumps(load_dashboard(), indent=1) + "\n", encoding="utf-8")
    return target
