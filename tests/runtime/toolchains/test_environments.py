"""Environments of toolchains, made of a package in a folder: whole, once, and used by many."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from local_wheels import write_wheel

from tpukit.runtime.toolchains import Toolchain, environment, environments, is_made
from tpukit.runtime.toolchains.environments import ToolchainError

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
FAKE = Toolchain("jax-9.9", HERE, ("fakejax==9.9",), jax="9.9")


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """A folder of wheels that is all pip knows of, and an empty cache folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "fakejax", "9.9", {"fakejax.py": "version = '9.9'\n"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "installed_requirements", lambda package: ["x; extra == 'y'"])
    return folder


def kept(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "toolchains").iterdir())


def says(python, program):
    return subprocess.run([python, "-c", program], capture_output=True, text=True).stdout.strip()


def test_the_running_toolchain_is_this_interpreter():
    with environment(Toolchain("default", HERE)) as python:
        assert str(python) == sys.executable


def test_two_at_once_make_one_which_is_used_again_where_it_was_moved_to(offered, tmp_path):
    told = []

    def use(number):
        with environment(FAKE, progress=lambda line: told.append((number, line))) as python:
            assert python == tmp_path / "cache" / "toolchains" / FAKE.folder_name / "bin" / "python"
            assert says(python, "import fakejax; print(fakejax.version)") == "9.9"

    both = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    makers = [number for number, line in told if "making an environment" in line]
    assert len(makers) == 1
    assert (makers[0], "jax-9.9: installing 1 packages") in told
    waited = f"{FAKE.folder_name}: waiting for another process that makes or uses it"
    assert (1 - makers[0], waited) in told
    told.clear()
    (offered / "fakejax-9.9-py3-none-any.whl").unlink()
    use(2)
    assert told == []
    assert kept(tmp_path) == [FAKE.folder_name, f"{FAKE.folder_name}.lock"]


@pytest.mark.slow
def test_one_that_has_more_than_is_asked_for_will_do_and_one_with_less_is_made_again(
    offered, tmp_path
):
    write_wheel(offered, "extrafake", "1.0", {"extrafake.py": ""})
    with environment(FAKE):
        pass
    more = FAKE.with_requirements("extrafake==1.0")
    assert is_made(FAKE)
    assert not is_made(more)
    with environment(more) as python:
        assert says(python, "import extrafake, fakejax; print('both')") == "both"
    assert is_made(FAKE)


def test_what_pip_cannot_install_leaves_nothing_and_says_why(offered, tmp_path):
    wrong = Toolchain("jax-8.8", HERE, ("fakejax==8.8",), jax="8.8")
    with (
        pytest.raises(ToolchainError, match=r"jax-8\.8 could not be created: .*fakejax==8\.8"),
        environment(wrong),
    ):
        pass
    assert kept(tmp_path) == [f"jax-8.8-py{HERE}.lock"]
    assert not is_made(wrong)


def test_a_python_that_is_not_here_is_named(offered):
    with (
        pytest.raises(ToolchainError, match=r"needs Python 3\.99, but neither.*pyenv install"),
        environment(Toolchain("jax-9.9", "3.99", jax="9.9")),
    ):
        pass


@pytest.mark.parametrize("damage", ["", "{", '{"requirements": 3}', "[]"])
def test_a_damaged_record_is_no_environment(offered, tmp_path, damage):
    folder = tmp_path / "cache" / "toolchains" / FAKE.folder_name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    record = folder / "toolchain.json"
    record.write_text(json.dumps({"requirements": ["fakejax==9.9"]}))
    assert is_made(FAKE)
    record.write_text(damage)
    assert not is_made(FAKE)


MAKE = """
import sys
from tpukit.runtime.interruption import end_on_ctrl_c
end_on_ctrl_c()
from tpukit.runtime.toolchains import Toolchain, environment, environments
environments.installed_requirements = lambda package: []
with environment(Toolchain("jax-9.9", sys.argv[1], ("fakejax==9.9",), jax="9.9")) as python:
    print(python, flush=True)
"""


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_an_environment_cut_short_is_never_used(offered, tmp_path, how):
    maker = subprocess.Popen([sys.executable, "-c", MAKE, HERE], start_new_session=True)
    folder = tmp_path / "cache" / "toolchains"
    try:
        while not [*folder.glob(".*partial*/bin/python")]:  # the environment is being filled
            assert maker.poll() is None
            time.sleep(0.01)
        children = psutil.Process(maker.pid).children(recursive=True)
        os.kill(maker.pid, how)
        assert maker.wait(30) == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert not is_made(FAKE)
        if how == signal.SIGINT:
            assert kept(tmp_path) == [f"{FAKE.folder_name}.lock"]
            assert not psutil.wait_procs(children, timeout=5)[1]
    finally:
        for one in [*children, maker]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=10)
    with environment(FAKE) as python:
        assert says(python, "import fakejax; print(fakejax.version)") == "9.9"
    assert kept(tmp_path) == [FAKE.folder_name, f"{FAKE.folder_name}.lock"], "nothing half-made"
