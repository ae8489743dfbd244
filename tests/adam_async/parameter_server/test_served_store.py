"""A bundle on one server: questions that waited for room are checked again."""

from types import SimpleNamespace

import pytest

from adam_async.messages import Push
from adam_async.parameter_server.served_store import ServedStore

PUSH = Push(
    store="s",
    session=1,
    incarnation=1,
    replica=0,
    clock=1,
    weight=1,
    rate=0.1,
    generation=1,
    parts=(),
    shards=(),
    numbers=(),
    versions=(),
    own_applied=(),
    pull=True,
)


class HeldRequest:
    """A request for which the budgets have no room until the test says so."""

    def charge(self, nbytes, then):
        self.go_on = then

    def fail(self, code, text):
        self.refusal = code


@pytest.fixture
def served(monkeypatch):
    """The primary of a bundle with copies, without its state."""
    store = object.__new__(ServedStore)
    store.home, store.is_primary, store._missing = "ps-0", True, set()
    store._copy = SimpleNamespace(is_stuck=False)
    store._host = SimpleNamespace(node="ps-0", me=("ps-0", 1))
    store._record = SimpleNamespace(primary=("ps-1", 1))
    store.state = SimpleNamespace(shards={}, bundle=SimpleNamespace(group=lambda shards: None))
    store.taken = []
    monkeypatch.setattr(ServedStore, "_take", lambda store, request, body: store.taken.append(body))
    return store


def test_a_push_that_waited_for_room_is_taken_by_the_primary(served):
    request = HeldRequest()
    served.answer(request, PUSH)
    assert served.taken == []
    request.go_on()
    assert served.taken == [PUSH]


def test_a_push_that_waited_for_room_is_refused_once_another_server_is_the_primary(served):
    request = HeldRequest()
    served.answer(request, PUSH)
    served.is_primary = False
    request.go_on()
    assert (served.taken, request.refusal) == ([], "not-primary")
