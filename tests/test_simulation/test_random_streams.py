"""Seeded streams: the same for a name, unlike for others, and fair enough."""

from tests.simulation.random_streams import RandomStream


def test_a_stream_is_a_function_of_its_name():
    assert [RandomStream("7/disk").random() for _ in range(3)] == [RandomStream("7/disk").random()] * 3
    assert RandomStream("7/disk").random() != RandomStream("7/network").random()
    # Written down: a seed in a report must mean the same run next year.
    assert RandomStream("7/disk").below(1000) == 981


def test_a_fork_does_not_depend_on_what_was_drawn():
    dice = RandomStream("7")
    before = dice.fork("a").bytes(20)
    dice.random()

    assert dice.fork("a").bytes(20) == before
    assert len(before) == 20


def test_draws_are_in_their_ranges_and_reach_all_of_them():
    dice = RandomStream("7")

    assert {dice.below(5) for _ in range(200)} == set(range(5))
    assert all(2.0 <= dice.between(2.0, 3.0) < 3.0 for _ in range(200))
    assert 0.4 < sum(dice.random() for _ in range(2000)) / 2000 < 0.6
    assert 1.8 < sum(dice.around(2.0) for _ in range(4000)) / 4000 < 2.2
    assert 150 < sum(dice.chance(0.1) for _ in range(2000)) < 250


def test_what_cannot_happen_draws_nothing():
    dice, other = RandomStream("7"), RandomStream("7")
    dice.chance(0.0)

    assert dice.random() == other.random()


def test_a_shuffle_keeps_what_it_shuffles_and_comes_to_every_order():
    orders = set()
    for seed in range(60):
        items = [1, 2, 3]
        RandomStream(str(seed)).shuffle(items)
        orders.add(tuple(items))

    assert len(orders) == 6
