"""Certificates and accounts of emulated APIs: real TLS and real tokens, all made here.

The authority's certificate is written to a folder and kept there, because a process reads its
roots of trust once. Accounts are service accounts with a key file, as Google's are; what a caller
signs with it is verified as Google would: signature, audience, time.
"""

import datetime
import ipaddress
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from google.auth import jwt

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""The scope that opens every API."""
NO_TOKENS = "https://127.0.0.1:9/no-token-is-fetched"
_LIFE = datetime.timedelta(days=30)
_PEM = serialization.Encoding.PEM
_PKCS8 = serialization.PrivateFormat.PKCS8
_PLAIN = serialization.NoEncryption()


class Authority:
    """A certificate authority whose root is the file `ca.pem` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.root_file, key_file = folder / "ca.pem", folder / "ca.key"
        folder.mkdir(parents=True, exist_ok=True)
        if not (self.root_file.exists() and key_file.exists()):
            key = ec.generate_private_key(ec.SECP256R1())
            name = _named("tpukit emulator")
            root = _certificate(name, name, key.public_key()).add_extension(
                x509.BasicConstraints(ca=True, path_length=0), critical=True
            )
            write_secret(key_file, key.private_bytes(_PEM, _PKCS8, _PLAIN))
            self.root_file.write_bytes(root.sign(key, hashes.SHA256()).public_bytes(_PEM))
        self._root = x509.load_pem_x509_certificate(self.root_file.read_bytes())
        loaded = serialization.load_pem_private_key(key_file.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded

    def certify_loopback(self) -> tuple[bytes, bytes]:
        """Return a new key and a certificate chain for `localhost` and 127.0.0.1, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            _certificate(_named("localhost"), self._root.subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return key.private_bytes(_PEM, _PKCS8, _PLAIN), certificate.public_bytes(_PEM)


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFE)
    )


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)


class NotAuthenticated(Exception):
    """The token is missing, forged, expired, or meant for someone else."""


@dataclass(frozen=True)
class Account:
    """A service account.

    Attributes:
        may: Permissions it has, with `*` for any letters: "tpu.*", "tpu.queuedresources.get".
        key_file: What its owner passes as `credentials_file`.
    """

    email: str
    may: tuple[str, ...]
    key_file: Path

    def is_allowed(self, permission: str) -> bool:
        """Tell whether it has a permission."""
        return any(fnmatchcase(permission, one) for one in self.may)


class Accounts:
    """The accounts of a project, and whose tokens are theirs."""

    def __init__(
        self, folder: Path, project: str, audience: str, *, token_uri: str = NO_TOKENS
    ) -> None:
        self._folder, self._project, self._audience = folder, project, audience
        self._token_uri = token_uri
        self._accounts: dict[str, Account] = {}
        self._public_keys: dict[str, str] = {}  # by key id

    def add(self, name: str, may: tuple[str, ...] = ("*",)) -> Account:
        """Make an account with a key of its own."""
        email = f"{name}@{self._project}.iam.gserviceaccount.com"
        key, key_id = rsa.generate_private_key(65537, 2048), f"key-of-{name}"
        public = key.public_key().public_bytes(
            _PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        account = Account(email, may, self._folder / f"{name}.json")
        content = {
            "type": "service_account",
            "project_id": self._project,
            "private_key_id": key_id,
            "private_key": key.private_bytes(_PEM, _PKCS8, _PLAIN).decode(),
            "client_email": email,
            "client_id": "1",
            "token_uri": self._token_uri,
        }
        write_secret(account.key_file, json.dumps(content).encode())
        self._accounts[email] = account
        self._public_keys[key_id] = public.decode()
        return account

    def verify(self, authorization: str | None) -> Account:
        """Return whose token an `authorization` header carries.

        Raises:
            NotAuthenticated: It carries none that holds now and is meant for this API.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme != "Bearer" or not token:
            raise NotAuthenticated("no token")
        return self.read(token, audience=self._audience, or_scope=True)

    def read(self, token: str, *, audience: str, or_scope: bool = False) -> Account:
        """Return who signed a token that holds now.

        Args:
            token: A JWT.
            audience: Whom it must be meant for.
            or_scope: Whether a scope will do instead (https://google.aip.dev/auth/4111).

        Raises:
            NotAuthenticated: It is forged, expired, or meant for someone else.
        """
        try:
            claims = jwt.decode(token, certs=self._public_keys)
            account = self._accounts[claims["iss"]]
        except (ValueError, KeyError) as error:
            raise NotAuthenticated(str(error)) from error
        scoped = or_scope and SCOPE in claims.get("scope", "").split()
        if claims.get("aud") != audience and not scoped:
            raise NotAuthenticated("the token is for someone else")
        return account
