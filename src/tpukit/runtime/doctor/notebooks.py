"""Checks of hosted notebooks: Google Colab and Kaggle, which lend TPUs and keep no files."""

from collections.abc import Iterator
from dataclasses import dataclass

from .finding import Check, DoctorFinding, Site


@dataclass(frozen=True)
class Notebook:
    """A service that runs notebooks.

    Attributes:
        name: What people call it.
        variables: Any of them in the environment means that this is it.
        choose_tpu: Where a TPU is chosen.
        lost: Which files are gone when the session ends, and what to do about it.
    """

    name: str
    variables: tuple[str, ...]
    choose_tpu: str
    lost: str


NOTEBOOKS = (
    Notebook(
        name="Google Colab",
        variables=("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION", "COLAB_GPU"),
        choose_tpu="Runtime > Change runtime type > a TPU; it starts a new machine.",
        lost="/content is gone when the runtime ends: keep checkpoints in a bucket (gs://…) or on "
        "a mounted Drive",
    ),
    Notebook(
        name="Kaggle",
        variables=("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"),
        choose_tpu="Settings > Accelerator > a TPU; it starts a new machine.",
        lost="only /kaggle/working is kept, and only when the version is saved: write checkpoints "
        "there or to a bucket (gs://…)",
    ),
)


def check_notebook(site: Site) -> Iterator[DoctorFinding]:
    """Say which hosted notebook this is, how it gets a TPU, and what it forgets."""
    for notebook in NOTEBOOKS:
        told = next((name for name in notebook.variables if name in site.environment), None)
        if told is None:
            continue
        seen = f"this is {notebook.name} ({told} is set); {notebook.lost}"
        fix = None if site.here.kind == "tpu" else notebook.choose_tpu
        yield DoctorFinding("notebook", "environment", "info", seen, fix)


CHECKS: tuple[Check, ...] = (check_notebook,)
