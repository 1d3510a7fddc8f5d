"""Files that look like credentials: they are not shipped by accident."""

import re
from fnmatch import fnmatch
from pathlib import Path

_NAMES = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "id_rsa*", "id_dsa*"),
    *("id_ecdsa*", "id_ed25519*", ".env", ".env.*", "*.env", ".netrc", "_netrc", ".npmrc"),
    *(".pypirc", ".git-credentials", "*credentials*", "*service-account*.json"),
    *("*service_account*.json", "kubeconfig*", ".dockerconfigjson", "*secret*.json"),
    *("*secret*.yaml", "*secret*.yml", "*.token"),
)
_CONTENTS = {
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a Google service account": rb'"type"\s*:\s*"service_account"',
    "a refresh token": rb'"refresh_token"\s*:\s*"[^"]{8,}',
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token": rb"\bgh[pousr]_[A-Za-z0-9]{36}",
    "an AWS key": rb"\bAKIA[0-9A-Z]{16}\b|aws_secret_access_key\s*=",
    "an OpenAI-style key": rb"\bsk-[A-Za-z0-9_-]{32,}",
    "a Weights & Biases key": rb"WANDB_API_KEY\s*[:=]\s*[\"']?[0-9a-f]{40}",
}
_LOOKED_AT = 1 << 20


def looks_like_credentials(path: Path) -> str | None:
    """Say why a file looks like credentials; None where it does not."""
    for pattern in _NAMES:
        if fnmatch(path.name.lower(), pattern):
            return f"its name is like {pattern}"
    with path.open("rb") as file:
        start = file.read(_LOOKED_AT)
    for what, pattern in _CONTENTS.items():
        if re.search(pattern, start):
            return f"it holds {what}"
    return None
