"""Dirty shards keep the time of their first update that is not on disk."""

from adam_async.persistence.records import StateName
from adam_async.persistence.rounds import DirtyStates, Mark

ONE, TWO, OTHER = StateName("a", 1), StateName("a", 2), StateName("b", 1)


def test_a_second_update_keeps_the_time_of_the_first():
    dirty = DirtyStates()
    assert dirty.oldest() is None
    dirty.add(ONE, Mark(5.0, 10))
    dirty.add(TWO, Mark(6.0, 20))
    dirty.add(ONE, Mark(7.0, 11))
    assert (len(dirty), dirty.nbytes, dirty.oldest()) == (2, 31, 5.0)
    assert dirty.pop(ONE) == Mark(5.0, 11)
    assert (dirty.nbytes, dirty.oldest()) == (20, 6.0)
    assert dirty.pop(ONE) is None


def test_a_mark_that_is_put_back_keeps_the_earlier_time():
    dirty = DirtyStates()
    dirty.add(ONE, Mark(5.0, 10))
    mark = dirty.pop(ONE)
    dirty.add(ONE, Mark(9.0, 10))
    dirty.add(ONE, mark)
    assert (dirty.oldest(), dirty.nbytes) == (5.0, 10)


def test_the_marks_of_one_bundle_are_removed_together():
    dirty = DirtyStates()
    for name in (ONE, TWO, OTHER):
        dirty.add(name, Mark(1.0, 10))
    dirty.forget("a")
    assert dirty.names() == [OTHER]
    assert dirty.nbytes == 10
    assert ONE not in dirty
