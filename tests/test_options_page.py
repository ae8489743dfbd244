"""The page of options says what the fields of `Config` say, and each option is complete at its field."""

from adam_async.option_types import Idle, Not, Only, options_of
from adam_async.run.config import MODES, OPTIONS, Config
from adam_async.run.option_sources import PLAIN, from_environment, make_config, variable_of
from adam_async.store.arguments import OpenArguments
from tests.options_page import PAGE, STORE_PAGE, argument_table, page, text_of


def test_the_page_of_options_is_made_from_the_fields() -> None:
    assert PAGE.read_text() == page(), "python -m tests.options_page > docs/reference/options.md"


def test_the_table_of_a_store_is_made_from_the_arguments_of_its_opening() -> None:
    assert argument_table() in STORE_PAGE.read_text(), "python -m tests.options_page store"
    assert [name for name in options_of(OpenArguments) if not text_of(OpenArguments).get(name)] == []


def test_each_option_has_a_text() -> None:
    assert [name for name in OPTIONS if not text_of(Config).get(name)] == []


def test_the_page_shows_every_mode_that_an_option_names() -> None:
    named = {
        fact.mode for option in OPTIONS.values() for kind in (Only, Not, Idle) for fact in option.all(kind)
    }
    assert named == set(MODES)


def test_a_mode_that_an_option_selects_names_an_option_and_a_cure() -> None:
    needed = {only.mode for option in OPTIONS.values() for only in option.all(Only)}
    excluding = {fact.mode for option in OPTIONS.values() for fact in option.all(Not)}
    assert all(mode.enter for mode in needed)
    assert all(mode.leave for mode in excluding)
    assert {mode.option for mode in MODES} <= {"", *OPTIONS}


def test_a_variable_sets_each_plain_option_to_its_default() -> None:
    assert make_config(from_environment({variable_of("epochs"): "0"})) == Config()
    assert len(PLAIN) == len(OPTIONS) - 1
