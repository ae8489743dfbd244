"""The groups that a bundle has, as a server that lies may send them."""

import numpy as np
import pytest

from adam_async.messages import read_group_sets
from adam_async.messages.group_sets import MOST_GROUP, MOST_SENT_BOUNDS
from transport import RemoteProtocolError


def ranges(*bounds):
    return np.array(bounds, np.int64)


@pytest.mark.parametrize(
    ("every", "some"),
    [((), ()), ((0, 3), (3, 5, 9, 10)), ((3, 6, 8, 9), (0, 3, 6, 8, 9, MOST_GROUP)), ((), (7, 8))],
)
def test_disjoint_sets_are_read_as_they_were_sent(every, some):
    assert read_group_sets([ranges(*every), ranges(*some)]) == (every, some)


@pytest.mark.parametrize(
    ("every", "some", "why"),
    [
        ((0, 3), (2, 3), "a group is in `every` and in `some`"),
        ((0, 3), (2, 5), "a group is in `every` and in `some`"),
        ((4, 5), (0, 9), "a group is in `every` and in `some`"),
        ((0, 3), (0, 1), "a group is in `every` and in `some`"),
        ((3, 3), (), "every: bounds of ranges ascend"),
        ((5, 9, 2, 3), (), "every: bounds of ranges ascend"),
        ((0, 3, 3, 4), (), "every: bounds of ranges ascend"),
        ((), (-1, 3), "some: bounds of ranges ascend"),
        ((), (0, MOST_GROUP + 1), "some: bounds of ranges ascend"),
        ((0, 3, 5), (), "every: expected pairs of int64"),
    ],
)
def test_sets_that_no_correct_server_sends_are_refused(every, some, why):
    with pytest.raises(RemoteProtocolError, match=why):
        read_group_sets([ranges(*every), ranges(*some)])


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (ranges(0, 1),),
        (ranges(0, 1),) * 3,
        (np.zeros(2, np.float32), ranges()),
        (np.zeros((1, 2), np.int64), ranges()),
        (ranges(), np.arange(MOST_SENT_BOUNDS + 2, dtype=np.int64)),
    ],
    ids=["none", "one", "three", "dtype", "dimensions", "length"],
)
def test_tensors_of_another_form_are_refused(tensors):
    with pytest.raises(RemoteProtocolError):
        read_group_sets(tensors)
