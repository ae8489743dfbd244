"""Pure: the description of a run on Kubernetes, checked before any manifest is made (`manifests.py`)."""

import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from adam_async.data_server.sources.names import NAMES
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.user_code import read_layers, read_step_args

ROOT = "/srv/adam"
CONFIG_FOLDER, DATA_FOLDER = f"{ROOT}/config", f"{ROOT}/data"
RESULTS_FOLDER, STATE_FOLDER, TEMPORARY_FOLDER = f"{ROOT}/results", f"{ROOT}/state", f"{ROOT}/tmp"
"""Folders of a container, each a volume. The root file system is read-only."""

ROLES = ("controller", "ps", "data", "worker", "driver")
"""Roles with a manifest of their own; `driver` is `train`."""

MOST_CONFIG_BYTES = 1_000_000
"""Maximum size of adam.toml and the files that it names, in bytes; a ConfigMap holds 1 MiB."""

LONGEST_NAME = 30
"""Maximum length of the name of a run, in letters. The name of a pod adds a role and a suffix, and has 63
letters at most."""

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}", re.ASCII)
_QUANTITY = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(m|Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Resources:
    """Request and limit of each container of a role, as Kubernetes quantities of processor and memory."""

    cpu: str
    memory: str


DEFAULTS = {
    "controller": Resources("500m", "1Gi"),
    "ps": Resources("1", "2Gi"),
    "data": Resources("1", "2Gi"),
    "worker": Resources("2", "2Gi"),
    "driver": Resources("1", "2Gi"),
}
"""Default resources of each role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Sizes of the volumes, as quantities, and their class.

    Attributes:
        state: Volume of each controller.
        results: Volume of the driver, for checkpoints and the model.
        temporary: Scratch space of each pod: caches, downloads, compiled kernels.
        storage_class: StorageClass of the volumes; empty: the default of the cluster.
        data_claim: PersistentVolumeClaim with the images; empty: the data have a name, such as ``mnist``.
    """

    state: str = "1Gi"
    results: str = "10Gi"
    temporary: str = "4Gi"
    storage_class: str = ""
    data_claim: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """Code of the user that the image has, as for the options of `train` of the same names.

    Attributes:
        step: Step to train, ``package.module:factory``; empty: a network.
        step_args: Arguments of its factory, as JSON text; empty: none.
        layers: Layers, each ``KIND=package.module:Class``.
        folders: Folders of the image with the modules; absolute.
    """

    step: str = ""
    step_args: str = ""
    layers: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def words(self, role: str) -> list[str]:
        """Return the options of the command of a role."""
        if role not in ("data", "worker", "driver"):
            return []
        words = [word for folder in self.folders for word in ("--step-path", folder)]
        if role != "data":
            words += [word for layer in self.layers for word in ("--layer", layer)]
        if self.step and role == "worker":
            words += ["--allow-step", self.step.partition(":")[0]]
        elif self.step and role == "driver":
            words += ["--step", self.step]
            words += ["--step-args", self.step_args] if self.step_args else []
        # Kubernetes would replace "$(NAME)" by the value of a variable.
        return [word.replace("$(", "$$(") for word in words]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """A run on Kubernetes.

    Attributes:
        name: Name of the run, and prefix of the names of its objects.
        image: Container image with `adam-async`.
        config: Options of the run.
        files: Text of ``adam.toml``, and of each file that it names, by relative path.
        secret: Existing Secret with the keys of each role; empty: the manifests have one.
        resources: Resources of each role.
        storage: Sizes and class of the volumes.
        code: Code of the user that driver, workers and data servers import.
        spread: Whether no two controllers, no two servers and no two data servers may share a node;
            otherwise they share one if necessary.
        wait: Maximum wait of a role for a controller, such as ``10m``.
    """

    name: str
    image: str
    config: Config
    files: Mapping[str, str]
    secret: str = ""
    resources: Mapping[str, Resources] = field(default_factory=lambda: DEFAULTS)
    storage: Storage = field(default_factory=Storage)
    code: UserCode = field(default_factory=UserCode)
    spread: bool = False
    wait: str = "10m"

    def count(self, role: str) -> int:
        """Return the number of pods of a role."""
        config = self.config
        return {
            "controller": config.controllers,
            "ps": config.servers,
            "data": config.data_servers,
            "worker": config.workers,
            "driver": 1,
        }[role]


def files_of(config: Config) -> tuple[str, ...]:
    """Return the relative paths of the files that the options name.

    Raises:
        ConfigError: A path leaves the folder of ``adam.toml``.
    """
    named = {"model": config.model if config.model.endswith(".toml") else "", "transforms": config.transforms}
    for option, path in named.items():
        if path.startswith("/") or ".." in path.split("/"):
            raise ConfigError(
                f"{option}={path} is outside the folder of adam.toml, whose files are all that pods get: put "
                "it there, and name it by a relative path"
            )
    paths = [posixpath.normpath(path) for path in named.values() if path]
    if "adam.toml" in paths:
        raise ConfigError("adam.toml cannot name itself as its model or transforms: name another file")
    return tuple(paths)


def read_resources(words: Sequence[str], memory: Mapping[str, int]) -> dict[str, Resources]:
    """Read ``--resources ROLE=CPU,MEMORY``, such as ``worker=4,8Gi``, and add defaults for all other roles.

    Args:
        memory: Memory of each role in the options of the run, in bytes; it replaces the default of the role.

    Raises:
        ConfigError: A word has another form, an unknown role, or an invalid or zero quantity.
    """
    found = {
        role: replace(default, memory=quantity_of(memory[role])) if role in memory else default
        for role, default in DEFAULTS.items()
    }
    for word in words:
        role, _, rest = word.partition("=")
        cpu, comma, size = rest.partition(",")
        if role not in ROLES or not comma:
            raise ConfigError(
                f"--resources {word[:60]!r} is not of the form ROLE=CPU,MEMORY, such as worker=4,8Gi; roles "
                f"are {', '.join(ROLES)}"
            )
        option = f"--resources {role}"
        check_quantity(cpu, f"{option}: processor", "such as 2 or 500m", thousandths=True)
        check_quantity(size, f"{option}: memory", "such as 2Gi")
        found[role] = Resources(cpu, size)
    return found


def quantity_of(size: int) -> str:
    """Return a number of bytes as a quantity of Kubernetes, such as ``2Gi``."""
    for unit, bits in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return str(size)


def check_quantity(text: str, what: str, example: str, *, thousandths: bool = False) -> None:
    """Check a quantity of Kubernetes.

    Args:
        thousandths: Whether the unit may be ``m``, as for processors; otherwise the unit is one of bytes.

    Raises:
        ConfigError: The text is no quantity, or is zero.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or (found[2] == "m") > thousandths or (thousandths and found[2] not in (None, "m")):
        raise ConfigError(f"{what} {text[:40]!r} is no quantity of Kubernetes: give one {example}")
    if not Decimal(found[1]):
        raise ConfigError(f"{what} {text} is zero, and no pod could start: give one {example}")


def cores(cpu: str) -> int:
    """Return the whole cores that a processor quantity needs, such as 2 for ``1500m``."""
    return math.ceil(Decimal(cpu.removesuffix("m")) / (1000 if cpu.endswith("m") else 1))


def check(run: KubernetesRun) -> None:
    """Check the names, sizes, options and files that the manifests will have.

    Raises:
        ConfigError: A name or size is invalid in Kubernetes, the options do not suit pods, or the files are
            too large.
    """
    if not _LABEL.fullmatch(run.name) or len(run.name) > LONGEST_NAME:
        raise ConfigError(
            f"--name {run.name[:60]!r} is no name for Kubernetes: give at most {LONGEST_NAME} small letters, "
            "digits and hyphens, a letter first and no hyphen last"
        )
    storage = run.storage
    names = {
        "--secret": run.secret,
        "--storage-class": storage.storage_class,
        "--data-claim": storage.data_claim,
    }
    for option, name in names.items():
        if name and (not _SUBDOMAIN.fullmatch(name) or len(name) > 253):
            raise ConfigError(
                f"{option} {name[:60]!r} is no name for Kubernetes: give small letters, digits, hyphens and "
                "dots"
            )
    if not _IMAGE.fullmatch(run.image):
        raise ConfigError(
            f"--image {run.image[:60]!r} is no image: give one such as registry/adam-async:0.1.0"
        )
    for option in ("state", "results", "temporary"):
        check_quantity(getattr(storage, option), f"--{option}", "such as 10Gi")
    _check_code(run.code)
    size = sum(len(text.encode()) for text in run.files.values())
    if size > MOST_CONFIG_BYTES:
        raise ConfigError(
            f"adam.toml and the files that it names have {size} bytes, and a ConfigMap holds "
            f"{MOST_CONFIG_BYTES}: name a shorter model"
        )
    _check_config(run)


def _check_config(run: KubernetesRun) -> None:
    config, storage = run.config, run.storage
    config.weights_in(one_process=False)
    if config.record:
        raise ConfigError("record=true writes no file on Kubernetes: leave it out, and record in one process")
    if config.slow:
        raise ConfigError("slow is for roles of a trial on one machine: leave it out of adam.toml")
    if config.threads > cores(run.resources["worker"].cpu):
        raise ConfigError(
            f"threads={config.threads} need as many cores, and a worker has {run.resources['worker'].cpu}: "
            f"give --resources worker={config.threads},{run.resources['worker'].memory}, or leave threads out"
        )
    name = config.data.partition(":")[0]
    if config.data.startswith("tcp://"):
        raise ConfigError(
            f"data={config.data} names data servers elsewhere, and pods have their own: name the images"
        )
    on_volume = config.data == DATA_FOLDER or config.data.startswith(f"{DATA_FOLDER}/")
    if name not in NAMES and not (on_volume and storage.data_claim):
        raise ConfigError(
            f"data={config.data} is a path that no pod has: put the images on a volume, name its claim with "
            f"--data-claim, and set data to {DATA_FOLDER} or a path below"
        )


def _check_code(code: UserCode) -> None:
    """Check the form of the options, without an import: only the image has the modules."""
    module, _, factory = code.step.partition(":")
    if code.step and not all(part.isidentifier() for part in (*module.split("."), factory)):
        raise ConfigError(f"--step {code.step[:80]!r} is no step: give package.module:factory")
    if code.step_args and not code.step:
        raise ConfigError("--step-args are for the factory of --step, which is not given")
    read_step_args(code.step_args or None)
    read_layers(code.layers)
    for folder in code.folders:
        if not folder.startswith("/"):
            raise ConfigError(f"--step-path {folder[:80]!r} is no folder of the image: give its whole path")
