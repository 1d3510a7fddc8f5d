"""Files that look like credentials: they are not shipped by accident."""

from fnmatch import fnmatch
from pathlib import Path

from ...runtime.secrets import find_secret_in_file

_NAMES = (
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "id_rsa*", "id_dsa*"),
    *("id_ecdsa*", "id_ed25519*", ".env", ".env.*", "*.env", ".netrc", "_netrc", ".npmrc"),
    *(".pypirc", ".git-credentials", "*credentials*", "*service-account*.json", ".pgpass"),
    *("*service_account*.json", "kubeconfig*", ".dockerconfigjson", ".dockercfg", "*secret*.json"),
    *("*secret*.yaml", "*secret*.yml", "*.token", ".boto", "access_tokens.db", "*.ovpn"),
)
# Where programs keep what they log in with; each is the end of a path.
_PLACES = (
    *(".kube/config", ".docker/config.json", ".aws/config", ".ssh/*", ".gnupg/*", ".azure/*"),
    *(".config/gcloud/*", ".config/gh/hosts.yml", "huggingface/token", "huggingface/stored_tokens"),
)


def looks_like_credentials(path: Path) -> str | None:
    """Return why a file looks like credentials; None where it does not."""
    name, place = path.name.lower(), path.as_posix().lower()
    for pattern in _NAMES:
        if fnmatch(name, pattern):
            return f"its name is like {pattern}"
    for pattern in _PLACES:
        if fnmatch(place, f"*/{pattern}"):
            return f"{pattern} is where credentials are kept"
    what = find_secret_in_file(path)
    return None if what is None else f"it contains {what}"
