"""Certificates of pods: for which names they must be, and which Secret each pod has its own from.

A certificate is for the names that the headless services give to pods, because it can be made for these
before there are pods. Only the pods of engines and proxies have the key of `tls_secret`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from areal_agents.cluster.launchers.kubernetes.config import KubernetesConfig
from areal_agents.cluster.launchers.kubernetes.objects import object_name
from areal_agents.store.roles import SERVERS, Role
from areal_agents.tls import TlsConfig

TLS_FOLDER = "/etc/areal-agents/tls"  # where pods see the entries of a Secret with a certificate
MOUNTED_TLS = TlsConfig(
    certificate=f"{TLS_FOLDER}/tls.crt", key=f"{TLS_FOLDER}/tls.key", authority=f"{TLS_FOLDER}/ca.crt"
)


def certificate_names(run: str, settings: KubernetesConfig, roles: Iterable[Role]) -> dict[str, list[str]]:
    """Return the names for which the certificate of each Secret must be; {} without certificates.

    Args:
        run: the name of the run.
        roles: the roles that the run has.
    """
    if not settings.tls_secret:
        return {}
    secrets: dict[str, list[str]] = {}
    for role in SERVERS:
        if role in roles:
            name = f"*.{domain(object_name(run), role, settings.namespace)}"
            secrets.setdefault(_secret_of(role, settings), []).append(name)
    return secrets


def domain(name: str, role: str, namespace: str) -> str:
    """Return what follows the name of a pod of a role in its DNS name.

    The domain of the cluster is left out: the resolver of every pod appends it.

    Args:
        name: that of the run as names of Kubernetes are formed.
    """
    return f"{name}-{role}.{namespace}.svc"


def scheme_of(role: str, settings: KubernetesConfig) -> str:
    """Return what the server of a role speaks."""
    return "https" if settings.tls_secret and role in SERVERS else "http"


def projected_certificate(role: str, settings: KubernetesConfig) -> dict[str, Any]:
    """Return a projected volume with the authority and, for a server, its own certificate."""
    entries = [(settings.tls_secret, ["ca.crt"])]
    if role in SERVERS:
        entries.append((_secret_of(role, settings), ["tls.crt", "tls.key"]))
    sources = [
        {"secret": {"name": name, "items": [{"key": file, "path": file} for file in files]}}
        for name, files in entries
    ]
    return {"defaultMode": 0o440, "sources": sources}


def _secret_of(role: str, settings: KubernetesConfig) -> str:
    """Return the Secret with the certificate of the pods of a role that serves."""
    return settings.sandbox_tls_secret if role == "sandbox" else settings.tls_secret
