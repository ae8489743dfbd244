"""The manifests of `deploy/chart`: from `helm template` if it is installed, else from the renderer here.

The renderer has what the chart uses: actions with variables, `if`, `range`, `define`, and the functions
below. A template that uses more fails with the name of the unknown function.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which reads the manifests")

CHART = Path(__file__).resolve().parents[1] / "deploy" / "chart"

Manifest = dict[str, Any]

TAG = re.compile(r"(\s*)\{\{(-?)(?:/\*.*?\*/|\s*(.*?))\s*(-?)\}\}(\s*)", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|:=|[=|(),]|-?\d+|\$?[\w.]+|\$')


def rendered(values: Manifest, *, name: str = "adam") -> list[Manifest]:
    """Return the objects of a release. Raises ValueError: the chart refuses the values."""
    if shutil.which("helm"):
        words = ["helm", "template", name, str(CHART), "--values", "-"]
        done = subprocess.run(words, input=json.dumps(values), capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr)
        return [one for one in yaml.safe_load_all(done.stdout) if one]
    merged = _merged(yaml.safe_load((CHART / "values.yaml").read_text()), values)
    root = {"Values": merged, "Release": {"Name": name, "Namespace": "default"}}
    template = Template()
    template.text((CHART / "templates" / "_helpers.tpl").read_text(), root)
    texts = [template.text(file.read_text(), root) for file in sorted(CHART.glob("templates/*.yaml"))]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def _merged(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return first | {key: _merged(first.get(key), value) for key, value in second.items()}
    return second


def _failed(reason: str) -> None:
    raise ValueError(reason)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


class Template:
    """A renderer of templates, which share their definitions."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {}
        self._functions: dict[str, Any] = {
            "and": lambda *all_: next((one for one in all_ if not one), all_[-1]),
            "default": lambda other, value: value or other,
            "dict": lambda *words: dict(zip(words[::2], words[1::2], strict=True)),
            "div": lambda a, b: a // b,
            "eq": lambda a, b: a == b,
            "fail": _failed,
            "gt": lambda a, b: a > b,
            "include": lambda part, value: self._run(self._parts[part], value, {"$": value}),
            "index": lambda value, key: value[key],
            "int": int,
            "len": len,
            "list": lambda *words: list(words),
            "lookup": lambda *_: {},
            "mul": lambda a, b: a * b,
            "ne": lambda a, b: a != b,
            "nindent": lambda count, text: "\n" + "\n".join(" " * count + line for line in text.split("\n")),
            "not": lambda value: not value,
            "or": lambda *all_: next((one for one in all_ if one), all_[-1]),
            "printf": lambda form, *values: form % values,
            "quote": lambda value: json.dumps(_text(value), ensure_ascii=False),
            "randAlphaNum": lambda count: ("drawnToken" * count)[:count],
            "regexFind": lambda form, text: re.search(form, text)[0],  # type: ignore[index]
            "regexMatch": lambda form, text: bool(re.search(form, text)),
            "replace": lambda old, new, text: text.replace(old, new),
            "sub": lambda a, b: a - b,
            "ternary": lambda yes, no, condition: yes if condition else no,
            "until": lambda count: list(range(count)),
        }

    def text(self, source: str, root: Manifest) -> str:
        """Return the text of a template."""
        pieces: list[tuple[str, str]] = []
        place = 0
        for tag in TAG.finditer(source):
            before, left, action, right, _ = tag.groups()
            pieces.append(("text", source[place : tag.start()] + ("" if left else before)))
            pieces.append(("action", action or ""))
            place = tag.end() if right else tag.start(5)
        pieces.append(("text", source[place:]))
        return self._run(self._block(iter(pieces))[0], root, {"$": root})

    def _block(self, pieces: Any) -> tuple[list[Any], str]:
        """Return the nodes until the end of a block, and the action that ends it."""
        nodes: list[Any] = []
        for kind, piece in pieces:
            word = piece.split(" ")[0] if kind == "action" else ""
            if word in ("end", "else"):
                return nodes, word
            if word in ("if", "range", "define"):
                inner, ended = self._block(pieces)
                other = self._block(pieces)[0] if ended == "else" else []
                if word == "define":
                    self._parts[json.loads(piece.removeprefix("define "))] = inner
                else:
                    nodes.append((word, WORD.findall(piece)[1:], inner, other))
            elif piece:
                nodes.append((kind, WORD.findall(piece) if kind == "action" else piece))
        return nodes, ""

    def _run(self, nodes: list[Any], dot: Any, names: Manifest) -> str:
        out = ""
        for kind, words, *blocks in nodes:
            if kind == "text":
                out += words
            elif kind == "if":
                out += self._run(blocks[0] if self._value(words, dot, names) else blocks[1], dot, names)
            elif kind == "range":
                at = words.index(":=")
                found = self._value(words[at + 1 :], dot, names)
                for pair in sorted(found.items()) if isinstance(found, dict) else enumerate(found):
                    variables = [word for word in words[:at] if word != ","]
                    names.update(zip(reversed(variables), reversed(pair), strict=False))
                    out += self._run(blocks[0], dot, names)
            elif words[1:2] in ([":="], ["="]):
                names[words[0]] = self._value(words[2:], dot, names)
            else:
                out += _text(self._value(words, dot, names))
        return out

    def _value(self, words: list[str], dot: Any, names: Manifest) -> Any:
        value, left = self._call(list(words), dot, names, [])
        assert not left, f"{left} after {words}"
        return value

    def _call(self, words: list[str], dot: Any, names: Manifest, piped: list[Any]) -> tuple[Any, list[str]]:
        """Evaluate a pipeline until a closing parenthesis; return its value and the words after it."""
        first, *words = words
        values: list[Any] = []
        if first in self._functions:
            function = self._functions[first]
        else:
            function, words = None, [first, *words]
        while words and words[0] not in ("|", ")"):
            word, *words = words
            if word == "(":
                value, words = self._call(words, dot, names, [])
                words = words[1:]
            else:
                value = _operand(word, dot, names)
            values.append(value)
        value = function(*values, *piped) if function else values[0]
        if words and words[0] == "|":
            return self._call(words[1:], dot, names, [value])
        return value, words


def _operand(word: str, dot: Any, names: Manifest) -> Any:
    if word[0] == '"':
        return json.loads(word)
    if word.lstrip("-").isdecimal():
        return int(word)
    first, *keys = word.split(".")
    if first not in names and first:
        raise KeyError(f"unknown function or variable {word}")
    value = names[first] if first else dot
    for key in filter(None, keys):
        value = value[key]
    return value
