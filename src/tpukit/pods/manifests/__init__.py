"""Kubernetes manifests of pods: made from a job, and checked before they are applied."""

from .documents import Document as Document
from .documents import read_files as read_files
from .documents import to_yaml as to_yaml
from .findings import LintReport as LintReport
from .lint import lint as lint
from .lint import lint_files as lint_files
from .manifest import Manifest as Manifest
from .manifest import build_manifest as build_manifest
from .manifest import queue_documents as queue_documents
from .reading import NodePool as NodePool
from .reading import read_pools as read_pools

__all__ = [
    "Document",
    "LintReport",
    "Manifest",
    "NodePool",
    "build_manifest",
    "lint",
    "lint_files",
    "queue_documents",
    "read_files",
    "read_pools",
    "to_yaml",
]
