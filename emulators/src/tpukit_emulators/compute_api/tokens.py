"""The desk where a signed assertion is exchanged for an access token (RFC 7523).

Google's clients for REST sign each call themselves where they can; gcloud and clients that act for
a user come here first. Both kinds of tokens open the API.
"""

import secrets
import threading
import time

from ..identity import Account, Accounts, NotAuthenticated
from .refusals import Json

AUDIENCE = "https://oauth2.googleapis.com/token"
"""Whom assertions are meant for, wherever a key file says they are to be sent."""
LIFE_S = 3599.0
GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"


class NoGrant(Exception):
    """An assertion that gets no token.

    Attributes:
        word: OAuth's word for why.
    """

    def __init__(self, word: str, message: str) -> None:
        self.word = word
        super().__init__(message)

    def to_body(self) -> Json:
        """Return what the desk answers."""
        return {"error": self.word, "error_description": str(self)}


class TokenDesk:
    """Gives access tokens to accounts, and knows whose they are."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._given: dict[str, tuple[Account, float]] = {}
        self._lock = threading.Lock()

    def grant(self, grant_type: str, assertion: str) -> Json:
        """Exchange an assertion.

        Raises:
            NoGrant: It is not one, or not signed by an account.
        """
        if grant_type != GRANT:
            raise NoGrant("unsupported_grant_type", f"Invalid grant_type: {grant_type}")
        try:
            account = self._accounts.read(assertion, audience=AUDIENCE)
        except NotAuthenticated as error:
            raise NoGrant("invalid_grant", "Invalid JWT Signature.") from error
        token = f"ya29.{secrets.token_urlsafe(32)}"
        with self._lock:
            self._given[token] = (account, time.time() + LIFE_S)
        return {"access_token": token, "expires_in": int(LIFE_S), "token_type": "Bearer"}

    def verify(self, authorization: str | None) -> Account:
        """Return whose token an `Authorization` header carries.

        Raises:
            NotAuthenticated: It carries none that holds now.
        """
        token = (authorization or "").removeprefix("Bearer ")
        with self._lock:
            given = self._given.get(token)
        if given is None:
            return self._accounts.verify(authorization)
        account, until = given
        if time.time() > until:
            raise NotAuthenticated("the token has expired")
        return account

    def expire_all(self) -> None:
        """Let every token that was given expire now."""
        with self._lock:
            self._given = {token: (account, 0.0) for token, (account, _) in self._given.items()}
