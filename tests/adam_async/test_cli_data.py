"""What a user sees of a download, and where it is kept."""

import io

from rich.console import Console

from adam_async.cli_data import Downloads, cache_folder, data_folder


def shown(*news: tuple[str, int, int | None], terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with Downloads(console) as downloads:
        for each in news:
            downloads.on_bytes(*each)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_log_gets_one_line_for_each_download() -> None:
    text = shown(
        ("https://a/file.gz", 1, 9_900_000),
        ("https://a/file.gz", 2, 9_900_000),
        ("b", 1, None),
        terminal=False,
    )

    assert text == "downloading https://a/file.gz (9.9 MB)\ndownloading b\n"


def test_a_terminal_gets_a_bar_that_moves_and_goes() -> None:
    text = shown(("https://a/f", 25_000, 100_000), ("https://a/f", 75_000, 100_000), terminal=True)

    assert "downloading https://a/f" in text
    assert text.index("25.0/100.0 kB") < text.index("75.0/100.0 kB")
    assert text.endswith("\x1b[2K")  # the line is cleared


def test_nothing_is_shown_where_nothing_is_downloaded() -> None:
    assert shown(terminal=True) == shown(terminal=False) == ""


def test_downloads_are_kept_in_the_users_cache() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}).as_posix() == "/caches/adam-async/mnist"
    assert cache_folder({"HOME": "/home/u"}).as_posix() == "/home/u/.cache/adam-async/mnist"
    assert data_folder({"ADAM_DATA_DIR": ""}) is None
    assert str(data_folder({"ADAM_DATA_DIR": "/data"})) == "/data"
