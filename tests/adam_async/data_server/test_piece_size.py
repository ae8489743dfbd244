"""The number of groups that a worker of a pool asks for at once."""

import pytest

from adam_async.data_server.client import PIECE_S, PieceSize


def train(pieces, groups, *, begin, group_s):
    """Train groups one after the other; return the time after them."""
    pieces.goes_on(begin)
    for _ in range(groups):
        pieces.finished()
    return begin + groups * group_s


@pytest.mark.parametrize(
    ("group_s", "expected"), [(0.001, 500), (0.01, 50), (0.04, 12.5), (0.4, 1.25), (2, 1)]
)
def test_pieces_have_half_a_second_of_measured_work_on_average_and_at_least_one_group(group_s, expected):
    pieces, now, sizes = PieceSize(first=1, most=512), 0.0, []
    for _ in range(60):
        sizes.append(pieces.next(now))
        now = train(pieces, sizes[-1], begin=now, group_s=group_s)
    usual = sizes[20:]
    assert sum(usual) / len(usual) == pytest.approx(expected, abs=1 / len(usual))
    assert max(usual) - min(usual) <= 1


def test_a_piece_doubles_until_the_rate_is_known_and_a_burst_of_acknowledgements_is_no_rate():
    pieces = PieceSize(first=4, most=512)
    assert [pieces.next(0.0), pieces.next(0.0)] == [4, 4]
    now = train(pieces, 4, begin=0.0, group_s=0.001)
    assert pieces.next(now) == 8
    now = train(pieces, 96, begin=now, group_s=0.01)
    assert pieces.next(now) == pytest.approx(100 * PIECE_S / now, abs=1)
    known = pieces.next(now)
    assert pieces.next(train(pieces, 40, begin=now, group_s=1e-5)) == pytest.approx(known, abs=1)


def test_time_without_groups_is_no_work():
    pieces = PieceSize(first=4, most=512)
    now = train(pieces, 100, begin=0.0, group_s=0.01)
    pieces.waits(now)
    assert pieces.next(now + 9.0) == 50
    pieces.goes_on(now + 10.0)
    now = train(pieces, 100, begin=now + 10.0, group_s=0.01)
    assert pieces.next(now) == 50


def test_a_piece_fits_into_one_answer():
    pieces = PieceSize(first=900, most=512)
    assert pieces.next(0.0) == 512
    assert pieces.next(train(pieces, 10_000, begin=0.0, group_s=1e-4)) == 512
