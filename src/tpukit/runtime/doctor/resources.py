"""Checks of memory, disk and network mode, without opening a connection."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..files import cache_folder
from .finding import Check, DoctorFinding, Site

GIB = 1024**3
# A trivial compile for v6e-4 peaked at 0.38 GiB resident (measured, jax 0.10.2, libtpu 0.0.42.1);
# below twice that even the smallest check may be killed.
LEAST_MEMORY_BYTES = 0.8 * GIB
LEAST_DISK_BYTES = 1 * GIB  # libtpu alone takes 0.6 GB, and one compile dump can take more
LARGE_LOGS_BYTES = 1 * GIB
LIBTPU_LOGS = "tmp/tpu_logs"
CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(site: Site) -> Iterator[DoctorFinding]:
    """Check that there is enough memory to compile."""
    memory = psutil.virtual_memory()
    limit = _container_limit(site)
    available = memory.available if limit is None else min(memory.available, limit)
    seen = f"{available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free (measured)"
    if limit is not None and limit < memory.total:
        seen += f", and the container may use {limit / GIB:.1f} GiB"
    if available < LEAST_MEMORY_BYTES:
        fix = "End other programs, or use a machine with more memory: the compiler gets killed."
        yield DoctorFinding("memory", "resources", "warning", seen, fix)
    else:
        yield DoctorFinding("memory", "resources", "ok", seen)


def check_disk(_: Site) -> Iterator[DoctorFinding]:
    """Check that the cache is writable and has space."""
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    seen = f"cache in {folder}, {free / GIB:.1f} GiB free (measured)"
    if not os.access(existing, os.W_OK | os.X_OK):
        yield DoctorFinding(
            "disk",
            "resources",
            "error",
            f"{seen}, and this user may not write there",
            "Set TPUKIT_CACHE_DIR to a folder of your own.",
        )
    elif free < LEAST_DISK_BYTES:
        fix = "Free some space, or set TPUKIT_CACHE_DIR to another disk."
        yield DoctorFinding("disk", "resources", "warning", seen, fix)
    else:
        yield DoctorFinding("disk", "resources", "ok", seen)


def check_libtpu_logs(site: Site) -> Iterator[DoctorFinding]:
    """Check that libtpu's logs have not filled the disk and are writable for this user."""
    folder = site.root / LIBTPU_LOGS
    if not folder.is_dir():
        return
    size = sum(file.lstat().st_size for file in folder.iterdir())
    if not os.access(folder, os.W_OK | os.X_OK):
        yield DoctorFinding(
            "libtpu_logs",
            "resources",
            "warning",
            f"/{LIBTPU_LOGS} belongs to another user, so libtpu complains and writes no log",
            "Set TPU_LOG_DIR to a folder of your own, or to 'disabled'.",
        )
    elif size > LARGE_LOGS_BYTES:
        seen = f"libtpu's logs in /{LIBTPU_LOGS} take {size / GIB:.1f} GiB (measured)"
        yield DoctorFinding("libtpu_logs", "resources", "warning", seen, f"rm -r /{LIBTPU_LOGS}")


def check_network_mode(site: Site) -> Iterator[DoctorFinding]:
    """Check that metadata look-ups are on where needed, and off where they only time out."""
    skip = site.environment.get("TPU_SKIP_MDS_QUERY")
    no_gce = site.environment.get("NO_GCE_CHECK", "").lower() == "true"
    if site.here.kind != "tpu":
        state = "off" if skip else "left to jax, which switches them off when it finds no TPU"
        yield DoctorFinding(
            "network_mode",
            "resources",
            "ok",
            f"libtpu's metadata look-ups are {state}",
            None if skip else "For libtpu without jax set TPU_SKIP_MDS_QUERY=1; it waits minutes.",
        )
        return
    if skip and not site.environment.get("TPU_WORKER_HOSTNAMES"):
        yield DoctorFinding(
            "network_mode",
            "resources",
            "warning",
            "TPU_SKIP_MDS_QUERY is set on a TPU machine and TPU_WORKER_HOSTNAMES is not, so libtpu "
            "cannot learn which host of which slice this is",
            "unset TPU_SKIP_MDS_QUERY, or set TPU_WORKER_HOSTNAMES, TPU_WORKER_ID and "
            "TPU_ACCELERATOR_TYPE",
        )
    if no_gce:
        yield DoctorFinding(
            "credentials_mode",
            "resources",
            "warning",
            "NO_GCE_CHECK=true on a TPU machine: Google's libraries will not find its credentials",
            "unset NO_GCE_CHECK, or set GOOGLE_APPLICATION_CREDENTIALS",
        )


def _container_limit(site: Site) -> int | None:
    for name in CGROUP_LIMITS:
        path: Path = site.root / name
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            return int(text)
    return None


CHECKS: tuple[Check, ...] = (check_memory, check_disk, check_libtpu_logs, check_network_mode)
