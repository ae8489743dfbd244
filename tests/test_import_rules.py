"""Rules that can be read off the syntax: permitted imports, and permitted access to the system.

`violations` reads one file. The tables below are the rules; `PORTS` is the complete list of the product files
that may touch clock, dice, files, threads, processes, sockets or loops, with reasons. The tests at the end
pass bad snippets to `violations`, so a rule that stopped working would fail them.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dataflow", "transport", "adam_async")
SHARED_FILES = ("client", "group_reader", "role", "storage")
"""Other roles may import these files of a role: its client and the reader of its images, the base of all
roles, the memory of shards."""

ROLES = ("data_server", "worker", "parameter_server", "controller")

PURE_FORBIDDEN = frozenset(
    {"asyncio", "concurrent", "os", "pathlib", "random", "socket", "threading", "time", "uvloop"}
)

PACKAGE_IMPORTS = {
    "dataflow": frozenset({"dataflow"}),
    "transport": frozenset({"transport", "numpy", "msgpack", "msgspec", "ml_dtypes", "google_crc32c"}),
}
"""Imports of a package beside the standard library. `adam_async` is not limited here."""

MODEL_IMPORTS = (
    "adam_async.model",
    "adam_async.errors",
    "adam_async.option_types",
    "adam_async.runtime.kernel_cache",
)
"""The model imports nothing else of `adam_async`: its own files, the errors, the types of options, the kernel
cache."""

NETWORK_MODULES = tuple(
    f"adam_async.model.{name}" for name in ("layer", "layers", "named", "network", "partition", "spec")
)
"""Modules that no controller imports, nor those below them: the map must not depend on layers."""

ROOMS = (
    "errors",
    "option_types",
    "messages",
    "runtime",
    "persistence",
    "model",
    "run",
    "controller",
    "client",
    "parameter_server",
    "data_server",
    "worker",
    "report",
    "checkpoint",
    "driver",
    "dashboard",
    "cluster",
    "store",
    "sync",
    "lbfgs",
    "torch",
    "launch",
    "cli",
    "__main__",
)
"""Entries of `adam_async/` from the ground up. A file imports from its own entry and from those before it."""

SERIALISERS = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm"})
MSGPACK_FILE = "transport/frames.py"

TEST_USER = "adam_async/cli/checkout.py"
"""The only product file that names modules of `tests`: the commands of a checkout."""

HARNESS = ("tests/simulation", "tests/drill")
"""Folders of tests that keep the rules of the product, because commands run them."""

TORCH_USERS = ("adam_async/cli/predict.py",)
"""Files outside the room torch that may import it, inside of a function."""

OWN_TASKS = ("adam_async/store/opening.py",)
"""Files whose objects own a task that `close` ends, because `await` opens a store without a block."""

MODULE_CAPABILITIES = {
    "time": "clock",
    "datetime": "clock",
    "random": "dice",
    "secrets": "dice",
    "uuid": "dice",
    "os": "system",
    "platform": "system",
    "resource": "system",
    "signal": "system",
    "shutil": "files",
    "tempfile": "files",
    "aiofiles": "files",
    "fcntl": "files",
    "mmap": "memory",
    "threading": "threads",
    "_thread": "threads",
    "concurrent": "threads",
    "queue": "threads",
    "multiprocessing": "processes",
    "subprocess": "processes",
    "socket": "sockets",
    "ssl": "sockets",
    "selectors": "sockets",
    "urllib": "sockets",
    "http": "sockets",
    "pooch": "sockets",
    "uvloop": "loops",
}
CALL_CAPABILITIES = {
    "open": "files",
    "read_text": "files",
    "write_text": "files",
    "write_bytes": "files",
    "mkdir": "files",
    "unlink": "files",
    "iterdir": "files",
    "rglob": "files",
    "urandom": "dice",
    "run_in_executor": "threads",
    "to_thread": "threads",
    "create_subprocess_exec": "processes",
    "create_subprocess_shell": "processes",
    "new_event_loop": "loops",
    "set_event_loop": "loops",
    "run_until_complete": "loops",
}


@dataclass(frozen=True, slots=True)
class Port:
    """Files that may use some capabilities, with the reason."""

    files: str
    capabilities: frozenset[str]
    reason: str


def port(files: str, capabilities: str, reason: str) -> Port:
    return Port(files, frozenset(capabilities.split()), reason)


PORTS = (
    port("adam_async/runtime/disk.py", "files system threads", "the disk and its thread"),
    port("adam_async/report/stream.py", "files threads", "callbacks of users may block; one writes a file"),
    port("adam_async/report/tensorboard.py", "files system", "written by the thread of a callback"),
    port("adam_async/runtime/ordinary_files.py", "files system", "opens and reads files for the disk"),
    port(
        "adam_async/runtime/standard_streams.py",
        "files system threads",
        "the standard streams of the process; their readers may block a writer",
    ),
    port("adam_async/runtime/blocking_thread.py", "threads", "the thread of a disk, or of Ray"),
    port(
        "adam_async/data_server/sources/published_sets.py",
        "files sockets threads",
        "pooch blocks, also in the name server; its file is written piece by piece",
    ),
    port("adam_async/runtime/clock.py", "clock dice system", "the monotonic clock, entropy of the system"),
    port("adam_async/model/keyed_random.py", "numpy.random", "the keyed dice, made of Philox"),
    port(
        "adam_async/errors.py", "files", "the origin of this installation, for the command that adds an extra"
    ),
    port("adam_async/cli/*.py", "clock loops system", "loop, environment, signals, cores, times in logs"),
    port("adam_async/runtime/loop_thread.py", "threads", "code of the user runs beside the loop"),
    port(
        "adam_async/runtime/kernel_cache.py",
        "clock files system",
        "the folder of kernels, and its name; the user's id, home and folder of caches",
    ),
    port("adam_async/cluster/parent_pipe.py", "system", "signals that end a child with its parent"),
    port(
        "adam_async/runtime/child_process.py",
        "files processes system",
        "starts and watches one child; its environment; the file of its output",
    ),
    port("adam_async/launch/slurm.py", "files processes", "runs sbatch, on a script in a file"),
    port("tests/drill/network_namespaces.py", "processes system", "runs `ip`; process ids in names"),
    port("adam_async/worker/kernel_change.py", "threads", "a compute thread pauses while a child compiles"),
    port("tests/drill/command.py", "system", "the environment of the command"),
    port("tests/drill/drill.py", "system", "whether the system can freeze a process"),
    port("tests/simulation/work.py", "processes system", "child processes that run simulations"),
    port("adam_async/cluster/processes.py", "system", "the environment that its children inherit"),
    port("adam_async/launch/ray_actor.py", "files system", "variables and home folder of a node of Ray"),
    port(
        "adam_async/launch/ray.py",
        "processes system threads",
        "Ray's calls block; a child tries its address; variables that Ray reads",
    ),
    port("adam_async/data_server/sources/ray_data.py", "threads", "Ray's iterator of batches blocks"),
    port("adam_async/torch/datasets.py", "threads", "items of a user's dataset may decode images"),
    port("adam_async/torch/step.py", "threads", "compute threads share a step"),
    port(
        "adam_async/torch/module_copy.py",
        "dice numpy.random threads",
        "a user's module may draw from the streams of the process, which one block at a time seeds",
    ),
    port("adam_async/cluster/launcher.py", "system", "the folder of the controllers' state"),
    port(
        "adam_async/data_server/sources/files.py",
        "files system",
        "pieces of files, for the compute thread that needs them",
    ),
    port(
        "adam_async/data_server/sources/kinds.py",
        "system",
        "names in folders, listed by the thread of the disk, or by a command before its modules load",
    ),
    port(
        "adam_async/data_server/sources/numpy_files.py",
        "files",
        "opens members of an archive that lies in memory",
    ),
    port("adam_async/runtime/machine.py", "files system", "facts of machine and process from the kernel"),
    port(
        "adam_async/checkpoint/trained_model.py",
        "files",
        "reads and writes one model, in programs without a loop",
    ),
    port("adam_async/runtime/loop_thread.py", "loops threads", "the synchronous face: a thread and its loop"),
    port(
        "adam_async/cluster/sync.py", "loops threads", "the synchronous face: epochs for the caller's thread"
    ),
    port("adam_async/store/sync.py", "system threads", "the synchronous face: forks end its thread"),
    port("dataflow/pool.py", "clock system threads", "the compute pool: threads, their CPUs and trace times"),
    port("transport/tensors.py", "memory", "anonymous memory for what is received"),
    port("transport/sockets.py", "sockets system", "socket options of TCP links and listeners"),
    port(
        "transport/regions.py", "files memory sockets system", "memory that processes share, and its handover"
    ),
    port("transport/shared.py", "sockets system", "the socket for the handover of regions, and its process"),
    port("transport/unix.py", "sockets system", "Unix sockets beside listeners, and the users at their ends"),
    port("transport/slow.py", "clock threads", "wakes a loop more finely than its own timers can"),
)


def capabilities_of(path: str) -> set[str]:
    return {name for row in PORTS if fnmatch(path, row.files) for name in row.capabilities}


def imported_modules(node: ast.AST) -> list[str]:
    """Return the full names that an import statement brings in, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def terminal_name(node: ast.AST) -> str:
    """Return ``c`` for ``c``, ``a.c`` and ``a.b.c``; nothing for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


CHECKED = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.Constant)
"""Kinds of nodes that have rules."""


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that have rules; several rules read them."""
    return tuple([node for node in ast.walk(tree) if isinstance(node, CHECKED)])


