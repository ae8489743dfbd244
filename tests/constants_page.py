"""The page of constants: numbers of the code that bound or time something, from the texts beside them.

python -m tests.constants_page > docs/reference/constants.md
"""

import ast
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PAGE = ROOT / "docs" / "reference" / "constants.md"

NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant.

    Attributes:
        file: Its file, below the root.
        text: The text below it, on one line; empty without one.
    """

    file: str
    name: str
    value: float
    text: str


def product_files() -> Iterator[Path]:
    """Yield the product's files in the order of their names."""
    for room in ("adam_async", "dataflow", "transport"):
        yield from sorted((ROOT / room).rglob("*.py"))


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax of the product's files, by their names below the root."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in product_files()}


@cache
def numbers() -> Sequence[Constant]:
    """Return every number at the top of a file with a name in capitals."""
    known: dict[str, dict[str, float]] = {}
    for _ in range(3):  # a number may be made from one of another file
        found = []
        for file, tree in trees().items():
            values = known.setdefault(file.removesuffix(".py").replace("/", "."), {})
            values |= _imported(tree, known)
            found += _numbers_of(file, tree, values)
    return found


def _imported(tree: ast.Module, known: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        alias.asname or alias.name: known[node.module][alias.name]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in known
        for alias in node.names
        if alias.name in known[node.module]
    }


def _numbers_of(file: str, tree: ast.Module, values: dict[str, float]) -> Iterator[Constant]:
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, of = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, of = node.target, node.value
        else:
            continue
        value = _value(of, values) if isinstance(target, ast.Name) else None
        if isinstance(target, ast.Name) and NAME.fullmatch(target.id) and value is not None:
            values[target.id] = value
            yield Constant(
                file=file, name=target.id, value=value, text=_text_below(tree.body[place + 1 : place + 2])
            )


def _text_below(rest: list[ast.stmt]) -> str:
    """Return the text directly below an assignment."""
    if rest and isinstance(rest[0], ast.Expr) and isinstance(rest[0].value, ast.Constant):
        return " ".join(str(rest[0].value.value).split())
    return ""


def _value(node: ast.expr, values: Mapping[str, float]) -> float | None:
    if isinstance(node, ast.Constant):
        is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        return node.value if is_number else None  # type: ignore[return-value]
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, values), _value(node.right, values)
        if left is None or right is None:
            return None
        return OPERATORS[type(node.op)](left, right)  # type: ignore[no-any-return]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, values)
        return None if inner is None else -inner
    return None


# --- bounds and times --------------------------------------------------------------------------

FORMATS = ("transport/frames.py", "transport/handshake.py", "transport/keys.py")
"""Files whose sizes are those of a format of bytes, which no one chooses."""

SECONDS, SIZE = re.compile(r"(.*_)?(?<!PER_)S"), re.compile(r"(.*_)?BYTES")
BOUND = re.compile(r"(MOST|MAX|MIN|LEAST|LARGEST|LONGEST)_.*")
"""Names of times, of sizes and of bounds."""

WORDS = re.compile(
    r"(Default|Maximum|Minimum|Largest|Smallest|Longest|Least|Deadline|Interval|Pause|Delay|Silence)\b"
    r"|Number .*\b(after which|above which|up to which|from which|at once|in a row|attempts|keeps?)\b"
)
"""Texts of other bounds and times."""


def is_named_as_bound(name: str) -> bool:
    """Return whether the name of a constant says that it times or bounds something."""
    return any(form.fullmatch(name) for form in (SECONDS, SIZE, BOUND))


def bounds() -> list[Constant]:
    """Return the constants that time or bound something, in the order of their files."""
    return [
        each
        for each in numbers()
        if each.file not in FORMATS and (is_named_as_bound(each.name) or WORDS.match(each.text))
    ]


def unit_of(constant: Constant) -> str:
    """Return the unit of a constant; empty for a number of things, or a ratio."""
    if SECONDS.fullmatch(constant.name):
        return "s"
    if SIZE.fullmatch(constant.name):
        return "bytes"
    found = re.search(r"\bin (seconds|bytes|characters|pixels|values)\b", constant.text)
    return {"seconds": "s"}.get(found[1], found[1]) if found else ""


def value_of(constant: Constant) -> str:
    """Return the value in its unit, large sizes in KiB, MiB or GiB."""
    value = constant.value
    if unit_of(constant) == "bytes":
        for shift, prefix in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
            if value >= 1 << shift and value % (1 << shift) == 0:
                return f"{int(value) >> shift:,} {prefix}B"
        return f"{int(value):,} B"
    unit = f" {unit}" if (unit := unit_of(constant)) else ""
    if isinstance(value, float) or value < 1 << 32:
        return f"{value:,}{unit}" if isinstance(value, int) else f"{value:,.12g}{unit}"
    power = int(value).bit_length() - 1
    return f"2^{power}{unit}" if value == 1 << power else f"2^{power + 1} - 1{unit}"


def sentence_of(constant: Constant) -> str:
    """Return the first sentence of a text, as a cell of a table."""
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z])", constant.text)[0]
    return sentence.replace("``", "`").replace("|", "\\|")


@cache
def options() -> Mapping[str, list[str]]:
    """Return the options with a constant as their default, by the name of the constant."""
    found: dict[str, list[str]] = {}
    for tree in trees().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in ("Config", "Waits", "OpenArguments"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Name):
                        assert isinstance(field.target, ast.Name)
                        options = found.setdefault(field.value.id, [])
                        options += [field.target.id] if field.target.id not in options else []
    return found


HEAD = """\
# Constants

Numbers of the code that bound or time something: limits of sizes and counts, deadlines, pauses. In the column
*option* is the option whose default a number is ([options](options.md), [stores](store.md)); the others are
fixed. Deadlines that are options have [a table of their own](options.md#deadlines).

`python -m tests.constants_page > docs/reference/constants.md` makes this page from the texts below the
constants, and a test compares both.
"""


def room_of(constant: Constant) -> str:
    """Return the room of a constant, such as ``adam_async/store``."""
    first, *others = constant.file.split("/")
    return first if first != "adam_async" or not others[1:] else f"{first}/{others[0]}"


def page() -> str:
    """Return the page; rows are in the order of names, so a move within a room changes none."""
    lines, defaults, found = [HEAD.rstrip()], options(), bounds()
    for room in dict.fromkeys(map(room_of, found)):
        lines += ["", f"## `{room}/`", "", "| constant | value | meaning | option |", "|---|---|---|---|"]
        rows = (each for each in found if room_of(each) == room)
        for each in sorted(rows, key=lambda each: (each.name, each.text)):
            changed = ", ".join(f"`{name}`" for name in defaults.get(each.name, ()))
            lines.append(f"| `{each.name}` | {value_of(each)} | {sentence_of(each)} | {changed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
