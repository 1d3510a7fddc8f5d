"""Checks manifests before they are applied, ours and anyone's, with no cluster.

```python
report = lint_files("job.yaml", "queues.yaml")
rich.print(report)
```
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .checks.fields import check_fields, check_names
from .checks.queues import check_placement, check_queues
from .checks.restarts import check_restarts
from .checks.slices import check_slices
from .checks.super_slices import check_super_slices
from .documents import read_files
from .findings import LintReport
from .pools import NodePool

# A check takes all documents and gives findings. To add one: write it in the file of its topic.
CHECKS = (
    check_fields,
    check_names,
    check_slices,
    check_super_slices,
    check_restarts,
    check_queues,
)


def lint(
    documents: Sequence[Mapping[str, Any]], *, pools: Sequence[NodePool] | None = None
) -> LintReport:
    """Return what would be refused, never admitted, never placed, or lost at the first failure.

    Args:
        documents: JobSets and Kueue's objects together: a queue is checked where it is among them.
        pools: The cluster's node pools; None: not known, and placement is not checked.
    """
    findings = [one for check in CHECKS for one in check(documents)]
    if pools is not None:
        findings += check_placement(documents, pools)
    return LintReport.of(findings)


def lint_files(
    *paths: str | os.PathLike[str], pools: Sequence[NodePool] | None = None
) -> LintReport:
    """Check the manifests in files and folders.

    Raises:
        ConfigError: A file cannot be read, or is no manifest.
    """
    return lint(read_files(*(Path(path) for path in paths)), pools=pools)