def uses(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, capability, use) for all access to the system in a file."""
    for node in nodes_of(tree):
        for module in imported_modules(node):
            root = module.partition(".")[0]
            if module.startswith("urllib.parse"):
                continue
            if root in MODULE_CAPABILITIES:
                yield node.lineno, MODULE_CAPABILITIES[root], f"imports {module}"
            if module.startswith("numpy.random"):
                yield node.lineno, "numpy.random", f"imports {module}"
        if isinstance(node, ast.Call):
            name = terminal_name(node.func)
            receiver = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if name.startswith("sock_"):
                yield node.lineno, "sockets", f"calls {name}"
            if name in CALL_CAPABILITIES and terminal_name(receiver) != "ParameterStore":
                yield node.lineno, CALL_CAPABILITIES[name], f"calls {name}"
            if name == "run" and terminal_name(receiver) == "asyncio":
                yield node.lineno, "loops", "calls asyncio.run"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr == "random" and node.value.id in {"np", "numpy"}:
                yield node.lineno, "numpy.random", "uses numpy.random"


def world_violations(path: str, tree: ast.Module) -> Iterator[str]:
    allowed = capabilities_of(path)
    for line, capability, what in uses(tree):
        if capability not in allowed:
            yield f"{path}:{line}: {what}; take it as an argument (PORTS gives this file no {capability})"


def is_above(room: str, other: str) -> bool:
    """Whether a room is above another in `ROOMS`; other names are no rooms."""
    return room in ROOMS and other in ROOMS and ROOMS.index(room) > ROOMS.index(other)


def import_violations(path: str, tree: ast.Module) -> Iterator[str]:
    package, *rest = path.removesuffix(".py").split("/")
    role = rest[0] if rest and rest[0] in ROLES else ""
    is_pure = (ast.get_docstring(tree) or "").startswith("Pure:")
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{path}:{node.lineno}: relative import; write the full name"
            continue
        for module in imported_modules(node):
            where = f"{path}:{node.lineno}: imports {module}"
            root = module.partition(".")[0]
            parts = module.split(".")
            if is_pure and root in PURE_FORBIDDEN:
                yield f"{where}, but calls itself Pure"
            if package in PACKAGE_IMPORTS and root not in PACKAGE_IMPORTS[package] | sys.stdlib_module_names:
                yield f"{where}; {package} may import only {sorted(PACKAGE_IMPORTS[package])} and the library"
            if root in SERIALISERS:
                yield f"{where}; nothing here loads or stores objects that way"
            if root == "torch" and not path.startswith("adam_async/torch/"):
                yield f"{where}; only adam_async/torch may, because PyTorch is optional"
            if module.startswith("adam_async.torch") and rest[0] != "torch" and path not in TORCH_USERS:
                yield f"{where}; PyTorch is optional, and only {TORCH_USERS} may"
            if root == "tests" and package in PACKAGES:
                yield f"{where}; a wheel has no tests"
            if root == "msgpack" and path != MSGPACK_FILE:
                yield f"{where}; only {MSGPACK_FILE} may"
            if rest and rest[0] == "model":
                if root == "asyncio" or root in PACKAGES[:2]:
                    yield f"{where}; the model is numbers only"
                if root == "adam_async" and not module.startswith(MODEL_IMPORTS):
                    yield f"{where}; the model may import only {MODEL_IMPORTS}"
            if root == "adam_async" and len(parts) > 1 and rest and is_above(parts[1], rest[0]):
                yield f"{where}; {parts[1]} is above {rest[0]} in ROOMS"
            if root == "adam_async" and len(parts) > 2 and parts[1] in ROLES and role:
                if parts[1] != role and parts[2] not in SHARED_FILES:
                    yield f"{where}; of another role only {SHARED_FILES} may be imported"
                if rest[-1] == "state" and parts[2] == "client":
                    yield f"{where}; a state imports no client"


def named_modules(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a product file that name a module of `tests`, for an import by its name."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path != TEST_USER:
            if re.match(r"tests\.\w", node.value) and path.startswith(PACKAGES):
                yield f"{path}:{node.lineno}: names {node.value}; only {TEST_USER} may: a wheel has no tests"


def call_violations(path: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call):
            continue
        name = terminal_name(node.func)
        where = f"{path}:{node.lineno}"
        if isinstance(node.func, ast.Name) and name in {"eval", "exec", "compile", "__import__"}:
            yield f"{where}: calls {name}"
        if any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords):
            yield f"{where}: allow_pickle is not False"
        if name == "ensure_future":
            yield f"{where}: ensure_future starts a task without a parent; use a TaskGroup"
        if name == "create_task":
            parent = terminal_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if parent != "tg" and not parent.endswith("group") and path not in OWN_TASKS:
                yield f"{where}: create_task without a visible parent (a variable tg or ...group)"
            if not any(keyword.arg == "name" for keyword in node.keywords):
                yield f"{where}: create_task without a name"


@cache
def tree_of(path: str) -> ast.Module:
    """Return a file's syntax, which several tests read."""
    return ast.parse((ROOT / path).read_text(), path)


