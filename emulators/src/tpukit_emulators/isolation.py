"""Give a command a file system view of its own: the system's files, and little else.

A mount namespace (util-linux' `unshare`) gets a new root with the system's folders, an own /tmp and
an own home. This machine's Python environments and checkouts are not in it. It needs root.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

OWN_HOME = "/home/tpukit"
OWN_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
# Folders of the system; /usr/local is hidden, because people install there.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/dev", "/proc", "/sys")
_HIDDEN = ("/usr/local",)


def isolated(argv: Sequence[str], *, home: Path, shared: Sequence[Path] = ()) -> list[str]:
    """Return the command that runs `argv` in a view of its own.

    Args:
        argv: The command.
        home: Folder of this machine that is the home there, and stays when the command has ended.
        shared: Further folders of this machine, which have the same paths there.
    """
    root = home.with_name(f"{home.name}.root")
    root.mkdir(parents=True, exist_ok=True)
    lines = [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(root))}"]
    for folder in _SYSTEM:
        there = root / folder.lstrip("/")
        if Path(folder).is_symlink():
            lines.append(f"ln -s {shlex.quote(os.readlink(folder))} {shlex.quote(str(there))}")
        elif Path(folder).is_dir():
            lines.append(_bound(folder, there))
    lines += [f"mount -t tmpfs none {shlex.quote(str(root / path[1:]))}" for path in _HIDDEN]
    lines.append(_bound(str(home), root / OWN_HOME[1:]))
    lines += [_bound(str(path), root / str(path)[1:]) for path in shared]
    lines.append(f"mkdir -p -m 1777 {shlex.quote(str(root / 'tmp'))}")
    lines.append(
        f'cd {shlex.quote(str(root))} && exec chroot . /bin/sh -c \'cd "$HOME"; exec "$@"\' sh "$@"'
    )
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "/bin/sh",
        "-ec",
        "\n".join(lines),
        "sh",
        *argv,
    ]


def _bound(folder: str, there: Path) -> str:
    target = shlex.quote(str(there))
    return f"mkdir -p {target}; mount --rbind {shlex.quote(folder)} {target}"
