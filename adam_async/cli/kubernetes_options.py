"""The options of `launch k8s`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from adam_async.cli.options import ONLY_ON, LoopName, options


@options
class KubernetesOptions:
    """Options of `launch k8s`."""

    out: Path
    """New or empty folder for the manifests."""
    image: str
    """Container image with adam-async, such as registry/adam-async:0.1.0 (deploy/Dockerfile)."""
    name: str = "adam"
    """Name of the run, which begins the names of all its objects."""
    secret: str = ""
    """Existing Secret with the keys of each role, as controller, ps, data, worker and driver; by default the
    command draws a token, and the manifests have a Secret."""
    resources: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Processor and memory of each pod of a role: ROLE=CPU,MEMORY, such as worker=4,8Gi; repeatable. By
    default controller=500m,1Gi, ps=1,2Gi, data=1,2Gi, worker=2,2Gi, driver=1,2Gi; sizes of memory in
    adam.toml replace these."""
    spread: Annotated[bool, ONLY_ON] = False
    """Start no second controller, server or data server on a node; by default they share a node if
    necessary."""
    state: str = "1Gi"
    """Size of the volume of each controller."""
    results: str = "10Gi"
    """Size of the volume for checkpoints and the model."""
    temporary: str = "4Gi"
    """Maximum size of the scratch space of a pod: downloads, caches, compiled kernels."""
    storage_class: str = ""
    """StorageClass of the volumes; by default that of the cluster."""
    data_claim: str = ""
    """PersistentVolumeClaim with the images, at /srv/adam/data in the data servers."""
    step: str | None = None
    """Train this step of yours in place of a network: package.module:factory, of a module that the image has.
    The workers may import its module."""
    step_args: str | None = None
    """Arguments of the factory of --step, as a JSON object such as '{"hidden": 64}'."""
    layers: Annotated[tuple[str, ...], Parameter(name="--layer", negative="")] = ()
    """Layer of yours that the model may use: KIND=package.module:Class; repeatable."""
    step_path: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Folder of the image with the modules of --step, --layer and transforms, added to sys.path;
    repeatable."""
    loop: LoopName = "uvloop"
    """The event loop."""
