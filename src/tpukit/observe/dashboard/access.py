"""Access to the dashboard: the token, allowed host names, and limits on requests.

Every request passes `Guard` before anything else. On a loopback address no token is needed, but
only host names of this machine are answered, because a web page elsewhere can point its own name at
127.0.0.1. On any other address every page and every number needs the token.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import ConfigError
from ...pages.frame import APPLICATION_HEADERS
from ...runtime.address import names_this_machine
from .answers import assets_folder, refusal

LONGEST_QUERY = 2048
LARGEST_BODY = 4096
LARGEST_HEADERS = 32 << 10
SHORTEST_TOKEN = 16
BODY_S = 10.0
WRONG_TOKEN_S = 0.5
MOST_WAITING = 20
LOGIN = "/login"
# Files of the sign-in page; nothing else is served without a token.
WITHOUT_TOKEN = frozenset((LOGIN, "/assets/login.css", "/assets/login.js"))
MAKE_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())'"


@dataclass(frozen=True)
class Token:
    """The viewers' token; its text is in no log, page or cookie."""

    text: str

    def __post_init__(self) -> None:
        if (
            len(self.text) < SHORTEST_TOKEN
            or not self.text.isascii()
            or not self.text.isprintable()
        ):
            raise ConfigError(
                f"the token has {len(self.text)} characters; it needs {SHORTEST_TOKEN} or more "
                f"that can be typed, such as those of `{MAKE_TOKEN}`."
            )

    def __repr__(self) -> str:
        return "Token(…)"

    @property
    def session(self) -> str:
        """The cookie's value: a digest of the token."""
        return hmac.new(self.text.encode(), b"tpukit dashboard", hashlib.sha256).hexdigest()

    @property
    def cookie(self) -> str:
        """The cookie's name, which depends on the token because all ports share cookies."""
        return f"tpukit-{self.session[:8]}"

    def is_known_by(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has the token or its cookie."""
        if self.equals(_bearer(headers)):
            return True
        try:
            held = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return held is not None and _same(held.value, self.session)

    def equals(self, given: str) -> bool:
        """Return whether it is the same text, compared in constant time."""
        return _same(given, self.text)


class Guard:
    """Refuses requests without access, and passes on the others.

    Args:
        app: The application behind the guard.
        token: The token that every request needs; None for none.
        only_loopback: Whether only host names of this machine are answered.
    """

    def __init__(self, app: ASGIApp, *, token: Token | None, only_loopback: bool) -> None:
        self._app, self._token, self._only_loopback = app, token, only_loopback
        self._wrong = WrongTokens()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not supported; the server closes them

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in APPLICATION_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-cache")  # conditional requests for files
            await send(message)

        answer = await self._refused(scope, receive)
        await (answer or self._app)(scope, receive, send_with_headers)

    async def _refused(self, scope: Scope, receive: Receive) -> Response | None:
        headers = Headers(scope=scope)
        if len(scope["query_string"]) > LONGEST_QUERY or len(scope["path"]) > LONGEST_QUERY:
            return refusal(
                414, f"the address is longer than {LONGEST_QUERY} characters", "shorten it"
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) > LARGEST_HEADERS:
            return refusal(431, f"the headers are over {LARGEST_HEADERS} bytes", "send fewer")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY or "transfer-encoding" in headers:
            most = f"send at most {LARGEST_BODY} bytes, with their content-length"
            return refusal(413, "the body is too large, or has no content-length", most)
        if self._only_loopback and not names_this_machine(headers.get("host", "")):
            return refusal(
                421,
                f"this server is 127.0.0.1 and localhost, not {headers.get('host', '')!r:.80}",
                "ask for http://127.0.0.1, or start it with --host and --token for other addresses",
            )
        if scope["path"] == LOGIN and scope["method"] == "POST":
            return await self._signed_in(Request(scope, receive))
        if scope["method"] not in ("GET", "HEAD"):
            return refusal(405, f"{scope['method']} changes nothing here", "use GET")
        if self._token is None or self._token.is_known_by(headers):
            return None
        if scope["path"] in WITHOUT_TOKEN - {LOGIN}:
            return None
        if _bearer(headers) and not await self._wrong.wait():
            return _too_many()
        if scope["path"].startswith(("/api/", "/assets/")):
            way_out = "send it as `Authorization: Bearer TOKEN`, or sign in at /login"
            return refusal(401, "this needs the token the dashboard was started with", way_out)
        return FileResponse(assets_folder() / "login.html", status_code=401)

    async def _signed_in(self, request: Request) -> Response:
        """Answer a sign-in with a cookie."""
        try:
            async with asyncio.timeout(BODY_S):
                body = (await request.body()).decode("ascii", errors="replace")
        except TimeoutError:
            return refusal(408, f"the body did not come within {BODY_S:g} s", "send it again")
        try:
            given = parse_qs(body, max_num_fields=2).get("token", [""])[0]
        except ValueError:  # more fields
            given = ""
        if self._token is not None and not self._token.equals(given):
            if not await self._wrong.wait():
                return _too_many()
            return refusal(
                401, "the token is wrong", "copy it from where the dashboard was started"
            )
        answer = RedirectResponse("/", status_code=303)
        if self._token is not None:
            answer.set_cookie(
                self._token.cookie, self._token.session, httponly=True, samesite="strict"
            )
        return answer


class WrongTokens:
    """Delays requests with a wrong token, one after the other, to slow down guessing.

    A request with the right token never waits.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def wait(self) -> bool:
        """Wait for a turn and a delay; return False at once where too many are waiting."""
        if self._waiting >= MOST_WAITING:
            return False
        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(WRONG_TOKEN_S)
        finally:
            self._waiting -= 1
        return True


def _too_many() -> Response:
    return refusal(429, "too many wrong tokens came at once", "wait a minute and sign in again")


def _bearer(headers: Mapping[str, str]) -> str:
    """Return the token in a request's headers; "" without one."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())
