"""cuBLAS's algorithms for a step's products, chosen under load, once for a model and a chip.

XLA runs each of cuBLAS's algorithms once, on a chip that idles, and takes the shortest run; what it
takes differs from start to start, by up to 8 % of a product. In a step the chip is at its power
limit. Here they alternate there, in a process of its own, and XLA is given the outcome.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ...runtime.child import ChildError, run_child
from ...runtime.files import cache_folder, private_folder, temporary_folder, write_json
from ...runtime.progress import Progress
from .product import SUFFIX, Product, products_in

SMALLEST_SHARE = 0.01  # of all products' work: less is not worth timing
TIMEOUT_S = 600.0
SECONDS_EACH = 4  # about, on an H200


def tuned_options(text: str, *, progress: Progress) -> dict[str, Any]:
    """Compiler options that make XLA take the algorithms that are fastest under load.

    Args:
        text: Of the step, compiled without them.
        progress: Told what takes a while, and what came of it.

    Returns:
        None of them where XLA's own choice stands.
    """
    tuner = ProductTuner(text)
    if tuner.announcement is not None:
        progress(tuner.announcement)
    outcome = tuner.tune()
    progress(outcome.note)
    return outcome.options


@dataclass(frozen=True, kw_only=True)
class TunedProducts:
    """What came of it.

    Attributes:
        options: For the compiler; empty where XLA's own choice stands.
        note: What to tell the user.
    """

    options: dict[str, Any]
    note: str


class ProductTuner:
    """Times the products of one step, or finds that this was done before.

    Attributes:
        products: Those worth timing.
        kept: XLA's results for them, once they are timed.
    """

    def __init__(self, text: str, *, folder: Path | None = None) -> None:
        """Read the products from a compiled step's text."""
        found = products_in(text)
        total = sum(product.flops * count for product, count in found.items())
        self.products: list[Product] = [
            product
            for product, count in found.most_common()
            if product.flops * count >= SMALLEST_SHARE * total
        ]
        about = json.dumps(
            [
                jax.__version__,
                jax.devices()[0].device_kind,
                sorted(json.dumps(product.to_dict()) for product in self.products),
            ]
        )
        name = hashlib.sha256(about.encode()).hexdigest()[:24]
        self.kept = (folder or cache_folder("products")) / f"{name}{SUFFIX}"

    @property
    def announcement(self) -> str | None:
        """What is about to take a while; None where nothing is."""
        if not self.products or self.kept.is_file():
            return None
        return (
            f"timing {len(self.products)} matrix products under load, about "
            f"{SECONDS_EACH * len(self.products)} s, kept for the next run"
        )

    def tune(self) -> TunedProducts:
        """Options that make XLA take the algorithms that are fastest under load."""
        if not self.products:
            return TunedProducts(options={}, note="there are no products of cuBLAS's to time")
        report = self.kept.with_suffix(".json")
        if not self.kept.is_file():
            failure = self._time(report)
            if failure is not None:
                note = f"products could not be timed, so XLA's choice stands: {failure}"
                return TunedProducts(options={}, note=note)
        found = json.loads(report.read_text())
        other = sum(one["usual"] != one["best"] for one in found)
        return TunedProducts(
            options={"xla_gpu_load_autotune_results_from": str(self.kept)},
            note=f"{len(found)} matrix products timed under load; for {other} another algorithm "
            "than XLA's first choice is faster",
        )

    def _time(self, report: Path) -> str | None:
        """Run the timing program; why there is nothing to keep where it fails."""
        private_folder(self.kept.parent)
        # This process holds most of the memory already; the other one takes what it needs.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with temporary_folder(inside=self.kept.parent) as folder:
            results = folder / f"made{SUFFIX}"
            request = {
                "products": [product.to_dict() for product in self.products],
                "results": str(results),
            }
            try:
                found = run_child(
                    f"{__package__}.timing", request, timeout_s=TIMEOUT_S, environment=environment
                )["report"]
            except ChildError as error:
                return str(error)
            if not found:
                return "alone, they compile to something else"
            write_json(report, found)
            results.replace(self.kept)  # last: where it is, all is
        return None
