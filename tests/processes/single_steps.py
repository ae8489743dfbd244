"""Processes that are killed a random number of machine instructions behind a place of their program.

A process calls `stop` where a phase of its work begins. In a role of this package the methods of a table do
so (`sitecustomize`). Once the phase is armed, the first thread that gets there asks for its tracer and waits.
The tracer attaches to this thread alone (ptrace), lets it go on by single steps, and kills its process. All
other threads run on meanwhile.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

FOLDER = "SINGLE_STEPS"
"""Variable of the environment with the folder of the armed phases."""

ARRIVAL_S = 60.0
"""Deadline for a thread to arrive at an armed phase, in seconds."""

STEPS_S = 4.0
"""Time after which a process is killed that has not done all its steps, in seconds."""

_STEP, _SEIZE, _INTERRUPT, _ALL = 9, 0x4206, 0x4207, 0x40000000

_ROLES = "from tests.processes.single_steps import stop_in_a_role\n\nstop_in_a_role()\n"


def stop(phase: str) -> None:
    """Wait for the tracer, if this phase is armed."""
    folder = os.environ[FOLDER]
    try:
        os.rename(f"{folder}/{phase}", f"{folder}/taken")  # by one thread
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as tracer:
        tracer.connect(f"{folder}/socket")
        tracer.sendall(b"%d %d" % (os.getpid(), threading.get_native_id()))
        tracer.recv(1)


def stop_at(phase: str, place: str) -> None:
    """Let a phase begin with each call of a function, ``module:Class.method``; with ``+`` after the call."""
    module, _, path = place.rstrip("+").partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    original = getattr(owner, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        if not place.endswith("+"):
            stop(phase)
        result = original(*arguments, **options)
        if place.endswith("+"):
            stop(phase)
        return result

    setattr(owner, name, stopping)


def stop_in_a_role() -> None:
    """Let the phases of this process begin, if it is a role with phases; their names begin with its node."""
    words = sys.orig_argv
    if "adam_async" in words and "--id" in words:
        role, node = words[words.index("adam_async") + 1], words[words.index("--id") + 1]
        places = json.loads(Path(os.environ[FOLDER], "places").read_text())
        for phase, place in places.get(role, {}).items():
            stop_at(f"{node}.{phase}", place)


class Tracer:
    """Kills processes by single steps; for one thread.

    Args:
        places: For each role its phases, with the place where each begins (`stop_at`).
    """

    def __init__(self, places: Mapping[str, Mapping[str, str]] = {}) -> None:
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._folder = TemporaryDirectory(prefix="steps-")
        self._path = Path(self._folder.name)
        (self._path / "places").write_text(json.dumps(places))
        (self._path / "sitecustomize.py").write_text(_ROLES)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"{self._path}/socket")
        self._socket.listen()
        self._socket.settimeout(ARRIVAL_S)
        self.environment = {FOLDER: str(self._path), "PYTHONPATH": f"{self._path}{os.pathsep}{ROOT}"}
        """Variables of the processes under test."""

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._folder.cleanup()

    def kill(self, phase: str, steps: int, begin: Callable[[], object] = lambda: None) -> None:
        """Arm a phase, and kill the first process that gets there after a number of its instructions.

        Args:
            begin: Called once the phase is armed.
        """
        (self._path / phase).touch()
        begin()
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise AssertionError(f"no thread began {phase} within {ARRIVAL_S:g} s") from None
        with connection:
            process, thread = map(int, connection.recv(64).split())
            try:
                self._call(_SEIZE, thread)
                self._call(_INTERRUPT, thread)
                os.waitpid(thread, _ALL)
                connection.sendall(b".")
                with suppress(ProcessLookupError):  # another killed it meanwhile
                    self._step(thread, steps)
            finally:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process, signal.SIGKILL)
                    while os.WIFSTOPPED(os.waitpid(thread, _ALL)[1]):
                        continue

    def _step(self, thread: int, steps: int) -> None:
        deadline = time.monotonic() + STEPS_S
        for _ in range(steps):
            self._call(_STEP, thread)
            while not (ended := os.waitpid(thread, _ALL | os.WNOHANG))[0]:
                if time.monotonic() > deadline:  # such as in a wait for a message
                    return
                os.sched_yield()
            if time.monotonic() > deadline:  # beside other programs; peers would give it up as silent
                return
            if not os.WIFSTOPPED(ended[1]):
                assert ended[1] == signal.SIGKILL, f"the process ended by itself: {ended[1]:#x}"
                return

    def _call(self, request: int, thread: int) -> None:
        if self._ptrace(request, thread, None, None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
