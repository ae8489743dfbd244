"""A watch notes silences of roles, and asks all roles at once."""

from adam_async.driver.cluster_watch import Silence
from adam_async.driver.events import RunEvents
from adam_async.report.stream import EventStream, texts

NODES = ("ps-0", "worker-0")


def silence() -> tuple[Silence, list[str]]:
    stream, noted = EventStream(), list[str]()
    stream.listen(texts(noted.append))
    return Silence(RunEvents(stream)), noted


async def test_a_silent_role_is_noted_once_and_noted_again_when_it_is_back() -> None:
    watched, noted = silence()
    watched.observe(NODES, NODES, asked_at=9.0, now=9.1)
    watched.observe(NODES, ["worker-0"], asked_at=10.0, now=11.0)
    assert (noted, watched.shown(11.0)) == ([], ())
    watched.observe(NODES, ["worker-0"], asked_at=12.0, now=13.0)
    watched.observe(NODES, ["worker-0"], asked_at=14.0, now=15.0)
    assert noted == ["ps-0 has not answered for 3 s"]
    assert watched.shown(15.0) == ("ps-0 for 5 s",)
    watched.observe(NODES, NODES, asked_at=20.0, now=20.1)
    assert noted[1:] == ["ps-0 answers again, after 10 s"]
    assert watched.shown(20.1) == ()


async def test_one_poll_without_an_answer_is_no_event() -> None:
    watched, noted = silence()
    for answered in ((), NODES, ()):
        watched.observe(NODES, answered, asked_at=1.0, now=2.0)
    assert noted == []


async def test_a_lost_role_is_not_silent_any_more() -> None:
    watched, noted = silence()
    for _ in range(2):
        watched.observe(NODES, (), asked_at=1.0, now=2.0)
    noted.clear()
    watched.observe(["worker-0"], ["worker-0"], asked_at=3.0, now=3.0)
    assert noted == ["worker-0 answers again, after 2 s"]
    assert watched.shown(3.0) == ()
