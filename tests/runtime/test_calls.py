"""Calls that may be awaited and need not be."""

import asyncio
import threading

import pytest

from tpukit.runtime.calls import either_way


@either_way
def where(x=0):
    return threading.current_thread(), x


@either_way
def fails():
    raise ValueError("no")


def test_plain_code_gets_the_result():
    thread, x = where(3)
    assert thread is threading.current_thread()
    assert x == 3


def test_plain_code_below_a_running_loop_gets_the_result():
    def plain():
        return where(4)

    async def main():
        return plain()

    assert asyncio.run(main())[1] == 4


def test_a_coroutine_awaits_it_and_the_loop_goes_on():
    async def main():
        found = await where(5)
        many = await asyncio.gather(*[where(n) for n in range(3)])
        return found, many

    (thread, x), many = asyncio.run(main())
    assert thread is not threading.main_thread()
    assert x == 5
    assert [n for _, n in many] == [0, 1, 2]


def test_errors_come_through_both_ways():
    async def main():
        await fails()

    with pytest.raises(ValueError, match="no"):
        fails()
    with pytest.raises(ValueError, match="no"):
        asyncio.run(main())


@pytest.mark.parametrize("width", [1, 7])
def test_generators_in_coroutines_count_as_the_coroutine(width):
    async def main():
        return await asyncio.gather(*(where(n) for n in range(width)))

    assert len(asyncio.run(main())) == width
