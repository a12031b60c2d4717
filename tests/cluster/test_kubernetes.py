"""The manifests of a run on Kubernetes: their contents, and that Kubernetes' own schemas accept them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_agents.cli import app
from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.external import ExternalLauncher
from areal_agents.cluster.launchers.kubernetes.config import KubernetesConfig
from areal_agents.cluster.launchers.kubernetes.manifests import manifests
from areal_agents.cluster.launchers.kubernetes.objects import Run, as_yaml, object_name
from areal_agents.cluster.launchers.rendered import Rendered, render, submit
from areal_agents.cluster.train import check_config
from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.store.roles import Role
from areal_agents.tls import TlsConfig

QUICK_START = Path(__file__).parents[2] / "examples/search_agent/config.yaml"
CONFIG = "model: Qwen/Qwen3-0.6B\nagent: agent.py:play\n"
SETTINGS = KubernetesConfig(image="registry/run:1", secret="run-secrets")
RELEASES = ("1.28", "1.37")  # the oldest with pod index labels, and the newest that is tested


def processes(role: Role, count: int, **needs: int) -> list[RoleProcess]:
    return [RoleProcess(role, index, ("unused",), **needs) for index in range(count)]


RUN = Run(
    name="My run_1",
    config=CONFIG,
    overrides=("trainer.steps=10",),
    store_url="postgresql://areal@postgres/areal?schema=my_run",
    trainer_stop_s=100.0,
    processes=[
        *processes("engine", 2, gpus=2, cpus=8),
        *processes("proxy", 2, cpus=2),
        *processes("trainer", 2, gpus=8, cpus=16),
        *processes("rollout", 3, cpus=4),
    ],
)


SANDBOXED = replace(RUN, processes=[*RUN.processes, *processes("sandbox", 8, cpus=2)])
SANDBOX_SETTINGS = SETTINGS.model_copy(update={"sandbox_image": "registry/agent:1"})
TLS_SETTINGS = KubernetesConfig(
    image="registry/run:1", namespace="training", tls_secret="run-tls", sandbox_tls_secret="sandbox-tls"
)


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests, read back from YAML, by kind and name."""
    made = [*yaml.safe_load_all(as_yaml(manifests(RUN, SETTINGS)))]
    return {(made["kind"], made["metadata"]["name"]): made for made in made}


def test_each_role_has_its_objects(objects: Mapping[tuple[str, str], Any]) -> None:
    assert [*objects] == [
        ("ConfigMap", "my-run-1-config"),
        ("PersistentVolumeClaim", "my-run-1-runs"),
        ("NetworkPolicy", "my-run-1"),
        ("Job", "my-run-1-supervisor"),
        *(("Service", "my-run-1-engine"), ("StatefulSet", "my-run-1-engine")),
        ("PodDisruptionBudget", "my-run-1-engine"),
        *(("Service", "my-run-1-proxy"), ("StatefulSet", "my-run-1-proxy")),
        ("PodDisruptionBudget", "my-run-1-proxy"),
        *(("Service", "my-run-1-trainer"), ("Job", "my-run-1-trainer")),
        *(("Service", "my-run-1-rollout"), ("Job", "my-run-1-rollout")),
    ]


def test_the_supervisor_has_the_configuration_and_starts_no_process(
    objects: Mapping[tuple[str, str], Any],
) -> None:
    assert objects["ConfigMap", "my-run-1-config"]["data"] == {"cluster-run.yaml": CONFIG}
    (container,) = pod_of(objects["Job", "my-run-1-supervisor"])["containers"]
    assert container["command"] == [
        *("areal-agents", "train", "/workspace/cluster-run.yaml", "--launcher", "external"),
        *("trainer.steps=10", "name=My run_1", "run_dir=/runs/my-run-1"),
    ]
    assert container["volumeMounts"][-1] == {
        "name": "config",
        "mountPath": "/workspace/cluster-run.yaml",
        "subPath": "cluster-run.yaml",
        "readOnly": True,
    }


