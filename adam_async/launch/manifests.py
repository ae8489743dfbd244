"""Pure: the manifests of a run on Kubernetes, as JSON, which `kubectl apply -f FOLDER` reads like YAML.

StatefulSets run controllers, parameter servers and data servers; a Deployment runs workers, and a Job the
driver. Pods take their role from their name (`environment.py`). Equal descriptions make equal text.
"""

import json
from collections.abc import Mapping
from typing import Any

from adam_async.launch.environment import PORT
from adam_async.launch.kubernetes import (
    CONFIG_FOLDER,
    DATA_FOLDER,
    RESULTS_FOLDER,
    STATE_FOLDER,
    TEMPORARY_FOLDER,
    KubernetesRun,
)

Manifest = dict[str, Any]

NODE = "kubernetes.io/hostname"
"""Label of a node that is different for each node."""

USER = 10001
"""Ids of the user and group of the processes; the image has the same."""

HEALTH_PORT = 8080
"""Port of the probes."""

END_S = 60
"""Time in which a role must end in good order, in seconds. Most roles need two seconds; a data server may
wait longer for its disk."""

SERVER_READY_S = 30
"""Time that a parameter server must be ready before the next one is updated, in seconds."""

RETRIES = 20
"""Maximum number of failed drivers. Evicted drivers do not count."""

FINAL_CODES = (2, 3, 6, 9)
"""Exit codes of a driver that another attempt would repeat: options, data, keys, and a run that diverges."""


def text_of(manifest: Manifest) -> str:
    """Return the text of a file."""
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def manifests(run: KubernetesRun, keys: Mapping[str, str]) -> dict[str, Manifest]:
    """Return the content of each file by its path, in the order of `kubectl apply`.

    Args:
        keys: Keys of each role (`run/token_file.py`); without effect if the run names a Secret.
    """
    files = {
        "00-config.json": _config(run),
        "01-network.json": _network(run),
        "10-controller.json": _list(
            _service(run, "controller"), _budget(run, "controller"), _stateful(run, "controller")
        ),
        "20-ps.json": _list(_service(run, "ps"), _budget(run, "ps"), _stateful(run, "ps")),
        "30-data.json": _list(_service(run, "data"), _budget(run, "data"), _stateful(run, "data")),
        "40-worker.json": _list(_budget(run, "worker"), _workers(run)),
        "50-driver.json": _list(_results(run), _driver(run)),
        "results/pod.json": _reader(run),
    }
    if not run.secret:
        files["00-keys.json"] = _keys(run, keys)
    return dict(sorted(files.items()))


def _list(*items: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def _name(run: KubernetesRun, role: str) -> str:
    return f"{run.name}-{role}"


def _labels(run: KubernetesRun, role: str = "") -> dict[str, str]:
    labels = {"app.kubernetes.io/instance": run.name, "app.kubernetes.io/name": "adam-async"}
    return {**labels, "app.kubernetes.io/component": role} if role else labels


def _metadata(run: KubernetesRun, name: str, role: str = "") -> Manifest:
    return {"name": name, "labels": _labels(run, role)}


def _secret(run: KubernetesRun) -> str:
    return run.secret or _name(run, "keys")


def controllers(run: KubernetesRun) -> str:
    """Return the addresses of all controllers. Their pods keep these names wherever they run."""
    service = _name(run, "controller")
    return ",".join(f"tcp://{service}-{number}.{service}:{PORT}" for number in range(run.count("controller")))


# --- objects of the whole run ----------------------------------------------------------------


def _config(run: KubernetesRun) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, _name(run, "config")),
        "data": {f"file-{number}": run.files[path] for number, path in enumerate(sorted(run.files))},
    }


def _keys(run: KubernetesRun, keys: Mapping[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(run, _secret(run)),
        "type": "Opaque",
        "stringData": dict(sorted(keys.items())),
    }


def _network(run: KubernetesRun) -> Manifest:
    """Return the NetworkPolicy. Messages are not encrypted, so only pods of the run may send them."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run, run.name),
        "spec": {
            "podSelector": {"matchLabels": _labels(run)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": _labels(run)}}],
                    "ports": [{"protocol": "TCP", "port": PORT}],
                },
                {"ports": [{"protocol": "TCP", "port": HEALTH_PORT}]},
            ],
        },
    }


def _service(run: KubernetesRun, role: str) -> Manifest:
    """Return the headless Service that names the pods of a role, also those that are not ready yet."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, _name(run, role), role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(run, role),
            "ports": [{"name": "adam", "port": PORT, "protocol": "TCP"}],
        },
    }


