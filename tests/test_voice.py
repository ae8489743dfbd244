"""The voice of docstrings, help texts and pages, and the words of names, as far as a test can read them.

A sentence begins with a named thing, not with a pronoun that stands for one; names in the product code use
the standard terms of the field. This lists the violations in some files or folders, or in all:

    python tests/test_voice.py adam_async/driver docs
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("dataflow", "transport", "adam_async", "tests/drill", "tests/simulation")
"""Folders in which names are checked. Docstrings are checked in `CODE` too."""

CODE = (*PRODUCT, "benchmarks", "examples", "tests")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs")
"""Pages, or folders of pages. CHANGELOG.md is history, and so are the decisions."""

HISTORY = ("docs/decisions/", "benchmarks/results/", "tests/golden/")

PRONOUN = re.compile(
    r"(?:(?:Of|To|From|For|By|With|In|On|At) )?(?:Whom|Whose)\b"
    r"|(?:Of|To|From|For|By|With|In|On|At) which\b"
    r"|(?:Who|Whoever|Whomever|What|Whatever)\b"
    r"|(?:Somebody|Someone|Nobody|Everybody|Everyone|Anybody|Anyone|No one)\b"
    r"|That\b",
    re.IGNORECASE,
)
"""Begin of a sentence whose subject is a pronoun or a relative clause."""

NO_NAME = re.compile(r"\b(?:some|no|every|any)(?:body|one)\b|\bno one\b|\bwho(?:m?ever|m)\b", re.IGNORECASE)
"""Pronoun that stands for a thing without a name, anywhere in a sentence; tests may have it."""

SENTENCE = re.compile(r"(?<=[^.][.?!])[\"')`*]*\s+(?=[\"'(`*]*[A-Z])|(?<=:)\s+(?=[A-Z])|\n\s*\n")
ENTRY = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*[\w*, ]+: (?=[(`]*[A-Z])")
"""The mark of a list, or the name before a description in a section such as `Args:`."""

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True, slots=True)
class OldWord:
    """A word that names in the product code no longer use.

    Args:
        words: The word and its forms.
        instead: Standard term for its old meaning.
        within: Begins of the paths in which the word is refused.
        allowed: Begins of the paths in which the word has another meaning.
        whole: Whether only whole names are refused, and not parts of them.
    """

    words: tuple[str, ...]
    instead: str
    within: tuple[str, ...] = ("",)
    allowed: tuple[str, ...] = ()
    whole: bool = False

    def is_in(self, name: str) -> bool:
        """Whether a name has one of the words."""
        if self.whole:
            return name.strip("_") in self.words
        return not words_in(name).isdisjoint(self.words)


@cache
def words_in(name: str) -> frozenset[str]:
    """Return the words of a name in snake or camel case, in lower case."""
    return frozenset(word.lower() for word in WORD.findall(name))


def old(words: str, instead: str, *, within: str = "", allowed: str = "", whole: bool = False) -> OldWord:
    return OldWord(
        tuple(words.split()), instead, tuple(within.split()) or ("",), tuple(allowed.split()), whole
    )


KEPT = frozenset({"meet_s", "neighbours"})
"""Names of options and counts, which stay as users have them."""


OLD_WORDS = (
    old("lender lenders lending", "dealer"),
    old("keeper keepers", "data server"),
    old("door doors", "listener"),
    old("knock knocks", "connect"),
    old("seat seats seated", "membership, joined"),
    old("life lives", "replica generation, or what it is of: a process, a connection"),
    old("muster herald", "readiness, status log"),
    old(
        "stretch stretches",
        "phase",
        # Ranges of memory:
        allowed="adam_async/parameter_server/apply",
    ),
    old("meet meets met meeting", "sync clock, or connect"),
    old("jump jumps jumped", "clock skip", allowed="adam_async/controller/consensus/"),  # of a term
    old("say says said tell tells told untold", "send, sent, report, unreported"),
    old("shelf shelve shelves", "pool"),
    old("stock supply tempo", "cache, producer, limits"),
    old("visitor visitors stranger strangers honest", "bad, unauthenticated and transport clients"),
    old("crew drive drives", "process pool, disk model"),
    old("campaign", "runner", allowed="adam_async/controller/consensus/"),  # for votes
    old("story stories", "event, or what it is of: a scenario"),
    old(
        "held",
        "pending contributions",
        within="adam_async/parameter_server/",
        # Entries that a member of a bundle has, and their acknowledgement:
        allowed="adam_async/parameter_server/replication/ adam_async/parameter_server/offered_pieces",
    ),
    old("own", "own_applied", within="adam_async/parameter_server/ adam_async/messages/", whole=True),
    old("look", "map_changed", within="adam_async/worker/ adam_async/parameter_server/", whole=True),
    old("turn turns", "round", within="adam_async/run/ adam_async/data_server/state"),
    old("turn turns", "iteration of the loop", within="adam_async/runtime/trace_events"),
    old("stage stages", "pass over images", within="adam_async/data_server/transforms/"),
    old("stage stages", "section of the backward pass", within="adam_async/worker/"),
    old("neighbour neighbours", "peer worker", within="adam_async/worker/"),
    old("suspicion", "failure detector"),
    old("machine", "replicated state", within="adam_async/controller/ tests/simulation/checkers/"),
    old("LeaderLink", "LeaderConnection", whole=True),
    old("LeaseLog", "ReplicaLeases", whole=True),
    old("WorkerPlace", "WorkerSlot", whole=True),
    old(
        "Place",
        "StepPosition, Index, Extent, WorkerSlot",
        # Of a role in its cluster:
        allowed="adam_async/cluster/roles adam_async/cli/roles adam_async/store/",
        whole=True,
    ),
    old(
        "Dice",
        "RandomStream, RandomSource",
        within="tests/simulation/ adam_async/runtime/ transport/",
        whole=True,
    ),
    old("Record Recorded RecordArrived", "ReportSteps, LogFileRecord, MapRecord", whole=True),
)
"""Words that names had before: parts of a name in snake or camel case, in any case; or whole names."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose; entries of lists and cells of tables begin sentences of their own."""
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            yield from (each for cell in cells for each in SENTENCE.split(cell) if each)
            continue
        mark = ENTRY.match(line)
        if (mark or not line.strip() or line.startswith("#")) and paragraph:
            yield from (
                " ".join(each.split()) for each in SENTENCE.split("\n".join(paragraph)) if each.strip()
            )
            paragraph = []
        paragraph.append(line[mark.end() :] if mark else line.lstrip("# "))
    yield from (each for each in paragraph if each)


