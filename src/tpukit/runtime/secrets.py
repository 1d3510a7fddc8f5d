"""Detect text that looks like a credential: token formats, private keys, URLs with passwords.

The token formats are those of gitleaks' default rules. A pattern is tried only near one of its
keywords, which `bytes.find` locates at memory speed, so files of any size can be scanned.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 4 << 20
LONGEST = 4096
"""Bytes that a match may take, so neighbouring chunks overlap by as many."""
BEFORE = 128
"""Bytes before a keyword where a match may begin."""
SHORTEST_VALUE = 8


@dataclass(frozen=True)
class SecretKind:
    """One kind of credential.

    Attributes:
        what: Its name in error messages.
        keywords: Lower-case bytes; every match contains at least one.
        pattern: The pattern to search near a keyword.
    """

    what: str
    keywords: tuple[bytes, ...]
    pattern: re.Pattern[bytes]

    def is_in(self, data: bytes, lower: bytes) -> bool:
        """Whether the pattern matches near one of the keywords; `lower` is `data.lower()`."""
        for keyword in self.keywords:
            at = lower.find(keyword)
            while at >= 0:
                if self.pattern.search(data, max(0, at - BEFORE), at + 2 * LONGEST):
                    return True
                at = lower.find(keyword, at + LONGEST)
        return False


def _kind(what: str, keywords: str, pattern: bytes) -> SecretKind:
    return SecretKind(what, tuple(keywords.encode().split()), re.compile(pattern))


_KINDS = (
    _kind("a private key", "-----begin", rb"-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY"),
    _kind("an age key", "age-secret-key-1", rb"AGE-SECRET-KEY-1[A-Z0-9]{58}"),
    _kind(
        "a Google service account", "service_account", rb'"type"\s{0,9}:\s{0,9}"service_account"'
    ),
    _kind("a Google API key", "aiza", rb"\bAIza[\w-]{35}(?![\w-])"),
    _kind("a Google access token", "ya29.", rb"\bya29\.[\w-]{20,}"),
    _kind("a Google client secret", "gocspx-", rb"\bGOCSPX-[\w-]{28}"),
    _kind("a refresh token", "refresh_token", rb'"refresh_token"\s{0,9}:\s{0,9}"[^"]{8,}'),
    _kind("a Hugging Face token", "hf_ api_org_", rb"\b(?:hf_|api_org_)[A-Za-z0-9]{30,}"),
    _kind(
        "a GitHub token",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        rb"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{36,}",
    ),
    _kind(
        "a GitLab token",
        "glpat- gldt- glrt- glptt- glcbt- glsoat- glft-",
        rb"\bgl(?:pat|dt|rt|ptt|cbt|soat|ft)-[\w-]{20,}",
    ),
    _kind("a Slack token", "xox xapp-", rb"\bxox[a-z]-[\w-]{10,}|\bxapp-\d-[\w-]{20,}"),
    _kind("a Slack webhook", "hooks.slack.com", rb"hooks\.slack\.com/\w{1,20}/[\w+/]{40,}"),
    _kind("an AWS key", "akia asia", rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    _kind(
        "an AWS key",
        "aws_secret_access_key",
        rb"(?i)aws_secret_access_key[\s\"':=]{1,9}[\w/+=]{20,}",
    ),
    _kind("an OpenAI-style key", "sk-", rb"\bsk-[A-Za-z0-9_-]{32,}"),
    _kind(
        "a Weights & Biases key",
        "wandb",
        rb"\bwandb_v\d_\w{20,}"
        rb"|(?i:wandb[^\x00]{0,60}?(?:key|password|login)[^\x00]{0,60}?)\b[0-9a-f]{40}\b",
    ),
    _kind("an npm token", "npm_", rb"\bnpm_[A-Za-z0-9]{36}"),
    _kind("a PyPI token", "pypi-ageichlwas5vcmc", rb"\bpypi-AgEIcHlwaS5vcmc[\w-]{50,}"),
    _kind("a Stripe key", "sk_live_ rk_live_", rb"\b[sr]k_live_[A-Za-z0-9]{10,}"),
    _kind("a Databricks token", "dapi", rb"\bdapi[a-f0-9]{32}\b"),
    _kind(
        "a JSON web token",
        "eyj",
        rb"\beyJ[\w-]{17,}\.eyJ[\w-]{17,}\.[\w-]{10,}",
    ),
    _kind("a Docker registry login", '"auth"', rb'"auth"\s{0,9}:\s{0,9}"[\w+/=-]{8,}"'),
    _kind(
        "a Kubernetes login",
        "client-key-data current-context",
        rb"client-key-data\"?:\s{0,9}\"?[\w+/=]{40,}"
        rb"|(?s:current-context.{0,2000}?\btoken\"?:\s{0,9}\"?[\w.~-]{8,})",
    ),
    # A user name may be missing. Templates such as {password} and <password> are no password.
    _kind(
        "a URL with a password",
        "://",
        rb"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@\"'`<>{}$%\\\x00-\x1f\x7f-\xff]{0,64}:"
        rb"(?!(?i:pass(?:word)?|secret|token|\.{3}|x+|\*+)@)"
        rb"[^\s/@\"'`<>{}$\\\x00-\x1f\x7f-\xff]{3,128}@[A-Za-z0-9\[]",
    ),
)
# Whole words of a variable's name: TOKENIZERS_PARALLELISM and MAX_TOKENS are no tokens.
_NAMES = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY"
    r"|(?:API|PRIVATE|ACCESS|AUTH|ENCRYPTION)_?KEY)(?:_|$)",
    re.IGNORECASE,
)


def find_secret(data: bytes) -> str | None:
    """Return the kind of credential that bytes contain, or None."""
    lower = data.lower()
    return next((kind.what for kind in _KINDS if kind.is_in(data, lower)), None)


def find_secret_in_file(path: Path) -> str | None:
    """Return the kind of credential that a file contains, or None."""
    return next((what for chunk in _chunks(path) if (what := find_secret(chunk))), None)


def is_secret_name(name: str) -> bool:
    """Whether a variable's name suggests that its value is a credential.

    Example:
        >>> [is_secret_name(name) for name in ("HF_TOKEN", "TOKENIZERS_PARALLELISM", "api_key")]
        [True, False, True]
    """
    return _NAMES.search(name) is not None


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable is a credential, by the format of its value or by its name."""
    if find_secret(value.encode(errors="replace")):
        return True
    is_path = value.startswith(("/", "./", "~", "gs://"))
    return is_secret_name(name) and len(value) >= SHORTEST_VALUE and not is_path


def _chunks(path: Path) -> Iterator[bytes]:
    before = b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield before + chunk
            before = chunk[-LONGEST:]
