"""Terms of a pod that a provider does not have: refused with its reason, in one place."""

from ...errors import ConfigError
from ...job.sections import LaunchSettings
from ..config import PodConfig
from ..pod import Tier
from .protocol import Capabilities

_OF_A_POD = ("network", "software_version", "enable_ip_alias")


def check_terms(provider: str, offered: Capabilities, asked: PodConfig | LaunchSettings) -> None:
    """Refuse what is asked for and not offered; what is left at its default is not asked for.

    Raises:
        ConfigError: Says which term it is, and why the provider does not have it.
    """
    for term in _terms(asked):
        if (why := offered.refused.get(term)) is not None:
            raise ConfigError(f"Provider '{provider}' does not take {term}: {why}; leave it out.")


def _terms(asked: PodConfig | LaunchSettings) -> list[str]:
    if isinstance(asked, LaunchSettings):
        return [name for name in asked.model_fields_set if _differs(asked, LaunchSettings(), name)]
    changed = [name for name in _OF_A_POD if _differs(asked, PodConfig(), name)]
    if asked.tier is not Tier.ON_DEMAND:
        changed.append(asked.tier.value)
    if asked.slice.num_slices > 1:
        changed.append("multislice")
    return changed


def _differs(asked: object, usual: object, name: str) -> bool:
    return getattr(asked, name) != getattr(usual, name)
