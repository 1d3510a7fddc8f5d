"""Which files hold arithmetic, and which tests stand for them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """Some files, and the tests that ought to notice when one of them changes.

    Attributes:
        files: Patterns below the repository.
        tests: Files or folders of tests.
        target: The share of changes that must be noticed; None where none is promised.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    target: float | None = None

    def members(self, root: Path) -> list[Path]:
        """The files, relative to the repository."""
        found = {path for pattern in self.files for path in root.glob(pattern)}
        return sorted(path.relative_to(root) for path in found if path.name != "__init__.py")


PACKAGE = "src/tpukit"
ROOMS: dict[str, Room] = {
    "planner": Room(
        (
            f"{PACKAGE}/planner/cost/*.py",
            f"{PACKAGE}/planner/search/objectives.py",
            f"{PACKAGE}/planner/cost/scoring.py",
            f"{PACKAGE}/planner/serving.py",
        ),
        ("tests/planner",),
        0.95,
    ),
    "timeline": Room(
        (
            *(
                f"{PACKAGE}/compiler/timeline/{name}.py"
                for name in ("kernels", "machine", "network", "simulate")
            ),
            f"{PACKAGE}/compiler/bundles/trace.py",
        ),
        (
            "tests/compiler/timeline",
            "tests/compiler/bundles",
            "tests/benchmarks/measured_kernels/test_published_scores.py",
            "tests/planner/test_fitted_rates.py",
            "tests/planner/test_attention_roof.py",
            "tests/planner/test_torus.py",
        ),
        0.95,
    ),
    "prices": Room(
        (
            f"{PACKAGE}/hardware/prices.py",
            f"{PACKAGE}/hardware/utilization.py",
            f"{PACKAGE}/hardware/stored_formats.py",
            f"{PACKAGE}/hardware/topology.py",
        ),
        ("tests/hardware",),
        0.95,
    ),
    "optimizer": Room(
        (f"{PACKAGE}/step/optimizer*.py", f"{PACKAGE}/step/int8_adam.py"),
        (
            "tests/step/test_optimizer.py",
            "tests/step/test_optimizer_states.py",
            "tests/training/test_moments.py",
        ),
        0.95,
    ),
    "data": Room(
        (f"{PACKAGE}/hardware/data/**/*.toml", f"{PACKAGE}/compiler/bundles/data/*.toml"),
        (
            "tests/hardware",
            "tests/benchmarks/test_kernel_rates.py",
            "tests/benchmarks/test_rates_from_rows.py",
            "tests/compiler/bundles",
            "tests/benchmarks/measured_kernels",
            "tests/planner/test_memory_model.py",
        ),
        0.95,
    ),
}
