"""The chart makes what Kubernetes accepts, keeps keys out of commands, and suits the losses of a run."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from adam_async.launch.environment import Layout, assigned_roles
from adam_async.run.config import Config
from adam_async.run.option_sources import from_environment, from_toml, make_config
from tests.helm import Manifest, rendered

VERSIONS = ("1.36", "1.37")
"""Versions of Kubernetes whose schemas accept the manifests."""

SEVERAL: Manifest = {"controllers": 3, "servers": 3, "dataServers": 2, "replicas": 2, "partitions": 2}
CODE: Manifest = {
    "step": "mine.steps:make",
    "stepArgs": '{"by": "$(HOME)"}',
    "layers": ["odd=mine:Odd"],
    "stepPath": ["/srv/code"],
    "allowRules": ["mine:Lion"],
}
OTHER: Manifest = {
    "secret": "mine",
    "spread": True,
    "storage": {"class": "fast"},
    "dataClaim": "images",
    "spill": True,
    "metrics": True,
}
VARIANTS: tuple[Manifest, ...] = (
    {},
    {**SEVERAL, **CODE, "files": {"net.toml": "name = 'x'\n"}, "reader": True},
    OTHER,
)


def the(values: Manifest, kind: str, name: str) -> Any:
    (found,) = (one for one in rendered(values) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pods(values: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yield name and specification of each kind of pod."""
    for one in rendered(values):
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        elif "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def variables(container: Manifest) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def command(values: Manifest, role: str) -> list[str]:
    (container,) = dict(pods(values))[f"adam-{role}"]["containers"]
    return list(container["command"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VARIANTS)
def test_two_versions_of_kubernetes_accept_the_manifests(version: str, values: Manifest) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="needs the package kubernetes-validate, which has the schemas"
    )
    for manifest in rendered(values):
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("values", VARIANTS)
def test_each_pod_has_only_the_keys_of_its_role_and_no_other_object_has_any(values: Manifest) -> None:
    secrets = [one for one in rendered(values) if one["kind"] == "Secret"]
    assert len(secrets) == (0 if "secret" in values else 1)
    for one in rendered(values):
        assert one["kind"] == "Secret" or "drawnToken" not in json.dumps(one)
    for name, pod in pods(values):
        for container in pod["containers"]:
            asked = [entry["valueFrom"] for entry in container.get("env", ()) if "valueFrom" in entry]
            keys = [one["secretKeyRef"] for one in asked if "secretKeyRef" in one]
            role = name.removeprefix("adam-")
            secret = values.get("secret", "adam-keys")
            assert keys == ([] if role == "results" else [{"name": secret, "key": role}])


@pytest.mark.parametrize("values", VARIANTS)
def test_no_container_has_more_rights_than_it_needs(values: Manifest) -> None:
    for name, pod in pods(values):
        assert pod["automountServiceAccountToken"] is False
        # Services would set variables that read as options.
        assert name == "adam-results" or pod["enableServiceLinks"] is False
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
            assert container["resources"]["requests"] == container["resources"]["limits"]
            names = {mount["name"] for mount in container["volumeMounts"]} - {"state"}
            assert names == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("values", VARIANTS)
