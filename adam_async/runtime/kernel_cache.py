"""Where compiled kernels are kept on disk: per user, and per text of the kernels.

Numba looks at the file that a kernel is in, but not at those of the kernels it calls; processors it tells
apart itself. So the folder's name holds a digest of all files with kernels: a new version compiles anew, and
an old one finds its own again. Forced vector registers are a part of it, for they shape the loops.
"""

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

logger = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"
"""What numba reads when it is imported."""

VECTORS = "ADAM_VECTORS"
"""Environment variable that forces one kind of vector registers."""

AUTO = "auto"
"""The widest registers that the processor has; the default."""

_FORCED_PROCESSORS = {"avx2": ("x86-64-v3", "+avx2,+fma,+f16c,+bmi,+bmi2")}
"""Name and features, by LLVM's names, of the processor that numba compiles for."""

LOOK_S = 0.05
"""Seconds between two looks whether it is our turn to compile."""

KERNELS = Path(__file__).parents[1] / "model" / "fast"


def kernel_cache_folder(environment: MutableMapping[str, str]) -> Path:
    """Name the folder; it need not exist."""
    caches = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "adam-async" / f"kernels-{kernel_digest(environment)}"


def kernel_digest(environment: Mapping[str, str] = os.environ) -> str:
    """Return a digest of the text of all kernels and of the vector registers that the user forces."""
    digest = hashlib.blake2b(wanted_vectors(environment).encode(), digest_size=8)
    for path in sorted(KERNELS.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def wanted_vectors(environment: Mapping[str, str] = os.environ) -> str:
    """The kind of vector registers that the user forces, or ``"auto"``."""
    return environment.get(VECTORS) or AUTO


def kernel_folder() -> str:
    """The folder of this process: what the user set, else ours."""
    return os.environ.get(VARIABLE) or str(kernel_cache_folder(os.environ))


def use_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose the folder for this process and its children, unless the user has chosen one.

    With `ADAM_VECTORS` the kernels are compiled for a processor that has no wider registers. The main program
    calls this before it imports numba.
    """
    processor = _FORCED_PROCESSORS.get(wanted_vectors(environment))
    if processor:
        environment["NUMBA_CPU_NAME"], environment["NUMBA_CPU_FEATURES"] = processor
    if not environment.get(VARIABLE):
        environment[VARIABLE] = str(kernel_cache_folder(environment))


class KernelCache:
    """The kernels in a folder, and the turn to compile more into it.

    Numba does not tell whether it has compiled a kernel. So an empty file beside the kernels stands for each.
    A folder that cannot be written to holds no kernel for us, whatever is in it: numba would look beside the
    source instead, where nothing tells the kernels of an older text apart.

    Args:
        folder: Where numba keeps them; it need not exist.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._marks = Path(folder) / "compiled"

    @cached_property
    def is_kept(self) -> bool:
        """Whether numba can write here and in the folders that it has made; else a warning says so, once."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass
            for entry in os.scandir(self.folder):
                if entry.is_dir() and not os.access(entry, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), entry.path)
        except OSError as error:
            logger.warning(
                "compiled kernels cannot be kept in %s (%s): each process compiles its own, in memory; "
                "%s can name another folder",
                *(self.folder, error.strerror or error, VARIABLE),
            )
            return False
        return True

    def has(self, name: str) -> bool:
        """Whether a kernel was noted here, by any process."""
        return self.is_kept and (self._marks / name).exists()

    def note(self, name: str) -> None:
        """Note that a kernel is compiled and kept."""
        if not self.is_kept:
            return
        with suppress(OSError):
            self._marks.mkdir(parents=True, exist_ok=True)
            (self._marks / name).touch()

    @contextmanager
    def turn(self, *, wait_s: float = 60.0) -> Iterator[None]:
        """Wait until no other process compiles, but no longer than ``wait_s``.

        Where nothing can be written there is no turn, and each process compiles for itself.
        """
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            file = (Path(self.folder) / "lock").open("w")
        except OSError:
            yield
            return
        with file:
            end = time.monotonic() + wait_s
            while not _lock(file) and time.monotonic() < end:
                time.sleep(LOOK_S)
            yield


def _lock(file: TextIO) -> bool:
    """Try to lock a file. A file system without locks lets everybody go on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