def _budget(run: KubernetesRun, role: str) -> Manifest:
    """Return the PodDisruptionBudget of a role, which permits no eviction that would end the run."""
    config = run.config
    spare: int | str = {
        "controller": (config.controllers - 1) // 2,
        "ps": 1 if config.copies_in_force > 1 else 0,
        "data": 1 if config.data_servers > 1 else 0,
        "worker": "50%",
    }[role]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(run, _name(run, role), role),
        "spec": {"maxUnavailable": spare, "selector": {"matchLabels": _labels(run, role)}},
    }


def _claim(run: KubernetesRun, name: str, size: str) -> Manifest:
    storage = run.storage.storage_class
    return {
        "metadata": _metadata(run, name),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **({"storageClassName": storage} if storage else {}),
            "resources": {"requests": {"storage": size}},
        },
    }


def _results(run: KubernetesRun) -> Manifest:
    claim = _claim(run, _name(run, "results"), run.storage.results)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}


# --- pods ------------------------------------------------------------------------------------


def _stateful(run: KubernetesRun, role: str) -> Manifest:
    """Return the StatefulSet of a role: its pods keep their names, and so their node ids.

    All pods start at once, because controllers are ready only when most of them run.
    """
    spec: Manifest = {
        "serviceName": _name(run, role),
        "replicas": run.count(role),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(run, role)},
        "template": _template(run, role),
    }
    if role == "ps":
        spec["minReadySeconds"] = SERVER_READY_S
    if role == "controller":
        spec["volumeClaimTemplates"] = [_claim(run, "state", run.storage.state)]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(run, _name(run, role), role),
        "spec": spec,
    }


def _workers(run: KubernetesRun) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(run, _name(run, "worker"), "worker"),
        "spec": {
            "replicas": run.count("worker"),
            "selector": {"matchLabels": _labels(run, "worker")},
            "template": _template(run, "worker"),
        },
    }


def _driver(run: KubernetesRun) -> Manifest:
    """Return the Job of the driver: a new pod takes the run over, or continues from its checkpoint.

    A new pod starts only after the end of the old one, because one driver at a time has the run.
    """
    codes = {"containerName": "driver", "operator": "In", "values": list(FINAL_CODES)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(run, _name(run, "driver"), "driver"),
        "spec": {
            "backoffLimit": RETRIES,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": codes},
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": _template(run, "driver"),
        },
    }


def command(run: KubernetesRun, role: str) -> list[str]:
    """Return the command of a role's container; Kubernetes replaces ``$(POD_IP)`` in it."""
    options = ["--config", f"{CONFIG_FOLDER}/adam.toml", "--wait", run.wait]
    options += ["--health", f"tcp://$(POD_IP):{HEALTH_PORT}"]
    if role == "driver":
        results = ["--resume", f"{RESULTS_FOLDER}/checkpoints", "--out", f"{RESULTS_FOLDER}/model"]
        words = ["adam-async", "train", "--controller", controllers(run), "--attach", "--no-processes"]
        return [*words, *options, *results, *run.code.words(role)]
    words = ["adam-async", "role", "--from-env", *options, *run.code.words(role)]
    return [*words, "--dir", STATE_FOLDER] if role == "controller" else words


