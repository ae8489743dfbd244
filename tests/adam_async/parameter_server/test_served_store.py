"""A bundle on one server: questions that waited for room are checked again."""

from copy import copy
from types import SimpleNamespace

import pytest

from adam_async.parameter_server.served_store import ServedStore, words_of
from adam_async.run.store_record import served_word
from tests.adam_async.parameter_server.timelines import push_on

PUSH = push_on((), parts=(), pull=True)


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
    store.home, store.is_primary, store._missing, store._is_over = "ps-0", True, set(), False
    store.store = SimpleNamespace(id="s")
    store._answers = SimpleNamespace(refuse=lambda code, text: None)
    store.short = SimpleNamespace(end=lambda: None, take=lambda request, push, charged: False)
    store._saver, store._compilations, store.mapped = None, [], None
    store._copy = SimpleNamespace(is_stuck=False)
    store._host = SimpleNamespace(node="ps-0", me=("ps-0", 1), disk=None)
    store._record, store.sheets = SimpleNamespace(primary=("ps-1", 1)), SimpleNamespace(end=lambda: None)
    bundle = SimpleNamespace(group=lambda shards: None, end_pin=lambda: None)
    store.state = SimpleNamespace(shards={}, bundle=bundle, end=list)
    store.taken = []
    monkeypatch.setattr(ServedStore, "_perform", lambda store, effects: None)
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


def test_a_push_that_waited_for_room_is_refused_once_its_store_has_left(served):
    request = HeldRequest()
    served.answer(request, PUSH)
    served.end()
    request.go_on()
    assert (served.taken, request.refusal) == ([], "wrong-run")


def test_a_server_serves_a_store_once_all_bundles_of_which_it_is_the_primary_have_values(served):
    other = copy(served)
    served.store = other.store = SimpleNamespace(id="s", generation=1)
    served.is_primary, served._missing, served._record = False, {1}, SimpleNamespace(primary=("ps-0", 1))
    assert other.complete
    assert words_of([served, other]) == (), "no values of the first bundle have arrived"
    served._record = SimpleNamespace(primary=("ps-1", 1))
    assert words_of([served, other]) == (served_word(served.store),), "the other primary has to say so"
    served.is_primary, served._missing, served._record = True, set(), other._record
    assert words_of([served, other]) == (served_word(served.store),)
