"""Manifests are what Kubernetes accepts, keep keys out of commands, and suit the losses a run survives."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from adam_async.launch.environment import Layout, assigned_roles
from adam_async.launch.kubernetes import KubernetesRun, Storage, UserCode
from adam_async.launch.manifests import Manifest, command, controllers, manifests, text_of
from adam_async.run.config import Config

VERSIONS = ("1.36", "1.37")
"""Versions of Kubernetes whose schemas accept the manifests."""

CONFIG = Config(data="digits", controllers=3, servers=3, data_servers=2, replicas=4)
RUN = KubernetesRun(
    name="adam",
    image="adam-async:0.1.0",
    config=CONFIG,
    files={"adam.toml": "servers = 3\n", "net.toml": "x"},
)
KEYS = {role: f"the keys of role {role}" for role in ("controller", "ps", "data", "worker", "driver")}
VARIANTS = (
    RUN,
    replace(RUN, config=Config(), secret="mine", spread=True),
    replace(
        RUN, storage=Storage(storage_class="fast", data_claim="images"), config=Config(spill="/x", cache="1G")
    ),
)


def objects(run: KubernetesRun) -> list[Manifest]:
    files = manifests(run, KEYS).values()
    return [item for file in files for item in file.get("items", [file])]


def the(run: KubernetesRun, kind: str, name: str) -> Any:
    (found,) = (one for one in objects(run) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pods(run: KubernetesRun) -> Iterator[tuple[str, Manifest]]:
    """Yield name and specification of each kind of pod."""
    for one in objects(run):
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        elif "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("run", VARIANTS)
def test_two_versions_of_kubernetes_accept_the_manifests(version: str, run: KubernetesRun) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="needs the package kubernetes-validate, which has the schemas"
    )
    for manifest in objects(run):
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
    (job,) = (one for one in objects(run) if one["kind"] == "Job")
    job["spec"]["backofLimit"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(job, version, strict=True)


def test_the_same_run_has_the_same_text_and_sorted_files() -> None:
    first, second = manifests(RUN, KEYS), manifests(RUN, dict(reversed(KEYS.items())))

    assert [text_of(one) for one in first.values()] == [text_of(one) for one in second.values()]
    assert list(first) == sorted(first) == list(second)
    assert all(json.loads(text_of(one)) == one for one in first.values())


@pytest.mark.parametrize("run", VARIANTS)
def test_each_pod_has_only_the_keys_of_its_role_and_commands_have_none(run: KubernetesRun) -> None:
    for one in objects(run):
        if one["kind"] != "Secret":
            assert "the keys of role" not in text_of(one)
    for name, pod in pods(run):
        for container in pod["containers"]:
            asked = [
                entry for entry in container.get("env", ()) if "secretKeyRef" in entry.get("valueFrom", {})
            ]
            keys = [entry["valueFrom"]["secretKeyRef"] for entry in asked]
            wanted = {"name": run.secret or "adam-keys", "key": container["name"]}
            assert keys == ([] if name == "adam-results" else [wanted])
    assert ("Secret" in {one["kind"] for one in objects(run)}) == (not run.secret)


@pytest.mark.parametrize("run", VARIANTS)
def test_no_container_has_more_rights_than_it_needs(run: KubernetesRun) -> None:
    for _, pod in pods(run):
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"]["requests"].keys() == container["resources"]["limits"].keys()
            names = {mount["name"] for mount in container["volumeMounts"]} - {"state"}
            assert names == {volume["name"] for volume in pod["volumes"]}


def test_services_set_no_variables_that_read_as_options() -> None:
    assert all(pod.get("enableServiceLinks") is False for name, pod in pods(RUN) if name != "adam-results")


@pytest.mark.parametrize("run", VARIANTS)
def test_the_names_of_the_pods_give_every_role_of_the_run(run: KubernetesRun) -> None:
    layout = Layout.of(run.config)
    found = []
    for role in ("controller", "ps", "data"):
        spec = the(run, "StatefulSet", f"adam-{role}")["spec"]
        for number in range(spec["replicas"]):
            variables = {"POD_NAME": f"adam-{role}-{number}", "ADAM_CONTROLLER": controllers(run)}
            found += assigned_roles({**variables, "POD_IP": "10.1.0.7"}, layout).roles
    assert found == [node for node in layout.nodes() if node[0] != "worker"]
    assert the(run, "Deployment", "adam-worker")["spec"]["replicas"] == layout.workers


def test_controllers_start_at_once_and_have_names_before_they_are_ready() -> None:
    assert the(RUN, "StatefulSet", "adam-controller")["spec"]["podManagementPolicy"] == "Parallel"
    service = the(RUN, "Service", "adam-controller")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert controllers(RUN).split(",")[2] == "tcp://adam-controller-2.adam-controller:7070"


@pytest.mark.parametrize(
    ("config", "spare"),
    [
        (Config(), {"controller": 0, "ps": 0, "data": 0}),
        (Config(controllers=3, servers=3, data_servers=2), {"controller": 1, "ps": 1, "data": 1}),
        (Config(controllers=5, servers=3, copies=1), {"controller": 2, "ps": 0, "data": 0}),
    ],
)
def test_a_drained_node_takes_no_pod_whose_loss_ends_the_run(config: Config, spare: dict[str, int]) -> None:
    run = replace(RUN, config=config)
    budgets = {role: the(run, "PodDisruptionBudget", f"adam-{role}")["spec"] for role in (*spare, "worker")}

    assert {role: budgets[role]["maxUnavailable"] for role in spare} == spare
    assert budgets["worker"]["maxUnavailable"] == "50%"


@pytest.mark.parametrize("spread", [False, True])
def test_spread_forbids_what_is_otherwise_avoided_two_pods_of_a_role_on_a_node(spread: bool) -> None:
    for name, pod in pods(replace(RUN, spread=spread)):
        apart = pod.get("affinity", {}).get("podAntiAffinity", {})
        forbidden = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        avoided = pod.get("topologySpreadConstraints", [])
        may_share = name in ("adam-worker", "adam-driver", "adam-results")
        assert (len(forbidden), len(avoided)) == ((0, 0) if may_share else (spread, not spread))
        for rule in forbidden + avoided:
            role = name.removeprefix("adam-")
            assert rule["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == role


def test_probes_of_a_starting_role_leave_it_two_minutes() -> None:
    for name, pod in pods(RUN):
        for container in pod["containers"]:
            if name != "adam-results":
                probe = container["startupProbe"]
                assert probe["periodSeconds"] * probe["failureThreshold"] == 120
                assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
                assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_images_and_scratch_space_of_data_servers_are_volumes() -> None:
    pod = dict(pods(VARIANTS[2]))["adam-data"]
    (container,) = pod["containers"]

    assert {"name": "data", "mountPath": "/srv/adam/data", "readOnly": True} in container["volumeMounts"]
    assert {"name": "ADAM_SPILL", "value": "/srv/adam/tmp/spill"} in container["env"]
    claims = [
        volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [{"claimName": "images", "readOnly": True}]


def test_commands_carry_the_code_of_the_user_that_their_role_imports() -> None:
    code = UserCode(
        step="mine.steps:make",
        step_args='{"by": "$(HOME)"}',
        layers=("odd=mine:Odd",),
        folders=("/srv/code",),
    )
    run = replace(RUN, code=code)
    path, layer = ["--step-path", "/srv/code"], ["--layer", "odd=mine:Odd"]
    step = ["--step", "mine.steps:make", "--step-args", '{"by": "$$(HOME)"}']
    assert command(run, "driver") == [*command(RUN, "driver"), *path, *layer, *step]
    assert command(run, "worker") == [*command(RUN, "worker"), *path, *layer, "--allow-step", "mine.steps"]
    assert command(run, "data") == [*command(RUN, "data"), *path]
    for role in ("controller", "ps"):
        assert command(run, role) == command(RUN, role)
