"""TOML text beyond the bounds: an error with the file, and quickly."""

import pytest

from adam_async.errors import ConfigError
from adam_async.model.toml_text import MOST_DEPTH, read_toml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 100000000000000000000000", "'epochs' has a number beyond 64 bits"),
        ("epochs = -9223372036854775809", "'epochs' has a number beyond 64 bits"),
        ("epochs = 0x" + "f" * 5000, "'epochs' has a number beyond 64 bits"),
        ("[waits]\nsizes = [1, [2, 18446744073709551616]]", "'sizes' has a number beyond 64 bits"),
        ("epochs = " + "9" * 5000, "number of thousands of digits"),
        ("a = " + "[" * 8000, "more than 32 tables or lists within each other"),
        ("a = " + "[" * 40 + "]" * 40, "more than 32 tables or lists within each other"),
        ("a = " + "{a = " * 2000, "more than 32 tables or lists within each other"),
        ("\n" * 3 + "[" + ".".join("a" * 2000) + "]", "line 4 has a key of more than 32 parts"),
        (" . ".join(["'a'"] * 2000) + " = 1", "line 1 has a key of more than 32 parts"),
        ("a = 1\nb = '" + "x" * 20000 + "'", "line 2 has 20004|line 2 has 20006"),
        ("#\n" * (1 << 19) + "#", "has 1048577 characters, expected at most 1048576"),
        ("a = 1\n[b", "is not TOML: "),
    ],
)
def test_text_beyond_a_bound_is_refused_with_its_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^adam.toml.*({message})"):
        read_toml(text, "adam.toml")


def test_values_at_the_bounds_are_read() -> None:
    depth = MOST_DEPTH - 1
    text = f"least = -9223372036854775808\nmost = 18446744073709551615\ndeep = {'[' * depth}1{']' * depth}\n"
    assert read_toml(text + "# " + "1.2." * 9, "adam.toml")["most"] == (1 << 64) - 1
