"""The server that reads each file of a source, the servers asked for it, and replacements of lost servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.staging.plan import File, Staging, Step, first_difference, manifest_digest


def files_of(count: int) -> list[File]:
    return [File(f"class/{number}.png", number) for number in range(count)]


def ring_of(servers: int, count: int) -> list[Staging]:
    return [Staging(files_of(count), server=server, servers=servers) for server in range(servers)]


def run(ring: list[Staging], dead: set[int], unreadable: set[tuple[int, int]], dice) -> dict[int, list[int]]:
    """Let the living stage in an order that is drawn; returns who read each file from the source.

    A server that asks for what the asked one has not got tries again later, as one that is parked does.
    """
    read: dict[int, list[int]] = {}
    waiting = [
        (one, file)
        for one in ring
        if one.server not in dead
        for file in range(len(one.files))
        if one.checksum(file) is None
    ]
    idle = 0
    while waiting:
        one, file = waiting.pop(dice.draw(st.integers(0, len(waiting) - 1)))
        step = one.where(file)
        if step is None:
            assert {(file, server) for server in range(len(ring)) if server not in dead} <= unreadable
            continue
        moved = True
        if step.server == one.server:
            read.setdefault(file, []).append(one.server)
            if (file, one.server) in unreadable:
                one.failed(file, one.server, "an error")
            else:
                one.hold(file, f"sum of {file}")
        elif step.server in dead:
            one.lost(step.server, "no answer")
        elif (checksum := ring[step.server].checksum(file)) is not None:
            one.hold(file, checksum)
        elif not ring[step.server].readable(file):
            one.refused(file, step.server, "it cannot read it")
        elif not step.patient:
            one.looked(file, step.server)
        else:
            moved = False
        if one.checksum(file) is None:
            waiting.append((one, file))
        idle = 0 if moved else idle + 1
        assert idle < 10_000, "they wait in a circle"
    return read


@given(st.integers(1, 6), st.integers(0, 40))
def test_every_file_has_one_owner_and_each_server_gets_all_in_rounds(servers: int, count: int) -> None:
    for one in ring_of(servers, count):
        own = list(one.missing_of(one.server))
        assert all(one.owner(file) == one.server for file in own)
        copied = [list(one.missing_of(owner)) for owner in one.rounds()]
        assert sorted(own + [file for files in copied for file in files]) == list(range(count))
        distances = [(owner - one.server) % servers for owner in one.rounds()]
        assert distances == sorted(distances)
        assert 0 not in distances


@given(st.data(), st.integers(1, 5), st.integers(0, 9))
def test_all_live_servers_complete_and_each_file_is_read_once_whichever_servers_are_dead(
    data, servers, count
) -> None:
    dead = data.draw(st.sets(st.integers(0, servers - 1), max_size=servers - 1))
    ring = ring_of(servers, count)

    read = run(ring, dead, set(), data)

    assert all(one.complete for one in ring if one.server not in dead)
    assert {file: len(readers) for file, readers in read.items()} == dict.fromkeys(range(count), 1)
    for file, (reader,) in read.items():
        assert reader == next(server for d in range(servers) if (server := (file + d) % servers) not in dead)


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_a_file_that_some_servers_cannot_read_comes_from_others_without_a_circle_of_waits(
    data, servers, count
) -> None:
    dead = data.draw(st.sets(st.integers(0, servers - 1), max_size=servers - 1))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, servers - 1))
    unreadable = data.draw(st.sets(pairs))
    ring = ring_of(servers, count)

    run(ring, dead, unreadable, data)

    living = [one for one in ring if one.server not in dead]
    for file in range(count):
        somebody = any((file, one.server) not in unreadable for one in living)
        assert all((one.checksum(file) is not None) == somebody for one in living)


@given(st.data(), st.integers(2, 5), st.integers(1, 9))
def test_a_late_server_copies_its_files_from_others_that_have_read_them(data, servers, count) -> None:
    late = data.draw(st.integers(0, servers - 1))
    ring = ring_of(servers, count)
    run(ring, {late}, set(), data)
    for server in range(servers):
        if server != late and ring[server].held_of(late):
            ring[late].holder(server)

    assert run(ring, set(), set(), data) == {}
    assert ring[late].complete


def test_a_round_waits_until_its_owner_is_reachable_or_lost() -> None:
    one = Staging(files_of(8), server=1, servers=4)
    assert one.rounds() == [2, 3, 0]
    assert one.next_round([]) is None
    assert one.next_round([0]) == 0
    assert one.next_round([0, 3]) == 3
    one.lost(2, "no answer")
    assert one.next_round([0, 3]) == 2
    for file in (2, 6):
        one.hold(file, "sum")
    assert one.rounds() == [3, 0]


def test_a_server_is_tried_for_a_file_the_given_number_of_times_and_then_the_next() -> None:
    one = Staging(files_of(8), server=0, servers=4, tries=2)
    assert one.where(2) == Step(2, patient=True)
    one.failed(2, 2, "damaged")
    assert one.where(2) == Step(2, patient=True)
    one.failed(2, 2, "damaged again")
    assert one.where(2) == Step(3, patient=True)
    assert one.where(6) == Step(2, patient=True), "of another file it may have a good copy"
    one.refused(2, 3, "it cannot read it")
    assert one.where(2) == Step(0, patient=True)
    assert one.readable(2)
    one.refused(2, 0, "an error")
    assert not one.readable(2)
    one.lost(1, "no answer")
    assert one.where(2) is None
    assert (
        one.why(2)
        == "here: an error; server 1: no answer; server 2: damaged again; server 3: it cannot read it"
    )


def test_files_that_others_have_are_copied_before_the_source_is_read() -> None:
    one = Staging(files_of(4), server=0, servers=3)
    one.holder(2)
    assert one.where(0) == Step(2, patient=False)
    one.looked(0, 2)
    assert one.where(0) == Step(0, patient=True)
    one.lost(2, "no answer")
    assert one.where(3) == Step(0, patient=True)


def test_a_file_that_comes_twice_is_counted_once() -> None:
    one = Staging(files_of(3), server=0, servers=2)
    for _ in range(2):
        one.hold(0, "sum")
    assert one.held_of(0) == 1
    assert not one.complete


@given(st.integers(0, 5), st.integers(0, 5))
def test_lists_are_the_same_if_and_only_if_their_digests_are(one: int, other: int) -> None:
    same = manifest_digest(files_of(one)) == manifest_digest(files_of(other))
    assert same == (one == other)
    assert (first_difference(files_of(one), files_of(other)) is None) == same


def test_the_first_difference_is_named() -> None:
    one, other = files_of(3), files_of(3)
    other[1] = File("class/1.png", 7)
    assert first_difference(one, other) == "class/1.png of 1 bytes here, class/1.png of 7 bytes there"
    assert first_difference(one[:2], one) == "no further file here, class/2.png of 2 bytes there"


@pytest.mark.parametrize("server", [-1, 3])
def test_a_number_beyond_the_list_is_refused(server: int) -> None:
    with pytest.raises(ValueError, match=f"server must be within 0 and 2, not {server}"):
        Staging(files_of(1), server=server, servers=3)
