"""Network policies of a run: which pods reach which.

They have an effect only if the network plugin of the cluster enforces policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_agents.cluster.launchers.kubernetes.objects import COMPONENT, PORT, RunObjects
from areal_agents.rollout.agents.jobs.kubernetes import OWNER as OWNER_OF_JOBS
from areal_agents.store.postgres import host_of


def network_policies(run: RunObjects, *, store_url: str, has_sandboxes: bool) -> list[dict[str, Any]]:
    """Return the policies of a run: only its pods reach its pods, and what these reach is not limited.

    Sandbox pods are an exception: only rollout pods reach them, and they reach the proxies, the store and
    name resolution only.

    Args:
        store_url: the store, whose port they reach.
    """
    if not has_sandboxes:
        every = {"matchLabels": run.labels}
        return [_policy(run, "", every, [{"from": [_pods(every)]}])]
    others = {
        "matchLabels": run.labels,
        "matchExpressions": [{"key": COMPONENT, "operator": "NotIn", "values": ["sandbox"]}],
    }
    http = [{"protocol": "TCP", "port": PORT}]
    proxy, rollout, sandbox = (
        {"matchLabels": run.labels_of(role)} for role in ("proxy", "rollout", "sandbox")
    )
    store = [{"protocol": "TCP", "port": host_of(store_url)[1]}]
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return [
        _policy(run, "", others, [{"from": [_pods(others)]}]),
        _policy(run, "-proxy", proxy, [{"from": [_pods(sandbox)], "ports": http}]),
        _policy(
            run,
            "-sandbox",
            sandbox,
            [{"from": [_pods(rollout)], "ports": http}],
            egress=[{"to": [_pods(proxy)], "ports": http}, {"ports": store}, {"ports": names}],
        ),
    ]


def policy_of_jobs(run: RunObjects, namespace: str) -> dict[str, Any]:
    """Return the policy that lets the pods of the agent's Jobs reach the proxies.

    It restricts nothing else about these pods, whose manifest is the user's.

    Args:
        namespace: that of the pods; "": that of the run, where a policy selects pods by default.
    """
    jobs = _pods({"matchExpressions": [{"key": OWNER_OF_JOBS, "operator": "Exists"}]})
    if namespace:
        jobs["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    http = [{"protocol": "TCP", "port": PORT}]
    proxy = {"matchLabels": run.labels_of("proxy")}
    return _policy(run, "-jobs", proxy, [{"from": [jobs], "ports": http}])


def _policy(
    run: RunObjects,
    suffix: str,
    selector: Mapping[str, Any],
    ingress: list[dict[str, Any]],
    *,
    egress: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "podSelector": dict(selector),
        "policyTypes": ["Ingress", *(["Egress"] if egress is not None else [])],
        "ingress": ingress,
    }
    if egress is not None:
        spec["egress"] = egress
    return run.make("networking.k8s.io/v1", "NetworkPolicy", suffix, spec=spec)


def _pods(selector: Mapping[str, Any]) -> dict[str, Any]:
    return {"podSelector": dict(selector)}
