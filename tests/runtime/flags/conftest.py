"""The flags of the installed libtpu and jaxlib, read once for the whole folder."""

import pytest

from tpukit.runtime.flags import FlagRegistry


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPUKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return FlagRegistry.installed()