def violations(path: str, tree: ast.Module) -> list[str]:
    """Return the broken rules of one file.

    Args:
        path: From the root of the repository, with ``/``.
    """
    return [
        *import_violations(path, tree),
        *named_modules(path, tree),
        *world_violations(path, tree),
        *call_violations(path, tree),
    ]


def product_files() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )


def harness_files() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for folder in HARNESS for path in (ROOT / folder).rglob("*.py")
    )


def test_every_file_of_the_product_and_of_the_harness_keeps_the_rules() -> None:
    assert len(product_files()) > 100
    assert len(harness_files()) > 50
    assert [
        found for path in [*product_files(), *harness_files()] for found in violations(path, tree_of(path))
    ] == []


def test_states_call_themselves_pure() -> None:
    for path in (ROOT / "adam_async").rglob("state.py"):
        assert (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("Pure:"), path


def test_no_permission_is_held_in_reserve() -> None:
    for row in PORTS:
        matching = [path for path in [*product_files(), *harness_files()] if fnmatch(path, row.files)]
        used = {use[1] for path in matching for use in uses(tree_of(path))}
        if matching:
            assert row.capabilities <= used, f"{row.files} no longer needs {row.capabilities - used}"
        assert row.reason


@pytest.mark.parametrize(
    ("path", "source", "claim"),
    [
        ("dataflow/x.py", "import numpy", "dataflow may import only"),
        ("dataflow/x.py", "from transport import frames", "dataflow may import only"),
        ("transport/x.py", "from adam_async.run.ids import NodeId", "transport may import only"),
        ("adam_async/cli/x.py", "import tests.simulation.scenarios", "a wheel has no tests"),
        ("adam_async/cli/x.py", "load('tests.drill.command:drill')", "a wheel has no tests"),
        ("transport/x.py", "import msgpack", "only transport/frames.py may"),
        ("transport/x.py", "from . import frames", "relative import"),
        ("adam_async/worker/x.py", "import torch", "only adam_async/torch may"),
        ("adam_async/cli/x.py", "from adam_async.torch import convert", "PyTorch is optional"),
        ("adam_async/x.py", '"""Pure: x."""\nimport asyncio', "calls itself Pure"),
        ("adam_async/x.py", '"""Pure: x."""\nfrom pathlib import Path', "calls itself Pure"),
        ("adam_async/x.py", '"""Pure: x."""\ndef f():\n    import random', "calls itself Pure"),
        ("adam_async/model/x.py", "import asyncio", "numbers only"),
        ("adam_async/model/x.py", "from adam_async.run.config import Run", "the model may import only"),
        ("adam_async/worker/x.py", "from adam_async.data_server.state import S", "of another role only"),
        ("adam_async/worker/x.py", "from adam_async.data_server import state", "of another role only"),
        ("adam_async/run/x.py", "from adam_async.driver.driver import Driver", "driver is above run"),
        ("adam_async/run/x.py", "def f():\n    from adam_async import cli", "cli is above run"),
        ("adam_async/errors.py", "import adam_async.run.config", "run is above errors"),
        ("adam_async/worker/state.py", "from adam_async.data_server.client import C", "no client"),
        ("adam_async/x.py", "import pickle", "loads or stores objects"),
        ("adam_async/x.py", "import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle is not False"),
        ("adam_async/x.py", "eval('1')", "calls eval"),
        ("adam_async/x.py", "import time", "clock"),
        ("adam_async/x.py", "from time import monotonic", "clock"),
        ("adam_async/x.py", "from datetime import datetime", "clock"),
        ("adam_async/x.py", "import random", "dice"),
        ("adam_async/x.py", "import numpy as np\nnp.random.default_rng()", "numpy.random"),
        ("adam_async/x.py", "from numpy.random import Philox", "numpy.random"),
        ("adam_async/x.py", "import os\nos.urandom(8)", "dice"),
        ("adam_async/x.py", "open('file')", "files"),
        ("adam_async/x.py", "path.write_text('x')", "files"),
        ("adam_async/x.py", "import threading", "threads"),
        ("adam_async/x.py", "from concurrent.futures import ThreadPoolExecutor", "threads"),
        ("adam_async/x.py", "loop.run_in_executor(None, f)", "threads"),
        ("adam_async/x.py", "asyncio.to_thread(f)", "threads"),
        ("adam_async/x.py", "loop.sock_recv(s, 1)", "sockets"),
        ("adam_async/x.py", "import socket", "sockets"),
        ("adam_async/x.py", "import subprocess", "processes"),
        ("adam_async/x.py", "asyncio.create_subprocess_exec('ls')", "processes"),
        ("adam_async/x.py", "import uvloop", "loops"),
        ("adam_async/x.py", "asyncio.run(main())", "loops"),
        ("adam_async/x.py", "asyncio.create_task(f(), name='f')", "visible parent"),
        ("adam_async/x.py", "loop.create_task(f(), name='f')", "visible parent"),
        ("adam_async/x.py", "asyncio.ensure_future(f())", "without a parent"),
        ("adam_async/x.py", "group.create_task(f())", "without a name"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str, claim: str) -> None:
    assert any(claim in violation for violation in violations(path, ast.parse(source)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dataflow/x.py", "import collections\nfrom dataflow.jobs import Tag"),
        ("transport/frames.py", "import msgpack\nimport numpy as np"),
        ("transport/sockets.py", "import asyncio\nimport socket"),
        ("adam_async/model/x.py", "import numpy as np\nfrom adam_async.model.keyed_random import Dice"),
        ("adam_async/worker/service.py", "from adam_async.data_server.client import Client"),
        ("adam_async/x.py", "import asyncio\nself._group.create_task(f(), name='f')"),
        ("adam_async/x.py", "import urllib.parse\ndisk.read_bytes(path)"),
        ("adam_async/runtime/clock.py", "import os, time\nos.urandom(1)"),
    ],
)
def test_code_within_the_rules_is_left_alone(path: str, source: str) -> None:
    assert violations(path, ast.parse(source)) == []


def imports_of(path: str, known: set[str]) -> set[str]:
    """Return the product files that a file imports, as module names out of ``known``."""
    found = set()
    for node in nodes_of(tree_of(path)):
        for module in imported_modules(node):
            found.add(module if module in known else module.rpartition(".")[0])
    return (found & known) - {module_name(path)}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the names of a graph that remain without those that only begin or only end chains."""
    arrows = {name: set(targets) for name, targets in arrows.items()}
    while True:
        aimed_at = {target for targets in arrows.values() for target in targets}
        kept = {
            name: targets & arrows.keys()
            for name, targets in arrows.items()
            if name in aimed_at and targets & arrows.keys()
        }
        if kept == arrows:
            return [sorted(kept)] if kept else []
        arrows = kept


def test_no_circle_of_imports_joins_files() -> None:
    assert circles(product_imports()) == []


def nested_folder(name: str) -> str:
    """Return a module's folder within its room, such as ``adam_async.model.fast``; else the module itself."""
    first = name.split(".")[:3]
    return ".".join(first) if ROOT.joinpath(*first).is_dir() else name


def folder_arrows(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between modules with each folder inside a room as one name."""
    joined: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        folder = nested_folder(name)
        joined.setdefault(folder, set()).update({nested_folder(target) for target in targets} - {folder})
    return joined


def test_no_circle_of_imports_joins_nested_folders() -> None:
    arrows = folder_arrows(product_imports())

    assert circles(arrows) == []
    assert {"adam_async.model.fast", "adam_async.cli.plan"} <= arrows.keys()


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("adam_async.model.fast.tape", "adam_async.model.partition.plan"),
        ("adam_async.data_server.dataset", "adam_async.data_server.sources.idx"),
        ("adam_async.cli.terminal", "adam_async.cli.plan.command"),
    ],
)
def test_an_import_against_the_order_of_nested_folders_is_noticed(path: str, imported: str) -> None:
    arrows = product_imports()
    assert imported not in arrows[path]

    (found,) = circles(folder_arrows({**arrows, path: {*arrows[path], imported}}))
    assert {nested_folder(path), nested_folder(imported)} <= set(found)


def test_a_circle_of_imports_would_be_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def paths_to(arrows: dict[str, set[str]], begin: str, ends: Callable[[str], bool]) -> list[str]:
    """Return for each reachable name that ends a search the names on a way to it."""
    found, came_from, left = [], {begin: ""}, [begin]
    while left:
        name = left.pop()
        if ends(name):
            way = [name]
            while came_from[way[-1]]:
                way.append(came_from[way[-1]])
            found.append(" <- ".join(way))
            continue
        for target in sorted(arrows.get(name, set()) - came_from.keys()):
            came_from[target] = name
            left.append(target)
    return found


def is_of_networks(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in NETWORK_MODULES)


@cache
def product_imports() -> dict[str, set[str]]:
    """Return the product files that each product file imports, as module names."""
    paths = product_files()
    known = {module_name(path) for path in paths}
    return {module_name(path): imports_of(path, known) for path in paths}


def networks_of_controllers(arrows: dict[str, set[str]]) -> list[str]:
    """Return the ways of imports from the controllers to networks."""
    controllers = sorted(name for name in arrows if name.startswith("adam_async.controller"))
    return [way for name in controllers for way in paths_to(arrows, name, is_of_networks)]


def test_no_controller_imports_a_network_even_through_other_files() -> None:
    assert networks_of_controllers(product_imports()) == []


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("adam_async.controller.state", "adam_async.model.network"),
        ("adam_async.controller.records", "adam_async.model.spec"),
        ("adam_async.controller.role", "adam_async.model.layers.dense"),
        ("adam_async.controller.service", "adam_async.run.partition"),
        ("adam_async.run.shard_table", "adam_async.model.partition.plan"),
        ("adam_async.run.config", "adam_async.run.model_selection"),
    ],
)
def test_an_import_of_a_network_by_a_controller_would_be_noticed(module: str, target: str) -> None:
    arrows = product_imports()

    ways = networks_of_controllers({**arrows, module: {*arrows[module], target}})

    assert ways
    assert all(module in way for way in ways)


OTHERS_USE = (
    "adam_async.__main__",
    "adam_async.data_server.transforms.compiling",
    "adam_async.launch.ray_probe",
    "adam_async.launch.ssh",
    "adam_async.model.fast.compiling",
    "adam_async.model.gradcheck",
)
"""Modules that a process starts with, that the table of launchers names, or that programs of users import; no
product file imports them."""


def test_every_product_file_has_a_user_in_the_product() -> None:
    arrows = product_imports()
    used = {target for targets in arrows.values() for target in targets}
    files = {module_name(path) for path in product_files() if not path.endswith("__init__.py")}

    assert files - used == {*OTHERS_USE}


def test_every_entry_has_a_place_among_the_rooms() -> None:
    entries = {
        path.split("/")[1].removesuffix(".py") for path in product_files() if path.startswith("adam_async")
    }

    assert entries == {*ROOMS, "__init__"}
