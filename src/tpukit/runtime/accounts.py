"""Whether several people use this machine: a loopback address is open to all of them."""

import os
from collections.abc import Iterable

FIRST_PERSON, NOBODY = 1000, 65534
"""User ids from the first up to the second are people's, as Linux is usually set up."""
_NO_LOGIN = ("nologin", "false")


def people() -> set[int]:
    """Return the user ids of people with an account or a process on this machine."""
    found = {os.getuid(), *_accounts(), *_owners()}
    return {uid for uid in found if FIRST_PERSON <= uid < NOBODY}


def _accounts() -> Iterable[int]:
    import pwd

    for account in pwd.getpwall():
        if not account.pw_shell.endswith(_NO_LOGIN):
            yield account.pw_uid


def _owners() -> Iterable[int]:
    """Yield who owns processes: accounts of a directory service are in no local list."""
    import psutil

    for process in psutil.process_iter():
        try:
            yield process.uids().real
        except psutil.Error:
            continue