def test_names_and_variables_of_the_pods_give_every_role_of_the_run(values: Manifest) -> None:
    found = []
    for role in ("controller", "ps", "data"):
        spec = the(values, "StatefulSet", f"adam-{role}")["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        given = variables(container)
        layout = Layout.of(make_config(from_environment(given), sources=("variables",)))
        for number in range(spec["replicas"]):
            pod = {**given, "POD_NAME": f"adam-{role}-{number}", "POD_IP": "10.1.0.7"}
            found += assigned_roles(pod, layout).roles
    assert found == [node for node in layout.nodes() if node[0] != "worker"]
    assert the(values, "Deployment", "adam-worker")["spec"]["replicas"] == layout.workers


def test_the_values_of_the_chart_are_a_run_and_files_travel_with_it() -> None:
    data = the(VARIANTS[1], "ConfigMap", "adam-config")["data"]
    assert make_config(from_toml(data["adam.toml"], source="values"), sources=("values",)).data == "digits"
    assert data["net.toml"] == "name = 'x'\n"


def test_controllers_start_at_once_and_have_names_before_they_are_ready() -> None:
    assert the(SEVERAL, "StatefulSet", "adam-controller")["spec"]["podManagementPolicy"] == "Parallel"
    service = the(SEVERAL, "Service", "adam-controller")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert "adam-controller-2.adam-controller:7070" in command(SEVERAL, "driver")[3]


@pytest.mark.parametrize(
    ("values", "spare"),
    [
        ({}, {"controller": 0, "ps": 0, "data": 0}),
        (SEVERAL, {"controller": 1, "ps": 1, "data": 1}),
        ({"controllers": 5, "servers": 3, "copies": 1}, {"controller": 2, "ps": 0, "data": 0}),
        ({"controllers": 1, "servers": 3}, {"controller": 0, "ps": 0, "data": 0}),
        ({"controllers": 1, "servers": 3, "copies": 2}, {"controller": 0, "ps": 1, "data": 0}),
        ({"controllers": 3, "servers": 1}, {"controller": 1, "ps": 0, "data": 0}),
    ],
)
def test_a_drained_node_takes_no_pod_whose_loss_ends_the_run(values: Manifest, spare: dict[str, int]) -> None:
    budgets = {
        role: the(values, "PodDisruptionBudget", f"adam-{role}")["spec"] for role in (*spare, "worker")
    }
    counts = {name: values.get(name, 1) for name in ("controllers", "servers")}
    config = Config(**counts, copies=values.get("copies", 0))

    assert {role: budgets[role]["maxUnavailable"] for role in spare} == spare
    assert spare["ps"] == (config.copies_in_force > 1)
    assert budgets["worker"]["maxUnavailable"] == "50%"


@pytest.mark.parametrize("spread", [False, True])
def test_spread_forbids_what_is_otherwise_avoided_two_pods_of_a_role_on_a_node(spread: bool) -> None:
    for name, pod in pods({"spread": spread, "reader": True}):
        apart = pod.get("affinity", {}).get("podAntiAffinity", {})
        forbidden = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        avoided = pod.get("topologySpreadConstraints", [])
        may_share = name in ("adam-worker", "adam-driver", "adam-results")
        assert (len(forbidden), len(avoided)) == ((0, 0) if may_share else (spread, not spread))
        for rule in forbidden + avoided:
            role = name.removeprefix("adam-")
            assert rule["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == role


def test_probes_of_a_starting_role_leave_it_two_minutes() -> None:
    for _, pod in pods({}):
        for container in pod["containers"]:
            probe = container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] == 120
            assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_metrics_are_a_choice_and_share_the_port_of_the_probes() -> None:
    for role in ("controller", "ps", "data", "worker", "driver"):
        assert "--metrics" not in command({}, role)
        words = command({"metrics": True}, role)
        assert words[words.index("--health") + 2] == "--metrics"


def test_images_and_scratch_space_of_data_servers_are_volumes() -> None:
    pod = dict(pods(OTHER))["adam-data"]
    (container,) = pod["containers"]

    assert {"name": "data", "mountPath": "/srv/adam/data", "readOnly": True} in container["volumeMounts"]
    assert variables(container)["ADAM_SPILL"] == "/srv/adam/tmp/spill"
    claims = [
        volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [{"claimName": "images", "readOnly": True}]


def test_commands_carry_the_code_of_the_user_that_their_role_imports() -> None:
    path, layer = ["--step-path", "/srv/code"], ["--layer", "odd=mine:Odd"]
    step = ["--step", "mine.steps:make", "--step-args", '{"by": "$$(HOME)"}']
    more = {
        "driver": [*path, *layer, *step],
        "worker": [*path, *layer, "--allow-step", "mine.steps"],
        "ps": [*path, "--allow-rule", "mine:Lion"],
        "data": path,
        "controller": [],
    }
    for role, words in more.items():
        assert command(CODE, role) == [*command({}, role), *words]


def test_the_results_stay_after_the_release() -> None:
    claim = the({}, "PersistentVolumeClaim", "adam-results")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    ("values", "name", "claim"),
    [
        ({"config": 'data = "digits"\nservers = 3\n'}, "adam", "config has a number of roles"),
        ({}, "a" * 41, "which have at most 63 letters"),
    ],
)
def test_what_pods_would_not_follow_is_refused(values: Manifest, name: str, claim: str) -> None:
    with pytest.raises(ValueError, match=claim):
        rendered(values, name=name)
