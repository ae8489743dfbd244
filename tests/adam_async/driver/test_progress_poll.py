"""A role that does not answer is an event after two polls, and its return is another event."""

from adam_async.driver.progress_poll import Silence

NODES = ("ps-0", "worker-0")


def test_a_silent_role_is_noted_once_and_noted_again_when_it_is_back() -> None:
    silence = Silence()
    assert silence.observe(NODES, NODES, asked_at=9.0, now=9.1) == []
    assert silence.observe(NODES, ["worker-0"], asked_at=10.0, now=11.0) == []
    assert silence.shown(11.0) == ()
    assert silence.observe(NODES, ["worker-0"], asked_at=12.0, now=13.0) == ["ps-0 has not answered for 3 s"]
    assert silence.observe(NODES, ["worker-0"], asked_at=14.0, now=15.0) == []
    assert silence.shown(15.0) == ("ps-0 for 5 s",)
    assert silence.observe(NODES, NODES, asked_at=20.0, now=20.1) == ["ps-0 answers again, after 10 s"]
    assert silence.shown(20.1) == ()


def test_one_poll_without_an_answer_is_no_event() -> None:
    silence = Silence()
    events = [silence.observe(NODES, answered, asked_at=1.0, now=2.0) for answered in ((), NODES, ())]
    assert events == [[], [], []]


def test_a_lost_role_is_not_silent_any_more() -> None:
    silence = Silence()
    for _ in range(2):
        silence.observe(NODES, (), asked_at=1.0, now=2.0)
    assert silence.observe(["worker-0"], ["worker-0"], asked_at=3.0, now=3.0) == [
        "worker-0 answers again, after 2 s"
    ]
    assert silence.shown(3.0) == ()