def test_a_pod_has_the_index_of_its_process_and_the_gpus_that_it_needs(
    objects: Mapping[tuple[str, str], Any],
) -> None:
    engines = objects["StatefulSet", "my-run-1-engine"]
    (container,) = pod_of(engines)["containers"]
    assert engines["spec"]["replicas"] == 2
    assert container["command"] == [
        *("areal-agents", "role", "engine", "--run", RUN.store_url),
        *("--index", "$(INDEX)", "--host", "$(POD_IP)", "--port", "8000"),
    ]
    index = "metadata.labels['apps.kubernetes.io/pod-index']"
    assert {"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}} in container["env"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"}
    assert container["envFrom"] == [{"secretRef": {"name": "run-secrets"}}]


def test_the_trainer_ends_with_the_run_and_has_enough_time_to_end(
    objects: Mapping[tuple[str, str], Any],
) -> None:
    trainer = objects["Job", "my-run-1-trainer"]
    assert (trainer["spec"]["completionMode"], trainer["spec"]["completions"]) == ("Indexed", 2)
    assert pod_of(trainer)["restartPolicy"] == "OnFailure"
    assert pod_of(trainer)["terminationGracePeriodSeconds"] == 120  # with the time until its place is free
    assert pod_of(objects["Job", "my-run-1-rollout"])["restartPolicy"] == "OnFailure"


def test_every_selector_selects_the_pods_of_its_role(objects: Mapping[tuple[str, str], Any]) -> None:
    pods = {
        made["metadata"]["labels"]["app.kubernetes.io/component"]: made["spec"]["template"]["metadata"][
            "labels"
        ]
        for made in objects.values()
        if "template" in made.get("spec", {})
    }
    for (kind, _), made in objects.items():
        if kind == "Service":
            assert made["spec"]["selector"] == pods[made["metadata"]["labels"]["app.kubernetes.io/component"]]
    policy = objects["NetworkPolicy", "my-run-1"]["spec"]["podSelector"]["matchLabels"]
    assert all(policy.items() <= labels.items() for labels in pods.values())


def test_only_rollouts_reach_sandbox_pods_which_reach_only_proxies_and_the_store() -> None:
    made = manifests(SANDBOXED, SANDBOX_SETTINGS)
    policies = {one["metadata"]["name"]: one["spec"] for one in made if one["kind"] == "NetworkPolicy"}
    run = {"app.kubernetes.io/name": "areal-agents", "app.kubernetes.io/instance": "my-run-1"}

    def pods(role: str) -> dict[str, Any]:
        return {"matchLabels": {**run, "app.kubernetes.io/component": role}}

    http = [{"protocol": "TCP", "port": 8000}]
    others = {
        "matchLabels": run,
        "matchExpressions": [
            {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["sandbox"]}
        ],
    }
    assert policies == {
        "my-run-1": {
            "podSelector": others,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": others}]}],
        },
        "my-run-1-proxy": {
            "podSelector": pods("proxy"),
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods("sandbox")}], "ports": http}],
        },
        "my-run-1-sandbox": {
            "podSelector": pods("sandbox"),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": pods("rollout")}], "ports": http}],
            "egress": [
                {"to": [{"podSelector": pods("proxy")}], "ports": http},
                {"ports": [{"protocol": "TCP", "port": 5432}]},
                {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
            ],
        },
    }


