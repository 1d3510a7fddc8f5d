"""Checks of the chips: present, accessible, free, and usable by jax."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from ...hardware import get_chip
from ..child import ChildError, run_child
from .finding import Check, DoctorFinding, Site

LOCK_FILE = "tmp/libtpu_lockfile"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
OPEN_DEVICES_TIMEOUT_S = 90.0


def check_accelerators(site: Site) -> Iterator[DoctorFinding]:
    """Report the machine's accelerators, as found in the file system."""
    seen = f"{site.here} ({'; '.join(site.here.evidence)})"
    if site.here.kind == "cpu":
        seen = f"no TPU and no GPU: {seen}. Planning and compiling for TPU need none"
    yield DoctorFinding("accelerators", "devices", "ok", seen)


def check_permissions(site: Site) -> Iterator[DoctorFinding]:
    """Check that this user may open the chips."""
    closed = [str(node) for node in _device_nodes(site) if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        yield DoctorFinding(
            "device_permissions",
            "devices",
            "error",
            f"this user may not open {', '.join(closed)}",
            "Run as the user who owns them, or: sudo chmod a+rw " + " ".join(closed),
        )


def check_lock_file(site: Site) -> Iterator[DoctorFinding]:
    """Check that libtpu's lock file is free, or locked by a live process of this user."""
    path = site.root / LOCK_FILE
    try:
        stat = path.stat()
    except FileNotFoundError:
        yield DoctorFinding("lock_file", "devices", "ok", "no process has locked libtpu")
        return
    holder = _lock_holder(site, stat.st_ino)
    if holder is not None:
        yield DoctorFinding(
            "lock_file",
            "devices",
            "warning" if site.here.kind == "tpu" else "info",
            f"{_process_name(holder)} has locked libtpu, so no other process can use the TPU",
            "Wait for it, or end it; tpukit's own compiles may run beside it.",
        )
    elif not os.access(path, os.R_OK | os.W_OK):
        yield DoctorFinding(
            "lock_file",
            "devices",
            "error",
            f"/{LOCK_FILE} is left over from user {stat.st_uid}, and libtpu refuses to start while "
            "it cannot open it",
            f"sudo rm /{LOCK_FILE}",
        )
    else:
        seen = f"/{LOCK_FILE} is left over and nobody holds it, which does no harm"
        yield DoctorFinding("lock_file", "devices", "ok", seen)


def check_holders(site: Site) -> Iterator[DoctorFinding]:
    """Check that no other process has the chips open."""
    nodes = {str(node) for node in _device_nodes(site)}
    if not nodes:
        return
    held: dict[int, set[str]] = {}
    for link in site.root.glob("proc/[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:  # the process ended meanwhile, or is another user's
            continue
        if target in nodes and int(link.parts[-3]) != os.getpid():
            held.setdefault(int(link.parts[-3]), set()).add(target)
    for pid, open_nodes in sorted(held.items()):
        yield DoctorFinding(
            "chip_holder",
            "devices",
            "warning",
            f"{_process_name(pid)} has {', '.join(sorted(open_nodes))} open",
            f"Wait for it, or end it with: kill {pid}",
        )


def check_huge_pages(site: Site) -> Iterator[DoctorFinding]:
    """Check that transparent huge pages are on, where the TPU runtime starts faster with them."""
    here = site.here
    if here.kind != "tpu" or (here.generation and not get_chip(here.generation).wants_huge_pages):
        return
    path = site.root / HUGE_PAGES
    state = path.read_text().strip() if path.exists() else "(no such setting)"
    if "[always]" in state:
        yield DoctorFinding("huge_pages", "devices", "ok", "transparent huge pages are on")
    else:
        yield DoctorFinding(
            "huge_pages",
            "devices",
            "warning",
            f"transparent huge pages are {state}: the TPU runtime starts and stops slowly",
            f"sudo sh -c 'echo always > /{HUGE_PAGES}'",
        )


def check_jax_devices(site: Site) -> Iterator[DoctorFinding]:
    """Check in a child process that jax opens the accelerator."""
    if site.here.kind == "cpu":
        return
    try:
        reply = run_child(
            "tpukit.runtime.doctor.children",
            {"task": "open devices"},
            timeout_s=OPEN_DEVICES_TIMEOUT_S,
            environment=site.environment,
        )
    except ChildError as error:
        yield DoctorFinding(
            "jax_devices",
            "devices",
            "error",
            f"jax cannot open the devices here: {error}",
            "Fix the other findings first; then end every process that uses the chips and "
            "try again, or restart the machine.",
        )
        return
    seen = (
        f"jax {reply['jax']} opened {reply['count']} x {reply['kind']} in {reply['open_s']:.1f} s"
    )
    if reply["platform"] == site.here.kind:
        yield DoctorFinding("jax_devices", "devices", "ok", seen + " (measured)")
        return
    yield DoctorFinding(
        "jax_devices",
        "devices",
        "warning",
        f"{seen}, though this is a {site.here.kind.upper()} machine",
        "See the findings about JAX_PLATFORMS and about the software; "
        "configure_tpu_environment() sets the right variables.",
    )


def _device_nodes(site: Site) -> list[Path]:
    nodes = [*site.root.glob("dev/accel[0-9]*")]
    if site.here.kind == "tpu":  # other devices use vfio too
        nodes += site.root.glob("dev/vfio/[0-9]*")
    return sorted(nodes)


def _lock_holder(site: Site, inode: int) -> int | None:
    # From the kernel's table: opening and closing the file ourselves would, by the rules of POSIX
    # locks, release the lock of a libtpu that is loaded in this very process.
    table = site.root / "proc/locks"
    for line in table.read_text().splitlines() if table.exists() else ():
        words = line.split()
        # "1: POSIX ADVISORY WRITE 6220 fe:00:2146755 0 EOF"; "1: -> ..." is one that waits.
        if len(words) > 5 and words[1] != "->" and words[5].rpartition(":")[2] == str(inode):
            return int(words[4])
    return None


def _process_name(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())[:60] or process.name()
        return f"process {pid} of {process.username()} ({command})"
    except psutil.Error:
        return f"process {pid}"


CHECKS: tuple[Check, ...] = (
    check_accelerators,
    check_permissions,
    check_lock_file,
    check_holders,
    check_huge_pages,
    check_jax_devices,
)
