"""The command `adam-async`: where everything begins, and where every error becomes one line and a number.

This file loads almost nothing, on purpose: signals are answered and BLAS is told to use one thread before
anything that takes time or reads those settings is imported. docs/exit-codes.md lists the numbers.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence

from adam_async.cli.signals import EARLY
from adam_async.runtime.kernel_cache import use_kernel_cache

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What tells numpy's BLAS how many threads to start. Threads are ours: its own compete with them."""

NO_EXTRA = "adam-async: the command line needs {name}; install it with: pip install 'adam-async[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; those of the process if None.

    Returns:
        The exit code of docs/exit-codes.md.
    """
    EARLY.install()
    one_blas_thread(os.environ)
    use_kernel_cache(os.environ)
    try:
        from adam_async.cli.commands import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("cyclopts", "rich"):
            raise
        print(NO_EXTRA.format(name=error.name), file=sys.stderr)
        return 2
    return run_command(list(sys.argv[1:] if arguments is None else arguments))


def one_blas_thread(environment: MutableMapping[str, str]) -> None:
    """Ask BLAS for one thread, unless the user has asked for something else. Call it before numpy loads."""
    for name in BLAS_THREADS:
        environment.setdefault(name, "1")
