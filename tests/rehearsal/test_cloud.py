"""The emulated cloud of a rehearsal: the right API for the chips, and nothing left of it."""

import os
from pathlib import Path

import pytest

from tpukit.errors import MissingExtraError
from tpukit.hardware import Slice
from tpukit.pods import emulation
from tpukit.rehearsal import cloud as rooms

pytestmark = pytest.mark.xdist_group("pods-processes")


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        ("v5e-8", "gcp"),
        ("v6e-4", "gcp"),
        pytest.param("tpu7x-2x2x1", "gce", marks=pytest.mark.slow),
    ],
)
def test_it_gives_such_slices_in_several_zones_where_it_can(name, provider, monkeypatch, tmp_path):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path))
    slice = Slice.parse(name)
    with rooms.emulated_cloud(slice) as cloud:
        assert cloud.provider == provider
        said = cloud.launch_section(slice)
        assert said["spot"]
        zones = [said["zone"], *said["zones"]]
        offers = cloud.inside.world.zones
        assert all(slice.chip.name in offers[zone].capacity for zone in zones)
        assert len(zones) >= (1 if name.startswith("tpu7x") else 2)
        assert cloud.leftovers == []
        inside = Path(os.environ["TPUKIT_STATE_DIR"])
        assert inside.is_dir()
        assert inside != tmp_path
    assert not inside.exists()
    assert os.environ["TPUKIT_STATE_DIR"] == str(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing of the user's own was touched"


def test_all_clouds_of_a_process_have_one_authority():
    """GRPC reads whom to trust once, and would refuse the second cloud otherwise."""
    roots = []
    for _ in range(2):
        with rooms.emulated_cloud(Slice.parse("v6e-4")):
            roots.append(Path(os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"]).read_bytes())
    assert roots[0] == roots[1]


@pytest.mark.parametrize("missing", ["tpukit_emulators", "asyncssh"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    def gone(*_):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(emulation, "import_module", gone)
    with (
        pytest.raises(MissingExtraError, match=r"tpukit\[emulators\]"),
        rooms.emulated_cloud(Slice.parse("v6e-4")),
    ):
        pass
