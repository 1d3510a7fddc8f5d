import pytest

from tpukit.pods.causes import Cause, Ending
from tpukit.pods.gang.verdict import cause_of, judge
from tpukit.pods.pod import Host

HOSTS = tuple(Host(f"host-{rank}", "127.0.0.1") for rank in range(4))


@pytest.mark.parametrize(
    ("codes", "cause", "host"),
    [
        ({0: 0, 1: 0, 2: 0, 3: 0}, Cause.DONE, ""),
        ({2: -9}, Cause.KILLED, "host-2"),
        ({0: 201, 1: 201, 2: 137, 3: 134}, Cause.KILLED, "host-2"),  # a peer was killed
        ({0: 137, 1: 201, 2: 134, 3: 201}, Cause.KILLED, "host-0"),  # the coordinator was
        ({0: 1, 1: 1, 2: 137, 3: 1}, Cause.KILLED, "host-2"),  # a program with its own codes
        ({0: 201, 1: 1, 2: -6, 3: 201}, Cause.FAILED, "host-1"),
        ({0: 201, 1: 201, 3: 134}, Cause.HUNG, "host-2"),  # who is left did not answer
        ({0: 201, 1: 201, 2: 201, 3: 134}, Cause.ABORTED, "host-3"),
        ({0: 201, 1: 201, 2: 201, 3: 201}, Cause.PEER_LOST, "host-0"),
        ({0: 200, 1: 201, 2: 201, 3: 201}, Cause.HUNG, "host-0"),
        ({0: 201, 1: 143, 2: 201, 3: 201}, Cause.NOTICE, "host-1"),
        ({0: 2, 1: 2, 2: 2, 3: 2}, Cause.BAD_INPUT, "host-0"),
        ({0: 3, 1: 201}, Cause.DIVERGED, "host-0"),
        ({0: 4, 1: 201}, Cause.OUT_OF_MEMORY, "host-0"),
        ({0: 201, 1: 202}, Cause.DIRTY_HOST, "host-1"),
        ({0: 205, 1: 201}, Cause.STORAGE, "host-0"),
        ({0: 2, 1: 205}, Cause.STORAGE, "host-1"),
        ({0: 201, 1: 255}, Cause.UNREACHABLE, "host-1"),
        ({1: 203}, Cause.FAILED, "host-1"),
    ],
)
def test_the_process_that_died_is_told_from_those_that_lost_it(codes, cause, host):
    ending = judge(HOSTS, codes, unreachable_code=255)
    assert (ending.cause, ending.host) == (cause, host)


def test_what_is_said_names_signal_code_and_last_words():
    words = {1: "error: no such file"}
    assert judge(HOSTS, {1: 2}, last_words=words).evidence == "exit code 2; error: no such file"
    assert judge(HOSTS, {1: 137}).evidence == judge(HOSTS, {1: -9}).evidence == "SIGKILL"
    silent = judge(HOSTS, {0: 134, 1: 134, 3: 134}, heartbeat_s=10)
    assert silent.evidence == "host-2 did not answer within 10 s"


def test_a_run_that_was_told_to_stop_and_saved_is_not_done():
    codes = dict.fromkeys(range(4), 0)
    assert judge(HOSTS, codes, stopped_early="preempted") == Ending(
        Cause.NOTICE, evidence="preempted, with its last step saved"
    )


def test_only_ssh_means_its_connection_by_255():
    assert cause_of(255) is Cause.FAILED
    assert cause_of(255, unreachable_code=255) is Cause.UNREACHABLE