def test_rollout_pods_that_create_jobs_have_a_token_and_the_jobs_reach_the_proxies() -> None:
    run = replace(RUN, creates_jobs=True)
    with pytest.raises(ConfigError, match=r"^cluster\.kubernetes\.service_account: the rollout pods create"):
        manifests(run, SETTINGS)
    made = manifests(run, ALL_SETTINGS)
    tokens = {
        one["metadata"]["name"]: pod_of(one)["automountServiceAccountToken"]
        for one in made
        if "template" in one.get("spec", {})
    }
    assert [name for name, has_token in tokens.items() if has_token] == ["my-run-1-rollout"]
    assert not any(
        pod_of(one)["automountServiceAccountToken"]
        for one in manifests(RUN, ALL_SETTINGS)
        if "template" in one.get("spec", {})
    )
    [policy] = [one["spec"] for one in made if one["metadata"]["name"] == "my-run-1-jobs"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "proxy"
    [rule] = policy["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
    jobs = {"matchExpressions": [{"key": "areal-agents/jobs-of", "operator": "Exists"}]}
    assert rule["from"] == [{"podSelector": jobs}]


def test_a_sandbox_pod_has_no_run_folder_and_only_the_secrets_that_it_needs() -> None:
    [pool] = [
        one
        for one in manifests(SANDBOXED, SANDBOX_SETTINGS)
        if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "my-run-1-sandbox"
    ]
    pod = pod_of(pool)
    (container,) = pod["containers"]
    assert pool["spec"]["replicas"] == 8 and container["image"] == "registry/agent:1"
    assert pod["volumes"] == [{"name": "files", "emptyDir": {"sizeLimit": "20Gi"}}]
    assert container["volumeMounts"] == [{"name": "files", "mountPath": "/tmp"}]
    secrets = [one for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})]
    assert [one["name"] for one in secrets] == ["PGPASSWORD", "AREAL_AGENTS_RUN_TOKEN"]
    assert "envFrom" not in container
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{command: play, isolation: bubblewrap}", "agent.isolation: bubblewrap does not work"),
        ("{command: play, isolation: process}", "agent.limits: a pod cannot make cgroups"),
    ],
)
def test_isolation_and_limits_that_a_sandbox_pod_cannot_provide_are_refused(agent: str, message: str) -> None:
    overrides = ("store.url=postgresql://areal@db/areal", "cluster.sandboxes=2", f"agent={agent}")
    with pytest.raises(ConfigError, match=message):
        render("kubernetes", QUICK_START, overrides)


