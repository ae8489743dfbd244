"""Removal of a safeguard that is part of a longer function: a replacement in the source of one method."""

import inspect
import sys
import textwrap
from typing import Any

import pytest


def rewrite(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, old: str, new: str) -> None:
    """Replace a piece of a method's source for the duration of a test."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(old) == 1
    namespace: dict[str, Any] = dict(vars(sys.modules[owner.__module__]))
    exec(source.replace(old, new), namespace)
    monkeypatch.setattr(owner, method, namespace[method])