def begins_badly(sentence: str) -> bool:
    """Whether the subject of a sentence is a pronoun or a relative clause; a question may begin with one."""
    plain = sentence.lstrip("\"'(*_> ")
    capital = plain[:1].isupper()
    return capital and PRONOUN.match(plain) is not None and not plain.rstrip("\"')*_").endswith("?")


def says_nobody(path: str, sentence: str) -> bool:
    """Whether a sentence of the product, the pages or the benchmarks has a pronoun of `NO_NAME`."""
    return not path.startswith("tests/") and NO_NAME.search(sentence) is not None


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment; lines of their own that follow one another are one text."""
    last, text = 0, ""
    if "#" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if text and not (line == last + 1 and token.line.lstrip().startswith("#")):
            yield last, text
            text = ""
        last, text = line, f"{text}\n{token.string.lstrip('#! ')}"
    if text:
        yield last, text


@lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """Return the tree of a file; that of the newest file is kept."""
    return ast.parse(source)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, those of constants and fields too, and of every `help=`."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case ast.keyword(arg="help" | "help_epilogue", value=ast.Constant(value=str(text))):
                yield node.value.lineno, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every name that a file makes or uses."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    kept, fenced = [], False
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            kept.append(line)
    return "\n".join(kept)


def voice_violations(path: str, source: str) -> list[str]:
    """Return the sentences of one file that begin with a pronoun, or say nobody.

    Args:
        path: From the root of the repository; its suffix decides how the file is read.
        source: Its text.
    """
    if path.endswith(".py"):
        remarks = () if path.startswith("tests/") else comments(source)
        texts = [*docstrings(parsed(source)), *remarks]
    else:
        texts = [(0, prose(source))]
    return [
        f"{path}{f':{line}' if line else ''}: begin with a named thing: {sentence[:70]!r}"
        for line, text in texts
        for sentence in sentences(text)
        if begins_badly(sentence) or says_nobody(path, sentence)
    ]


def name_violations(path: str, source: str) -> list[str]:
    """Return the names in one file of the product that have an old word in them."""
    rows = [
        row
        for row in OLD_WORDS
        if path.startswith(row.within) and not (row.allowed and path.startswith(row.allowed))
    ]
    lines: dict[str, int] = {}
    for line, name in names(parsed(source)):
        lines.setdefault(name, line)
    return [
        f"{path}:{lines[name]}: {name!r} has an old word; write: {row.instead}"
        for name in lines.keys() - KEPT
        for row in rows
        if row.is_in(name)
    ]


def files(*folders: str, suffix: str) -> list[str]:
    paths = [ROOT / folder for folder in folders]
    found = {each for path in paths for each in ([path] if path.is_file() else path.rglob(f"*{suffix}"))}
    names = sorted(path.relative_to(ROOT).as_posix() for path in found if path.suffix == suffix)
    return [name for name in names if not name.startswith(HISTORY)]


@cache
def checked_files() -> list[str]:
    return [*files(*CODE, suffix=".py"), *files(*PAGES, "benchmarks", suffix=".md")]


def violations(path: str) -> list[str]:
    """Return the violations of one file of the repository."""
    source = (ROOT / path).read_text()
    names_too = path.startswith(PRODUCT) and path.endswith(".py")
    return voice_violations(path, source) + (name_violations(path, source) if names_too else [])


def room_of(path: str) -> str:
    """Return the folder by which a file is checked: that of a room, or of a package; all pages are one."""
    parts = path.split("/")
    depth = 3 if path.startswith("tests/") else 2
    return "/".join(parts[: min(depth, len(parts) - 1)]) if path.endswith(".py") else "pages"


ROOMS = sorted({room_of(path) for path in checked_files()})


def test_there_are_files_to_check() -> None:
    assert len(files(*CODE, suffix=".py")) > 300
    assert len(files(*PAGES, suffix=".md")) > 10


@pytest.mark.parametrize("room", ROOMS)
def test_every_sentence_begins_with_a_named_thing_and_no_name_is_an_old_word(room: str) -> None:
    own = [path for path in checked_files() if room_of(path) == room]

    assert [found for path in own for found in violations(path)] == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Who comes back connects.",
        "Whom to wait for the server hears from the controllers.",
        "Whoever reads it.",
        "Whose kernels are timed: a named model.",
        "What is sent.",
        "Somebody who reads it.",
        "Nobody is told.",
        "Everybody waits.",
        "That are served at a time.",
        "That costs little.",
        "Of whom a leader has heard nothing is lost.",
        "Of which each starts the rest.",
        "To whom it goes.",
        "(What it costs is measured.)",
    ],
)
def test_a_sentence_that_begins_with_a_pronoun_is_found(sentence: str) -> None:
    claim = f"A push is counted. {sentence}"

    assert len(voice_violations("x.py", f'"""{claim}"""')) == 1
    assert len(voice_violations("x.py", f'LIMIT = 1\n"""{sentence}"""')) == 1
    assert (
        len(voice_violations("x.py", f'def f(x):\n    """Do.\n\n    Args:\n        x: {sentence}\n    """'))
        == 1
    )
    assert len(voice_violations("x.py", f"app = App(help={sentence!r})")) == 1
    assert len(voice_violations("x.md", f"# Title\n\n{claim}\n")) == 1
    assert len(voice_violations("x.md", f"- {sentence}\n- Another.\n")) == 1
    assert len(voice_violations("x.md", f"| {sentence} | `b` |\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "What happens when a data server dies?",
        "The leader decides what is sent.",
        "A push is counted, e.g. what is sent.",
        "Peers:\nthe leader tells each what to do.",
    ],
)
def test_other_sentences_are_left_alone(text: str) -> None:
    assert voice_violations("x.py", f'"""{text}"""') == []
    assert voice_violations("x.md", text) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "The leader sends it to whoever asks.",
        "A lease that nobody asked for is dropped.",
        "The peer whom it knows.",
        "An answer for no one in particular.",
        "Somebody's push.",
    ],
)
def test_a_pronoun_without_a_name_is_found_anywhere_but_in_tests(sentence: str) -> None:
    assert len(voice_violations("x.py", f'"""{sentence}"""')) == 1
    assert len(voice_violations("x.py", f"x = 1  # {sentence}")) == 1
    assert len(voice_violations("x.py", f"# A push is counted.\n# {sentence}\nx = 1")) == 1
    assert len(voice_violations("x.md", sentence)) == 1
    assert voice_violations("tests/x.py", f'"""The claim. {sentence.lower()}"""') == []


def test_code_on_a_page_is_no_sentence() -> None:
    assert voice_violations("x.md", "Run:\n\n    What now\n\n```\nWhat now\n```\n") == []


@pytest.mark.parametrize("name", ["lender", "_lender_id", "LenderClient", "LENDER", "lenders"])
def test_a_name_with_an_old_word_is_found(name: str) -> None:
    assert len(name_violations("adam_async/x.py", f"{name} = 1")) == 1
    assert name_violations("adam_async/x.py", f"blender = '{name}'  # {name}") == []


def test_an_old_word_is_refused_only_where_it_has_its_old_meaning() -> None:
    assert name_violations("adam_async/parameter_server/x.py", "held = 1")
    assert name_violations("transport/x.py", "held = 1") == []
    assert name_violations("adam_async/worker/x.py", "gate.look()")
    assert name_violations("adam_async/worker/x.py", "look_at = own_applied") == []
    assert name_violations("adam_async/controller/x.py", "TERM_JUMP = 1")
    assert name_violations("adam_async/controller/consensus/x.py", "TERM_JUMP = 1") == []
    assert name_violations("adam_async/x.py", "waits.meet_s") == []
    assert name_violations("adam_async/x.py", "class LeaseLog: pass")
    assert name_violations("adam_async/x.py", "lease_logs = LeaseLogs()") == []
    assert name_violations("adam_async/worker/x.py", "class Place: pass")
    assert name_violations("adam_async/cluster/roles/place.py", "class Place: pass") == []


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or ("",)
    listed = [found for path in checked_files() if path.startswith(chosen) for found in violations(path)]
    sys.stdout.write("".join(f"{each}\n" for each in listed) + f"{len(listed)} violations\n")