def test_with_certificates_servers_use_the_names_of_their_pods_and_serve_https() -> None:
    pods = {
        made["metadata"]["name"].removeprefix("my-run-1-"): pod_of(made)
        for made in manifests(SANDBOXED, TLS_SETTINGS)
        if made["kind"] in ("Job", "StatefulSet")
    }
    found = {}
    for role, pod in pods.items():
        (container,) = pod["containers"]
        [volume] = [one for one in pod["volumes"] if one["name"] == "tls"]
        assert {"name": "tls", "mountPath": "/etc/areal-agents/tls", "readOnly": True} in container[
            "volumeMounts"
        ]
        assert volume["projected"]["defaultMode"] == 0o440
        files = {
            (source["secret"]["name"], item["path"])
            for source in volume["projected"]["sources"]
            for item in source["secret"]["items"]
        }
        command = container["command"]
        probes = [container[probe] for probe in container if probe.endswith("Probe")]
        found[role] = (
            command[command.index("--host") + 1] if "--host" in command else None,
            [container_port["name"] for container_port in container.get("ports", ())],
            {probe["httpGet"]["scheme"] for probe in probes},
            files,
        )
    authority = ("run-tls", "ca.crt")
    own = {authority, ("run-tls", "tls.crt"), ("run-tls", "tls.key")}
    of_sandbox = {authority, ("sandbox-tls", "tls.crt"), ("sandbox-tls", "tls.key")}
    domain = "training.svc"
    assert found == {
        "supervisor": (None, [], set(), {authority}),
        "engine": (f"$(POD_NAME).my-run-1-engine.{domain}", ["https"], {"HTTPS"}, own),
        "proxy": (f"$(POD_NAME).my-run-1-proxy.{domain}", ["https"], {"HTTPS"}, own),
        "trainer": ("$(POD_IP)", ["http"], set(), {authority}),
        "rollout": ("$(POD_IP)", [], set(), {authority}),
        "sandbox": (f"$(POD_NAME).my-run-1-sandbox.{domain}", ["https"], {"HTTPS"}, of_sandbox),
    }
    (engine,) = pods["engine"]["containers"]
    assert {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in engine["env"]


def test_certificates_do_not_change_the_network_policies() -> None:
    def policies(settings: KubernetesConfig) -> list[dict[str, Any]]:
        return [one["spec"] for one in manifests(SANDBOXED, settings) if one["kind"] == "NetworkPolicy"]

    assert policies(TLS_SETTINGS) == policies(SANDBOX_SETTINGS)


TLS_OVERRIDES = (
    *("store.url=postgresql://areal@db/areal", "cluster.kubernetes.image=registry/run:1"),
    *("cluster.kubernetes.namespace=training", "cluster.kubernetes.tls_secret=run-tls"),
)
AGENT = "agent={command: play, isolation: process, limits: {memory_mb: null, processes: null}}"


def test_the_dry_run_lists_the_names_that_each_certificate_must_cover() -> None:
    comments = [
        line for line in render("kubernetes", QUICK_START, TLS_OVERRIDES).text.splitlines() if line[:1] == "#"
    ]
    assert comments == [
        "# The certificate in the Secret run-tls must be for: *.search-agent-engine.training.svc, "
        "*.search-agent-proxy.training.svc"
    ]
    sandboxed = (*TLS_OVERRIDES, AGENT, "cluster.sandboxes=2", "cluster.kubernetes.sandbox_tls_secret=other")
    text = render("kubernetes", QUICK_START, sandboxed).text
    assert "# The certificate in the Secret other must be for: *.search-agent-sandbox.training.svc\n" in text


def test_the_supervisor_of_a_run_with_certificates_accepts_its_configuration() -> None:
    made = [*yaml.safe_load_all(render("kubernetes", QUICK_START, TLS_OVERRIDES).text)]
    [supervisor] = [one for one in made if one["metadata"]["name"] == "search-agent-supervisor"]
    command = pod_of(supervisor)["containers"][0]["command"]
    arguments = [one for one in command[command.index("external") + 1 :] if not one.startswith("run_dir=")]
    config = load_config(QUICK_START, arguments, weights=False)
    check_config(config, ExternalLauncher(config.store.url or ""))
    folder = "/etc/areal-agents/tls"
    assert config.cluster.tls == TlsConfig(
        certificate=f"{folder}/tls.crt", key=f"{folder}/tls.key", authority=f"{folder}/ca.crt"
    )


@pytest.mark.parametrize(
    ("launcher", "overrides", "message"),
    [
        (
            "kubernetes",
            ("cluster.tls={certificate: a, key: b, authority: c}",),
            "^cluster.tls has files of machines; for Kubernetes leave it out, .*kubernetes.tls_secret",
        ),
        (
            "kubernetes",
            ("cluster.kubernetes.namespace=''",),
            "cluster.kubernetes.*tls_secret needs namespace",
        ),
        (
            "kubernetes",
            (AGENT, "cluster.sandboxes=1"),
            "^cluster.kubernetes.sandbox_tls_secret: name a Secret .*cluster.sandboxes",
        ),
        (
            "kubernetes",
            ("cluster.kubernetes.sandbox_tls_secret=run-tls",),
            "tls_secret and sandbox_tls_secret are both run-tls",
        ),
        (
            "kubernetes",
            ("cluster.kubernetes.tls_secret=''", "cluster.kubernetes.sandbox_tls_secret=other"),
            "sandbox_tls_secret needs tls_secret",
        ),
        (
            "skypilot",
            (),
            "^cluster.kubernetes.tls_secret: the addresses of the machines that SkyPilot starts",
        ),
        (
            "skypilot",
            ("cluster.kubernetes.tls_secret=''", "cluster.tls={certificate: a, key: b, authority: c}"),
            "^cluster.tls: the addresses of the machines that SkyPilot starts",
        ),
    ],
)
def test_certificates_that_the_pods_cannot_have_are_refused(
    launcher: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(launcher, QUICK_START, (*TLS_OVERRIDES, *overrides))


def test_a_launcher_that_starts_no_pods_refuses_settings_for_their_certificates() -> None:
    config = load_config(QUICK_START, TLS_OVERRIDES, weights=False)
    with pytest.raises(ConfigError, match=r"^cluster\.kubernetes\.tls_secret has the certificates of pods"):
        check_config(config, ExternalLauncher(config.store.url or ""))


def test_a_run_whose_agent_is_a_job_needs_a_public_url_and_a_service_account() -> None:
    job = {"kind": "kubernetes", "template": str(QUICK_START.parents[1] / "agent_jobs/agent-job.yaml")}
    overrides = (
        *("store.url=postgresql://areal@db/areal", "cluster.kubernetes.image=registry/run:1"),
        *(f"agent={json.dumps({'command': 'python agent.py', 'job': job})}", "ablation=null"),
    )
    with pytest.raises(ConfigError, match=r"^proxy\.public_url: the agent's jobs do not reach"):
        render("kubernetes", QUICK_START, overrides)
    overrides += ("proxy.public_url=http://search-agent-proxy:8000",)
    with pytest.raises(ConfigError, match=r"^cluster\.kubernetes\.service_account: "):
        render("kubernetes", QUICK_START, overrides)
    made = render("kubernetes", QUICK_START, (*overrides, "cluster.kubernetes.service_account=runs")).text
    assert "search-agent-jobs" in [one["metadata"]["name"] for one in yaml.safe_load_all(made)]


def test_jobs_in_another_namespace_reach_the_proxies(tmp_path: Path) -> None:
    template = tmp_path / "job.yaml"
    manifest = (QUICK_START.parents[1] / "agent_jobs/agent-job.yaml").read_text()
    template.write_text(manifest.replace('name: "{{name}}"\n', 'name: "{{name}}"\n  namespace: agents\n', 1))
    job = {"kind": "kubernetes", "template": str(template)}
    overrides = (
        *("store.url=postgresql://areal@db/areal", "cluster.kubernetes.image=registry/run:1"),
        *(f"agent={json.dumps({'command': 'python agent.py', 'job': job})}", "ablation=null"),
        *("proxy.public_url=http://search-agent-proxy:8000", "cluster.kubernetes.service_account=runs"),
    )
    made = yaml.safe_load_all(render("kubernetes", QUICK_START, overrides).text)
    policy = {one["metadata"]["name"]: one for one in made}["search-agent-jobs"]
    (source,) = policy["spec"]["ingress"][0]["from"]
    assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "agents"}}
    assert source["podSelector"]["matchExpressions"][0]["key"] == "areal-agents/jobs-of"


