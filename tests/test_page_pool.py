"""No page has two holders, and none is lost."""

from hypothesis import given
from hypothesis import strategies as st

from mosstalk.runtime.sharing import PagePool


@given(asked=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30))
def test_no_page_has_two_holders_and_none_is_lost(asked: list[tuple[int, bool]]) -> None:
    pool, held, pages = PagePool(range(3, 9)), list[list[int]](), set(range(3, 9))
    for count, more in asked:
        if more:
            new = range(max(pages) + 1, max(pages) + 1 + count)
            pool.grow(new)
            pages |= {*new}
        elif held and count % 2:
            pool.give(held.pop())
        elif (taken := pool.take(count)) is not None:
            assert len(taken) == count
            held.append(taken)
        else:
            assert count > pool.free
        everybodys = [page for each in held for page in each]
        assert len(everybodys) == len(set(everybodys)) == pool.in_use
        assert pages >= {*everybodys}
        assert pool.size == len(pages) == pool.free + pool.in_use


def test_pages_go_out_in_order_and_the_latest_back_first() -> None:
    pool = PagePool(range(1, 6))
    assert pool.take(3) == [1, 2, 3]
    pool.give([2])
    pool.grow([6])
    assert pool.take(4) == [2, 4, 5, 6]
    assert pool.take(1) is None
