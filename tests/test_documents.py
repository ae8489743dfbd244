"""Documents name existing files, and have a row for each mechanism of the paper."""

import ast
import json
import re
from pathlib import Path
from runpy import run_path

import pytest

from adam_async.messages.body import ROLES
from adam_async.messages.table import BY_NAME, TABLE
from transport.handshake import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
FOLDERS = ("dataflow", "transport", "adam_async", "tests", "benchmarks", "examples", "docs", ".ci")

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FILE_OR_FOLDER = re.compile(rf"^(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*$")

MECHANISMS = [
    *range(1, 8),
    *range(10, 26),
    *range(30, 37),
    *range(40, 49),
    *range(50, 55),
    *range(60, 69),
    70,
    71,
]


def named_files(document: Path, root: Path) -> list[Path]:
    """Return what a document names: links from its own folder, code that looks like a path from the root."""
    text = document.read_text()
    links = [document.parent / target for target in LINK.findall(text) if "://" not in target]
    return links + [root / name for name in CODE.findall(text) if FILE_OR_FOLDER.match(name)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    missing = [str(path) for path in named_files(ROOT / document, ROOT) if not path.exists()]

    assert missing == []


def test_a_missing_file_would_be_noticed(tmp_path: Path) -> None:
    document = tmp_path / "docs" / "map.md"
    document.parent.mkdir()
    document.write_text(
        "See `adam_async/gone.py`, `transport/`, [a record](decisions/1.md#why), [home](https://a.org), "
        "`push_every`, `adam-async train`, `tcp://HOST:PORT`.\n"
    )

    assert named_files(document, tmp_path) == [
        tmp_path / "docs" / "decisions" / "1.md",
        tmp_path / "adam_async" / "gone.py",
        tmp_path / "transport",
    ]


ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "dataflow/__init__.py",
        ROOT / "transport/__init__.py",
        *ROOT.glob("adam_async/*/**/__init__.py"),
        ROOT / "tests/simulation/__init__.py",
        ROOT / "tests/drill/__init__.py",
    )
)
GUIDED_LINES = 100
"""Minimum number of lines of the files that the guide of a room has to name."""
FILE_IN_ROOM = re.compile(r"(?<![\w./-])(\w+\.py|\w+/)(?![\w./])")


