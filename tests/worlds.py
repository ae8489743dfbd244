"""Tests whose body runs inside a world that a runner makes: simulated machines, or a node with a disk."""

import inspect
from collections.abc import Callable
from functools import partial


def inside(runner: Callable, *, made: int = 1, **options) -> Callable:
    """Make a test of a coroutine function, which `runner(body, **options)` calls with `made` arguments.

    Further parameters are those of the test; `runner` is given the ones that it names too, such as a seed.
    """
    known = inspect.signature(runner).parameters

    def test_of(body: Callable) -> Callable:
        others = list(inspect.signature(body).parameters.values())[made:]

        def test(*plain, **given):
            given |= {each.name: value for each, value in zip(others, plain, strict=False)}
            runner(
                partial(body, **given), **options, **{name: given[name] for name in given if name in known}
            )

        # No functools.wraps: its `__wrapped__` would show pytest the coroutine function.
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.__signature__ = inspect.Signature(others)
        return test

    return test_of