def _environment(run: KubernetesRun, role: str) -> list[Manifest]:
    def field(path: str) -> Manifest:
        return {"fieldRef": {"fieldPath": path}}

    plain = {
        "HOME": TEMPORARY_FOLDER,
        "TMPDIR": TEMPORARY_FOLDER,
        "XDG_CACHE_HOME": f"{TEMPORARY_FOLDER}/cache",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if role != "driver":
        plain["ADAM_CONTROLLER"] = controllers(run)
    if role == "data" and run.config.spill:
        plain["ADAM_SPILL"] = f"{TEMPORARY_FOLDER}/spill"
    return [
        {"name": "POD_NAME", "valueFrom": field("metadata.name")},
        {"name": "POD_IP", "valueFrom": field("status.podIP")},
        {"name": "ADAM_TOKEN", "valueFrom": {"secretKeyRef": {"name": _secret(run), "key": role}}},
        *({"name": name, "value": value} for name, value in sorted(plain.items())),
    ]


def _volumes(run: KubernetesRun, role: str) -> dict[str, tuple[Manifest | None, str, bool]]:
    """Return for each volume its source (None: a claim template), its folder, and whether it is read-only."""
    items = [{"key": f"file-{number}", "path": path} for number, path in enumerate(sorted(run.files))]
    volumes: dict[str, tuple[Manifest | None, str, bool]] = {
        "config": ({"configMap": {"name": _name(run, "config"), "items": items}}, CONFIG_FOLDER, True),
        "temporary": ({"emptyDir": {"sizeLimit": run.storage.temporary}}, TEMPORARY_FOLDER, False),
    }
    if role == "controller":
        volumes["state"] = None, STATE_FOLDER, False
    if role == "driver":
        claim = {"claimName": _name(run, "results")}
        volumes["results"] = {"persistentVolumeClaim": claim}, RESULTS_FOLDER, False
    if role == "data" and run.storage.data_claim:
        images = {"claimName": run.storage.data_claim, "readOnly": True}
        volumes["data"] = {"persistentVolumeClaim": images}, DATA_FOLDER, True
    return volumes


def _template(run: KubernetesRun, role: str) -> Manifest:
    volumes = _volumes(run, role)
    pod = {
        "automountServiceAccountToken": False,
        # Variables such as ADAM_PS_PORT would read as options of the commands.
        "enableServiceLinks": False,
        "securityContext": _pod_security(),
        "terminationGracePeriodSeconds": END_S,
        **({"restartPolicy": "Never"} if role == "driver" else {}),
        **(_placement(run, role) if role not in ("worker", "driver") else {}),
        "containers": [_container(run, role)],
        "volumes": [
            {"name": name, **source} for name, (source, _, _) in volumes.items() if source is not None
        ],
    }
    return {"metadata": {"labels": _labels(run, role)}, "spec": pod}


def _container(run: KubernetesRun, role: str) -> Manifest:
    resources = run.resources[role]
    both = {"cpu": resources.cpu, "memory": resources.memory}
    mounts = [
        {"name": name, "mountPath": folder, **({"readOnly": True} if is_fixed else {})}
        for name, (_, folder, is_fixed) in _volumes(run, role).items()
    ]
    ports = [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}]
    if role != "driver":
        ports.insert(0, {"name": "adam", "containerPort": PORT, "protocol": "TCP"})
    return {
        "name": role,
        "image": run.image,
        "command": command(run, role),
        "workingDir": CONFIG_FOLDER,
        "env": _environment(run, role),
        "ports": ports,
        "resources": {"requests": both, "limits": dict(both)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "startupProbe": _probe("/healthz", every_s=2, failures=60),
        "livenessProbe": _probe("/healthz", every_s=10, failures=6),
        "readinessProbe": _probe("/readyz", every_s=5, failures=2),
        "volumeMounts": mounts,
    }


def _probe(path: str, *, every_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "health"},
        "periodSeconds": every_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # A later mount leaves the private files of a controller private.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _placement(run: KubernetesRun, role: str) -> Manifest:
    """Return the rule that keeps pods of a role on different nodes; without `spread` it is a preference."""
    same_role = {"matchLabels": _labels(run, role)}
    if run.spread:
        # A required even spread would put a second pod on each node once every node has one.
        apart = {"topologyKey": NODE, "labelSelector": same_role}
        return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}}
    even = {
        "maxSkew": 1,
        "topologyKey": NODE,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": same_role,
    }
    return {"topologySpreadConstraints": [even]}


def _reader(run: KubernetesRun) -> Manifest:
    """Return a pod that reads the results, for `kubectl cp`."""
    container = _container(run, "driver")
    kept = ("image", "resources", "securityContext")
    mount = {"name": "results", "mountPath": RESULTS_FOLDER, "readOnly": True}
    claim = {"claimName": _name(run, "results"), "readOnly": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(run, _name(run, "results"), "results"),
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": _pod_security(),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "results",
                    "command": ["sleep", "3600"],
                    **{key: container[key] for key in kept},
                    "volumeMounts": [mount],
                }
            ],
            "volumes": [{"name": "results", "persistentVolumeClaim": claim}],
        },
    }
