"""The page of constants says what the code says, and each bound and time has a text with its unit."""

import re

from tests.constants_page import PAGE, SECONDS, SIZE, bounds, numbers, options, page


def test_the_page_of_constants_is_made_from_the_code() -> None:
    assert PAGE.read_text() == page(), "python -m tests.constants_page > docs/reference/constants.md"


def test_each_bound_and_time_has_a_text_of_its_own() -> None:
    assert [f"{each.file}: {each.name}" for each in bounds() if not each.text] == []


def test_the_text_of_a_time_and_of_a_size_names_its_unit() -> None:
    units = ((SECONDS, r"[Ss]econds"), (SIZE, r"[Bb]ytes?\b|[KMGT]i?B\b"))
    wrong = [
        f"{each.file}: {each.name}"
        for each in bounds()
        for form, unit in units
        if form.fullmatch(each.name) and not re.search(unit, each.text)
    ]

    assert wrong == []


def test_a_constant_that_is_the_default_of_an_option_names_it() -> None:
    assert options()["SHARD_BYTES"] == ["shard_bytes"]
    assert options()["FLUSH_S"] == ["flush_s"]


def test_a_number_made_from_numbers_of_other_files_has_its_value() -> None:
    found = {each.name: each.value for each in numbers()}

    assert found["MOST_CLIENTS"] == 16 or found["MOST_CLIENTS"] == 1 << 20
    assert found["SHARD_BYTES"] == 1 << 20
