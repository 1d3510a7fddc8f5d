"""Google credentials: from files, or from the metadata server of a Google machine.

By itself google.auth queries the metadata server again and again on a machine that is not Google's.
So this module checks the usual files itself, and queries the server only if the firmware shows a
Google machine.
"""

import datetime
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import google.auth
from google.auth import compute_engine, exceptions, jwt
from google.auth.credentials import Credentials
from google.oauth2 import service_account

from ..errors import ProviderError

VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LIFE_S = 3600
_FIRMWARE = Path("/sys/class/dmi/id/product_name")
WAY_OUT = (
    "set launch.credentials_file or GOOGLE_APPLICATION_CREDENTIALS to a service account's key, "
    "or run `gcloud auth application-default login`"
)


@dataclass(frozen=True)
class Identity:
    """Credentials with their source and their project."""

    credentials: Credentials
    source: str
    project: str | None


class SelfSigned(Credentials):
    """Tokens that a service account's key signs locally, without a request.

    google.auth signs such tokens in the same way (https://google.aip.dev/auth/4111), but its
    classes also query which regions the account may use, in threads that retry without end where
    there is no network.
    """

    def __init__(self, key: service_account.Credentials) -> None:
        super().__init__()
        self._key = key

    def refresh(self, request: object) -> None:
        """Sign a new token."""
        now = int(time.time())
        email, until = self._key.service_account_email, now + LIFE_S
        claims = {"iss": email, "sub": email, "iat": now, "exp": until, "scope": SCOPE}
        self.token = jwt.encode(self._key.signer, claims).decode()
        # Without a zone, as google.auth compares it.
        self.expiry = datetime.datetime.fromtimestamp(until, datetime.UTC).replace(tzinfo=None)


def find_identity(credentials_file: str | None) -> Identity:
    """Return credentials from a file of the job, the environment or gcloud, or of the machine.

    Raises:
        ProviderError: There are none, or the file cannot be read.
    """
    for path, source in (
        (credentials_file, "launch.credentials_file"),
        (os.environ.get(VARIABLE), VARIABLE),
    ):
        if path:
            return _from_file(Path(path).expanduser(), source)
    if (path := _gcloud_file()).is_file():
        return _from_file(path, "gcloud's application-default login")
    if _is_google_machine():
        return Identity(compute_engine.Credentials(scopes=[SCOPE]), "this machine's account", None)
    raise ProviderError(f"There are no Google Cloud credentials here; {WAY_OUT}.")


def _from_file(path: Path, source: str) -> Identity:
    try:
        with warnings.catch_warnings():
            # google.auth warns of files from strangers; this one is named by its user.
            warnings.simplefilter("ignore", DeprecationWarning)
            credentials, project = google.auth.load_credentials_from_file(
                str(path), default_scopes=[SCOPE]
            )
    except (OSError, ValueError, exceptions.DefaultCredentialsError) as error:
        why = "there is no such file" if not path.exists() else type(error).__name__
        raise ProviderError(
            f"{source} names {path}, which holds no credentials ({why}); {WAY_OUT}."
        ) from None  # the error may quote the file, which is a secret
    if isinstance(credentials, service_account.Credentials):
        credentials = SelfSigned(credentials)
    return Identity(credentials, f"{source} ({path})", project)


def _gcloud_file() -> Path:
    """Return the path of the file that `gcloud auth application-default login` writes."""
    folder = os.environ.get("CLOUDSDK_CONFIG")
    root = Path(folder) if folder else Path("~/.config/gcloud").expanduser()
    return root / "application_default_credentials.json"


def _is_google_machine() -> bool:
    try:
        return _FIRMWARE.read_text().strip().startswith("Google")
    except OSError:
        return False
