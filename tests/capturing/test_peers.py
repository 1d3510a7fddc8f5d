"""The coordination service of a captured program, whose other processes never started."""

import sys

import pytest

from tpukit.capturing.running import SHIM

sys.path.insert(0, str(SHIM))
from tpukit_shim.disguise import _Peers

sys.path.remove(str(SHIM))


def test_other_processes_set_what_this_one_sets():
    peers = _Peers(4)
    peers.key_value_set("gather/7/0", "blocks")
    assert [peers.blocking_key_value_get(f"gather/7/{process}") for process in range(4)] == [
        "blocks"
    ] * 4


def test_a_value_that_no_process_sets_is_refused_at_once():
    with pytest.raises(RuntimeError, match="no process of the capture sets 'leader/address'"):
        _Peers(4).blocking_key_value_get("leader/address")
