"""What a parent reads from its children."""

from adam_async.child_process import address_in, address_line, how_it_ended


def test_a_role_line_tells_the_address_to_people_and_parents() -> None:
    line = address_line("ps-0", "tcp://[::1]:70", "adam-async data --controller tcp://[::1]:71")

    assert line == (
        "ps-0 listens on tcp://[::1]:70; join it with: adam-async data --controller tcp://[::1]:71"
    )
    assert address_in(line) == "tcp://[::1]:70"


def test_a_role_that_nobody_can_join_says_no_more_than_where_it_is() -> None:
    line = address_line("controller-1", "tcp://127.0.0.1:70", "")

    assert line == "controller-1 listens on tcp://127.0.0.1:70"
    assert address_in(line) == "tcp://127.0.0.1:70"


def test_other_lines_hold_no_address() -> None:
    assert address_in("worker-0 is here") == ""


def test_how_a_child_ended_is_said_in_words() -> None:
    assert how_it_ended(-9) == "killed by signal 9"
    assert how_it_ended(5) == "ended with exit code 5"
