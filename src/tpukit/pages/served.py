"""Headers of what a server gives to a browser: as little as its pages need, and no way out.

`frame.Page` writes its policy into the page, because a file has no headers. What is served has
files for scripts and styles, so its policy allows those of the same server and nothing inline.
"""

from types import MappingProxyType

_ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_APPLICATION = (
    "default-src 'none'",
    "base-uri 'none'",
    "connect-src 'self'",
    "form-action 'self'",
    "frame-ancestors 'none'",
    "frame-src 'self'",
    "img-src 'self' data:",
    "script-src 'self'",
    "style-src 'self'",
    "require-trusted-types-for 'script'",  # a script cannot turn text into markup either
    "trusted-types 'none'",
)
# A page of one file has the rest of its policy in itself. In a sandbox its scripts are of no
# server, so that they could read nothing even if the page held an attack.
_FRAMED = ("sandbox allow-scripts allow-downloads", "frame-ancestors 'self'")
_POLICY = "content-security-policy"

APPLICATION_HEADERS = MappingProxyType({**_ALWAYS, _POLICY: "; ".join(_APPLICATION)})
"""Of an application with its own files: pages, scripts, styles, data."""
FRAMED_HEADERS = MappingProxyType({**_ALWAYS, _POLICY: "; ".join(_FRAMED)})
"""Of a `frame.Page` that the application shows in a frame."""
