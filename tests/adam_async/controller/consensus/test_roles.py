"""The table of transitions is complete, and the document shows it as it is."""

from pathlib import Path

from adam_async.controller.consensus.core import HANDLERS
from adam_async.controller.consensus.roles import TRANSITIONS, Cause, Role, diagram

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "explanation" / "consensus.md"


def test_the_document_shows_the_table():
    assert f"```mermaid\n{diagram()}\n```" in DOCUMENT.read_text()


def test_every_role_can_be_reached_and_left():
    assert {role for role, _ in TRANSITIONS} == set(Role) == set(TRANSITIONS.values())
    assert {cause for _, cause in TRANSITIONS} == set(Cause)


def test_every_role_knows_what_to_do_with_everything():
    assert all(set(row) == set(Role) for row in HANDLERS.values())