def guide_of(room: Path) -> tuple[set[str], set[str]]:
    """Return the files and folders that the docstring of a room names, and those that it has to name."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    needed = {path.name for path in room.glob("*.py") if len(path.read_text().splitlines()) >= GUIDED_LINES}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    return set(FILE_IN_ROOM.findall(text)), (needed | folders) - {"__init__.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_the_guide_of_a_room_names_its_files_and_no_others(room: str) -> None:
    named, needed = guide_of(ROOT / room)

    assert needed <= named
    assert [name for name in sorted(named) if not (ROOT / room / name).exists()] == []


def test_a_file_that_a_guide_leaves_out_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(
        '"""A room.\n\n    here.py    the files, and gone.py; see other/here.py.\n"""\n'
    )
    for name, lines in (("here", 9), ("large", GUIDED_LINES), ("small", 9)):
        (tmp_path / f"{name}.py").write_text("\n" * lines)

    assert guide_of(tmp_path) == ({"here.py", "gone.py"}, {"large.py"})


RELATIVES = {"DB": 19, "GP": 18, "RP": 9, "DS": 7, "LG": 11, "BL": 10, "CL": 11, "SV": 6, "AE": 13, "AT": 16}
"""Number of the last id of each other table of facts; all begin with 1."""


def test_the_map_has_one_row_for_each_id_and_each_has_a_state() -> None:
    text = (ROOT / "docs" / "reference" / "paper-map.md").read_text()
    rows = re.findall(r"^\| ((?:[A-Z]{2}-\d+(?:, )?)+) \|(.+)\|$", text, re.MULTILINE)
    ids = [(name, int(number)) for names, _ in rows for name, number in re.findall(r"([A-Z]+)-(\d+)", names)]

    wanted = {("AD", number) for number in MECHANISMS}
    wanted |= {(name, number) for name, last in RELATIVES.items() for number in range(1, last + 1)}
    assert [each for each in ids if each[0] == "AD"] == [("AD", number) for number in MECHANISMS]
    assert sorted(ids) == sorted(wanted)
    for names, row in rows:
        _, state, here = row.split("|")
        assert state.strip() in {"done", "stands in", "not yet", "measured"}, names
        assert here.strip() or state.strip() == "not yet", names
        if state.strip() == "done":
            assert any(FILE_OR_FOLDER.match(name) for name in CODE.findall(here)), f"{names} names no file"


def guards(text: str) -> list[tuple[str, str]]:
    """Return (test, file) for each test named in a table; a test is in the file that is named next."""
    found: list[tuple[str, str]] = []
    waiting: list[str] = []
    for name in CODE.findall("\n".join(line for line in text.splitlines() if line.startswith("| "))):
        if re.fullmatch(r"test_\w+", name):
            waiting.append(name)
        elif waiting and name.startswith("tests/"):
            found += [(test, name) for test in waiting]
            waiting.clear()
    return found + [(test, "") for test in waiting]


def test_every_test_that_guards_an_invariant_is_where_the_table_says() -> None:
    named = guards((ROOT / "docs" / "explanation" / "invariants.md").read_text())

    assert len(named) >= 15
    for test, file in named:
        assert file, f"no file is named for {test}"
        assert f"def {test}(" in (ROOT / file).read_text(), f"{test} is not in {file}"


def test_a_test_without_its_file_would_be_noticed() -> None:
    text = "| 1 | x | `test_a`, `test_b` in `tests/x.py` |\n| 2 | y | `test_c` |\n`test_d` in prose\n"

    assert guards(text) == [("test_a", "tests/x.py"), ("test_b", "tests/x.py"), ("test_c", "")]


def test_the_picture_is_what_its_script_draws() -> None:
    folder = ROOT / "docs" / "images"

    assert run_path(str(folder / "draw_roles.py"))["picture"]() == (folder / "roles.svg").read_text()


def test_the_picture_of_staleness_is_what_its_script_draws_from_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = ROOT / "docs" / "images"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # or the script would set it, for all tests that follow
    script = run_path(str(ROOT / "benchmarks" / "staleness_plot.py"))

    drawn = script["picture"](json.loads((folder / "staleness.json").read_text()))

    assert drawn == (folder / "staleness.svg").read_text()


@pytest.mark.parametrize("record", [name for name in DOCUMENTS if name.startswith("docs/decisions/")])
def test_every_decision_says_what_would_change_it(record: str) -> None:
    text = (ROOT / record).read_text()

    assert re.match(r"# \d+\. .+\n\n\d{4}-\d\d-\d\d\n", text)
    for part in ("Context.", "Choice.", "Consequences.", "What would change our mind."):
        assert f"**{part}**" in text


def test_each_decision_has_its_own_number() -> None:
    files = sorted((ROOT / "docs" / "decisions").iterdir())

    for number, file in enumerate(files, 1):
        assert file.name.startswith(f"{number:04}-")
        assert file.read_text().startswith(f"# {number}. ")


SPACED = re.compile(r"(?<![\w.])\d{1,3}(?: \d{3})+(?!\w)")
"""A number with spaces between its thousands; the style of all others is 60,000."""


def test_the_page_of_the_protocol_has_its_version() -> None:
    page = (ROOT / "docs/reference/protocol.md").read_text()
    assert f"`TLNKHAND`, the version (u16, {PROTOCOL_VERSION})" in page


def test_the_page_of_the_protocol_has_the_messages_to_servers_with_their_senders() -> None:
    page = (ROOT / "docs/reference/protocol.md").read_text()
    rows = re.findall(r"^\| `([A-Z]\w+)`: .* \| `([A-Z]\w+)` \| (.*) \|$", page, re.M)
    listed = {asked: set(ROLES).intersection(CODE.findall(roles)) for asked, _, roles in rows}
    assert {answer for _, answer, _ in rows} <= BY_NAME.keys()
    assert listed == {name: {sender for sender, to in TABLE[BY_NAME[name]] if to == "ps"} for name in listed}
    assert len(listed) >= 16


@pytest.mark.parametrize("text", ["60 000 images", "12 354 176", "(1 437)"])
def test_a_number_with_spaces_would_be_found(text: str) -> None:
    assert SPACED.search(text)
    assert not SPACED.search(text.replace(" ", ","))


def test_thousands_are_separated_by_commas_in_every_text() -> None:
    bytes_of_a_picture = "tests/adam_async/checkpoint/test_model_file.py"
    texts = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    files = [*ROOT.glob("*.md"), *(path for path in texts if path.suffix in (".md", ".py"))]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if str(path.relative_to(ROOT)) not in (bytes_of_a_picture, "tests/test_documents.py")
        for match in SPACED.finditer(path.read_text())
    ]
    assert len(files) > 500
    assert found == []
