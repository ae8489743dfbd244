"""What the documents name is there: every file, and a row for each mechanism of the paper."""

import json
import re
from pathlib import Path
from runpy import run_path

import pytest

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


def test_the_map_has_one_row_for_each_mechanism_and_each_has_a_state() -> None:
    rows = re.findall(r"^\| AD-(\d+) \|(.+)\|$", (ROOT / "docs" / "paper-map.md").read_text(), re.MULTILINE)

    assert [int(number) for number, _ in rows] == MECHANISMS
    for number, row in rows:
        _, state, here = row.split("|")
        assert state.strip() in {"done", "stands in", "not yet"}, f"AD-{number}"
        assert here.strip(), f"AD-{number}"
        if state.strip() == "done":
            assert any(FILE_OR_FOLDER.match(name) for name in CODE.findall(here)), (
                f"AD-{number} names no file"
            )


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
    named = guards((ROOT / "ARCHITECTURE.md").read_text())

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
