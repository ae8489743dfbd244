"""The folder of compiled kernels on disk: one per user and per source text of the kernels.

Numba's cache compares a kernel's file and the processor, but not the files of functions that the kernel
calls. So the folder's name has a digest of all files with kernels: a new version compiles again, and an old
version finds its own kernels. Forced vector registers are part of the digest, because they shape the loops.

The folder of the user's caches has compiled kernels, downloaded data and records of launches. A user may have
no home folder, or another user's, as in containers and batch jobs with a bare user id. Then the folder is
among the temporary files, never in the working directory.
"""

import errno
import fcntl
import hashlib
import logging
import os
import pwd
import stat
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

NOWHERE = Path(os.devnull) / "no-folder-for-caches"
"""Path that cannot be made: processes without a cache folder keep no kernels, and say so."""


def user_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of this package in the user's cache; the folder need not exist."""
    caches = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # the standard ignores other paths
        return Path(caches) / "adam-async"
    home = environment.get("HOME", "")
    if not home:
        with suppress(KeyError):  # the user id has no name
            home = pwd.getpwuid(os.getuid()).pw_dir
    if os.path.isabs(home) and any(os.access(f"{home}{end}", os.W_OK | os.X_OK) for end in ("/.cache", "")):
        return Path(home) / ".cache" / "adam-async"
    return _temporary_cache(environment)


def _temporary_cache(environment: Mapping[str, str]) -> Path:
    """Return a folder of this user alone: kernels are code, which another user must not put there."""
    temporary = environment.get("TMPDIR", "")
    folder = Path(temporary if os.path.isabs(temporary) else "/tmp") / f"adam-async-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError:
        return NOWHERE
    is_private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_private else NOWHERE


logger = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"
"""Environment variable that names numba's cache folder; numba reads it at import."""

VECTORS = "ADAM_VECTORS"
"""Environment variable that forces one kind of vector registers."""

AUTO = "auto"
"""Value of `ADAM_VECTORS` for the widest registers of the processor; the default."""

_FORCED_PROCESSORS = {"avx2": ("x86-64-v3", "+avx2,+fma,+f16c,+bmi,+bmi2")}
"""Name and features (LLVM's names) of the processor that numba compiles for, by kind of registers."""

RETRY_S = 0.05
"""Time between two attempts to lock the folder, in seconds."""

KERNELS = Path(__file__).parents[1] / "model" / "fast"
"""Folder with the source of the kernels."""


def kernel_cache_folder(environment: MutableMapping[str, str]) -> Path:
    """Return the default folder, which need not exist."""
    return user_cache(environment) / f"kernels-{kernel_digest(environment)}"


def kernel_digest(environment: Mapping[str, str] = os.environ) -> str:
    """Return a digest of all kernels' text and of the vector registers that the user forces."""
    digest = hashlib.blake2b(wanted_vectors(environment).encode(), digest_size=8)
    for path in sorted(KERNELS.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def wanted_vectors(environment: Mapping[str, str] = os.environ) -> str:
    """Return the kind of vector registers that the user forces, or ``"auto"``."""
    return environment.get(VECTORS) or AUTO


def kernel_folder() -> str:
    """Return the folder of this process: the environment's, otherwise the default."""
    return os.environ.get(VARIABLE) or str(kernel_cache_folder(os.environ))


def use_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose the folder for this process and its children, unless the user has chosen one.

    With ``ADAM_VECTORS=avx2`` numba compiles for a processor that has no wider registers. The main program
    calls this function before it imports numba.
    """
    processor = _FORCED_PROCESSORS.get(wanted_vectors(environment))
    if processor:
        environment["NUMBA_CPU_NAME"], environment["NUMBA_CPU_FEATURES"] = processor
    if not environment.get(VARIABLE):
        environment[VARIABLE] = str(kernel_cache_folder(environment))


class KernelCache:
    """The kernels in a folder, and the lock for compiling more.

    Numba does not report whether it has compiled a kernel, so an empty file marks each compiled kernel. A
    folder without write access counts as empty. Otherwise numba would use the source's folder, where kernels
    of an older text look the same.

    Args:
        folder: Numba's folder, which need not exist.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._marks = Path(folder) / "compiled"

    @cached_property
    def is_kept(self) -> bool:
        """Whether numba can write to the folder and its subfolders; if not, logs one warning."""
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
        """Return whether a process has marked a kernel as compiled."""
        return self.is_kept and (self._marks / name).exists()

    def note(self, name: str) -> None:
        """Mark a kernel as compiled."""
        if not self.is_kept:
            return
        with suppress(OSError):
            self._marks.mkdir(parents=True, exist_ok=True)
            (self._marks / name).touch()

    def forget(self) -> None:
        """Remove all kernels' index files and marks, so that all kernels are compiled again."""
        for file in (*Path(self.folder).glob("*/*.nbi"), *self._marks.glob("*")):
            with suppress(OSError):
                file.unlink()

    @contextmanager
    def turn(self, *, wait_s: float = 60.0) -> Iterator[None]:
        """Hold the lock for compiling in the block; after ``wait_s`` the block begins without the lock.

        Without a writable folder there is no lock, and each process compiles for itself.
        """
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            file = open(Path(self.folder) / "lock", "w", opener=_at_once)
        except OSError:
            yield
            return
        with file:
            end = time.monotonic() + wait_s
            while not _lock(file) and time.monotonic() < end:
                time.sleep(RETRY_S)
            yield


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe has no lock to wait for


def _lock(file: TextIO) -> bool:
    """Try to lock a file. A file system without locks counts as locked, so the process continues."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
