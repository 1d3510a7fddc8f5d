"""Commands in a mount namespace of their own, with a small disk that can be filled for real."""

import functools
import shlex
import subprocess


@functools.cache
def may_mount():
    """Whether this user may mount a file system in a namespace of their own."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def on_small_disk(folder, *commands, size_mb):
    """Return one command that runs several at once, with a file system of some MB at `folder`.

    It exits as the last of them does.
    """
    *others, last = (shlex.join(map(str, command)) for command in commands)
    lines = [
        f"mount -t tmpfs -o size={size_mb}m none {shlex.quote(str(folder))}",
        *(f"{command} &" for command in others),
        f"code=0; {last} || code=$?",
        "wait; exit $code",
    ]
    return ["unshare", "-rm", "sh", "-ec", "\n".join(lines)]
