"""The entry point of `adam-async`.

This file imports few modules. So closed standard streams are opened, signal handlers are installed and BLAS
is limited to one thread before slow imports, and before imports that read these settings.
docs/reference/exit-codes.md lists the exit codes.
"""

import atexit
import gc
import os
import sys
from collections.abc import MutableMapping, Sequence

import adam_async
from adam_async.cli.signals import EARLY
from adam_async.errors import ConfigError, install_command
from adam_async.runtime.kernel_cache import use_kernel_cache
from adam_async.runtime.standard_streams import hold_streams

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables for the number of BLAS threads, which would compete with the compute threads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (docs/reference/exit-codes.md)."""
    hold_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        try:
            print(adam_async.__version__, flush=True)
        except ConfigError as error:
            print(f"adam-async: {error}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # the reader of the output has left: a flush at the end would fail again
            EARLY.leave(0)
        return 0
    EARLY.install()
    # The interpreter's last collections would visit every object of the imported libraries, for 0.4 s.
    atexit.register(gc.freeze)
    one_blas_thread(os.environ)
    use_kernel_cache(os.environ)
    try:
        from adam_async.cli.commands import run_command
    except ModuleNotFoundError as error:
        if error.name not in ("cyclopts", "rich"):
            raise
        how = install_command("cli")
        print(f"adam-async: the command line needs {error.name}, of the extra `cli`: {how}", file=sys.stderr)
        return 2
    return run_command(words)


def one_blas_thread(environment: MutableMapping[str, str]) -> None:
    """Limit BLAS to one thread, unless the user has chosen a number.

    Call this function before the import of numpy.
    """
    for name in BLAS_THREADS:
        environment.setdefault(name, "1")
