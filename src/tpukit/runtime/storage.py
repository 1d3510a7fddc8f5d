"""Which answers of a file system pass by themselves, or when somebody makes room."""

import errno

PASSING_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
        *(errno.EHOSTDOWN, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    }
)
"""Errors of a place that is right. A missing permission or folder is not among them."""
