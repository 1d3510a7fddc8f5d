"""Moments as the API writes them."""

import datetime


def written(moment: float) -> str:
    """Return seconds since the epoch in RFC 3339."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="milliseconds")
