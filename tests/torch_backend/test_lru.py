"""The cache against a list that does the same the slow way, and under several threads."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tpukit.errors import TPUValidationError
from tpukit.torch.lru import DEFAULT_MAX_SIZE, LRUCache

KEYS = some.integers(0, 6)


class AgainstAList(RuleBasedStateMachine):
    """The truth is a list of (key, value, time), least recently used first."""

    @initialize(size=some.integers(1, 4), age=some.none() | some.integers(1, 5))
    def begin(self, size, age):
        self.now, self.size, self.age, self.truth, self.left = 0, size, age, [], []
        self.counts = dict.fromkeys(("hits", "misses", "evictions", "expirations"), 0)
        self.cache = LRUCache(
            size,
            max_age_s=age,
            clock=lambda: self.now,
            on_departure=lambda key, value, how: self.left.append((key, how)),
        )
        self.expected_left = []

    def find(self, key):
        return next((one for one in self.truth if one[0] == key), None)

    def is_old(self, entry):
        return self.age is not None and self.now - entry[2] > self.age

    def look_up(self, key):
        found = self.find(key)
        if found is None or self.is_old(found):
            self.counts["misses"] += 1
            if found is not None:
                self.truth.remove(found)
                self.expire([found])
            return None
        self.truth.remove(found)
        self.truth.append(found)
        self.counts["hits"] += 1
        return found[1]

    def expire(self, entries):
        self.counts["expirations"] += len(entries)
        self.expected_left += [(one[0], "expired") for one in entries]

    def store(self, key, value):
        self.truth = [one for one in self.truth if one[0] != key] + [(key, value, self.now)]
        if len(self.truth) > self.size:
            self.counts["evictions"] += 1
            self.expected_left.append((self.truth.pop(0)[0], "evicted"))

    @rule(key=KEYS)
    def get(self, key):
        assert self.cache.get(key) == self.look_up(key)

    @rule(key=KEYS, value=some.text())
    def put(self, key, value):
        self.cache.put(key, value)
        self.store(key, value)

    @rule(key=KEYS, value=some.text())
    def get_or_make(self, key, value):
        found = self.look_up(key)
        assert self.cache.get_or_make(key, lambda: value) == (value if found is None else found)
        if found is None:
            self.store(key, value)

    @rule(seconds=some.integers(1, 4))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def clear(self):
        self.cache.clear()
        self.truth = []

    @invariant()
    def agree(self):
        stats = self.cache.stats
        assert list(self.cache) == [one[0] for one in self.truth]
        assert {name: getattr(stats, name) for name in self.counts} == self.counts
        assert (stats.size, len(self.cache), stats.max_size) == (
            len(self.truth),
            len(self.truth),
            self.size,
        )
        assert self.left == self.expected_left
        for key in range(7):
            found = self.find(key)
            assert (key in self.cache) == (found is not None and not self.is_old(found))


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_several_threads_that_ask_for_one_key_wait_for_one_of_them():
    cache, made, barrier, found = LRUCache(4), [], threading.Barrier(8), []

    def make():
        made.append(1)
        return object()

    def ask():
        barrier.wait()
        found.append(cache.get_or_make("key", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(made) == 1
    assert len({id(one) for one in found}) == 1
    assert len(found) == 8


def test_threads_that_put_and_get_leave_the_counts_whole():
    cache, each = LRUCache(5), 300

    def use(first):
        for number in range(each):
            if cache.get((first + number) % 9) is None:
                cache.put((first + number) % 9, number + 1)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    stats = cache.stats
    assert stats.hits + stats.misses == 4 * each
    assert stats.size == 5
    assert stats.hit_rate == stats.hits / (4 * each)


def test_what_could_not_be_made_is_not_kept_and_can_be_made_later():
    cache = LRUCache(2)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("key", lambda: 1 // 0)
    assert "key" not in cache
    assert cache.get_or_make("key", lambda: 7) == 7


def test_the_counts_under_the_documents_names():
    cache = LRUCache()
    assert cache.stats.hit_rate == 0.0
    cache.put("a", 1)
    cache.get("a")
    cache.get("b")
    assert cache.stats.to_dict() == {
        "hits": 1,
        "misses": 1,
        "size": 1,
        "max_size": DEFAULT_MAX_SIZE,
        "evictions": 0,
        "expirations": 0,
        "hit_rate": 0.5,
    }


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"max_size": 0}, "at least one entry"), ({"max_age_s": 0.0}, "seconds above 0")],
)
def test_limits_that_would_keep_nothing_are_refused(limits, message):
    with pytest.raises(TPUValidationError, match=message):
        LRUCache(**limits)