def test_slurm_jobs_are_refused_before_a_manifest_is_made() -> None:
    job = {"kind": "slurm", "template": str(QUICK_START.parents[1] / "agent_jobs/agent.sbatch")}
    overrides = (
        *("store.url=postgresql://areal@db/areal", "cluster.kubernetes.image=registry/run:1"),
        *(f"agent={json.dumps({'command': 'python agent.py', 'job': job})}", "ablation=null"),
        "proxy.public_url=http://search-agent-proxy:8000",
    )
    message = r"^agent\.job\.kind: slurm with --launcher kubernetes: the rollout processes .*use kind:"
    with pytest.raises(ConfigError, match=message):
        render("kubernetes", QUICK_START, overrides)


@pytest.mark.parametrize(
    ("config", "overrides", "key"),
    [
        (CONFIG + "proxy: {admin_key: hush}\n", (), "proxy.admin_key"),
        (CONFIG, ("proxy.admin_key=hush",), "proxy.admin_key"),
        (CONFIG, ("proxy={admin_key: hush}",), "proxy.admin_key"),
        (CONFIG, ("store.url=postgresql://me:hu/sh@db/areal",), "store.url"),
        (CONFIG + "store: {url: 'postgresql://me:hush@db/areal'}\n", (), "store.url"),
        (CONFIG, ("store.url=postgresql://db/areal?password=hush",), "store.url"),
    ],
)
def test_a_secret_in_the_configuration_is_refused(config: str, overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: manifests contain no") as error:
        manifests(replace(RUN, config=config, overrides=overrides), SETTINGS)
    assert "hush" not in str(error.value)


def test_an_image_is_required() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes\.image: name an image"):
        manifests(RUN, KubernetesConfig())


def test_object_names_are_valid_in_kubernetes() -> None:
    assert object_name("Search Agent_2") == "search-agent-2"
    assert object_name("2048") == "run-2048"
    long = "x" * 30 + "-y" * 30
    assert object_name(long) == f"{'x' * 30}-{hashlib.sha256(long.encode()).hexdigest()[:8]}"
    assert len(object_name(long)) < 40 and object_name(long + "1") != object_name(long + "2")


def test_dollar_signs_in_overrides_and_names_reach_the_processes() -> None:
    """Kubernetes expands $(NAME) in a command as a variable, and reads $$ as a $."""
    run = replace(RUN, name="a$(HOME)", overrides=("agent.command=echo $$ $(HOME)",))
    made = {one["metadata"]["name"]: one for one in manifests(run, SETTINGS)}
    command = made["a-home-supervisor"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {"agent.command=echo $$$$ $$(HOME)", "name=a$$(HOME)"} <= {*command}


ALL_SETTINGS = KubernetesConfig(
    image="registry/run:1",
    namespace="training",
    secret="run-secrets",
    storage_class="nfs",
    volumes={"/models": "models"},
    node_selector={"gpu": "h100"},
    tolerations=({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
    pull_secret="registry",
    service_account="runs",
)


def every_manifest() -> Iterator[dict[str, Any]]:
    for settings in (SETTINGS, ALL_SETTINGS, SETTINGS.model_copy(update={"claim": "shared"})):
        yield from manifests(RUN, settings)
    yield from manifests(SANDBOXED, SANDBOX_SETTINGS)
    yield from manifests(SANDBOXED, TLS_SETTINGS)
    yield from manifests(replace(SANDBOXED, creates_jobs=True), ALL_SETTINGS)


@pytest.mark.cluster
@pytest.mark.parametrize("release", RELEASES)
def test_the_schemas_of_kubernetes_accept_every_manifest(release: str) -> None:
    """Validation is strict: a field that the schema does not know is an error."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed here: make test-cluster"
    )
    for made in every_manifest():
        kubernetes_validate.validate(made, release, strict=True)
    wrong = manifests(RUN, SETTINGS)[-1]
    pod_of(wrong)["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, release, strict=True)


def test_a_dry_run_prints_the_manifests_of_a_local_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(
            [
                *("train", str(QUICK_START), "--launcher", "kubernetes", "--dry-run"),
                *("store.url=postgresql://areal@db/areal", "cluster.kubernetes.image=registry/run:1"),
            ]
        )
    assert not ended.value.code
    made = [*yaml.safe_load_all(capsys.readouterr().out)]
    assert made[0]["data"]["cluster-run.yaml"] == QUICK_START.read_text()
    jobs = {one["metadata"]["name"]: one for one in made if one["kind"] == "Job"}
    assert [*jobs] == ["search-agent-supervisor", "search-agent-trainer", "search-agent-rollout"]
    (supervisor,) = pod_of(jobs["search-agent-supervisor"])["containers"]
    assert "store.url=postgresql://areal@db/areal" in supervisor["command"]


def test_without_kubectl_nothing_is_applied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^kubectl is not installed here; install it, or use --dry-run"):
        submit(Rendered("", ("kubectl", "apply", "-f", "-"), then=""))


def pod_of(made: Mapping[str, Any]) -> dict[str, Any]:
    return made["spec"]["template"]["spec"]
