"""TLS between the processes of a run: the files that a server needs, and how its callers come to trust it."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from areal_agents.core.settings import Settings
from areal_agents.errors import ConfigError

_READ_BY_CLIENTS = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")


class TlsConfig(Settings):
    """The certificate of each machine of a cluster, and the authority that all of them trust.

    For Kubernetes, cluster.kubernetes.tls_secret has them instead.
    """

    certificate: str = Field(
        min_length=1,
        description="PEM file, on every machine, with the certificate for the addresses of this machine, "
        "followed by those of intermediate authorities.",
    )
    key: str = Field(
        min_length=1,
        description="PEM file, on every machine, with its private key, without a password.",
    )
    authority: str = Field(
        min_length=1,
        description="PEM file, on every machine, with the certificate of the authority that has signed the "
        "certificates.",
    )


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return the context of a server with the certificate of this machine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key, password="")  # otherwise OpenSSL asks at the terminal
    return context


def certificate_fault(url: str, error: Exception) -> str:
    """Return what is wrong with the certificate of a server, if a connection failed for that, else ""."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return ""
    return f"{url} has no valid certificate for its address from cluster.tls.authority: {error}"


def check_certificate(tls: TlsConfig, host: str) -> None:
    """Check, by a handshake within this process, that clients accept the certificate for an address.

    Args:
        host: the name or the address at which the server is called.

    Raises:
        ConfigError: they refuse it: it is for other addresses, not signed by the authority, or not valid now.
    """
    callers = ssl.create_default_context(cafile=tls.authority)
    try:
        _shake_hands(callers, server_context(tls), host)
    except ssl.SSLCertVerificationError as error:
        callers.check_hostname, callers.verify_mode = False, ssl.CERT_OPTIONAL
        fault = error.verify_message.rstrip(".")
        with suppress(ssl.SSLError):  # the authority did not sign it, which the fault says
            names = _shake_hands(callers, server_context(tls), host).get("subjectAltName", ())
            fault += f"; it is for {', '.join(name for _, name in names) or 'no address'}"
        raise ConfigError(
            f"cluster.tls: the certificate {tls.certificate} is not valid for {host}, where this process "
            f"will be called: {fault}"
        ) from None


def _shake_hands(callers: ssl.SSLContext, server: ssl.SSLContext, host: str) -> dict[str, Any]:
    """Connect a caller to a server in memory, and return the certificate that the caller is shown."""
    to_server, to_caller = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = callers.wrap_bio(to_caller, to_server, server_hostname=host)
    sides = [caller, server.wrap_bio(to_server, to_caller, server_side=True)]
    while sides:
        for side in tuple(sides):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
                sides.remove(side)
    return caller.getpeercert() or {}


@contextmanager
def trusting(tls: TlsConfig | None, *, serves: bool = True) -> Iterator[None]:
    """Let this process, and what it starts, trust the authority of a run within the with-block.

    The authority is added to those of the machine by variables that are read by the HTTP clients of this
    package, the SDKs of OpenAI and Anthropic, requests, curl and Node.js.

    Args:
        tls: None: nothing changes.
        serves: whether this process needs a certificate too.

    Raises:
        ConfigError: a file of this machine is missing, or the certificate has another key.
    """
    if tls is not None:
        if serves:
            _check_certificate_file(tls)
        _check_authority_file(tls)
    with trusting_authority("" if tls is None else tls.authority):
        yield


@contextmanager
def trusting_authority(authority: str) -> Iterator[None]:
    """Do what `trusting` does, for a process that serves nothing; "": nothing changes."""
    if not authority:
        yield
        return
    import certifi

    with tempfile.TemporaryDirectory(prefix="areal-agents-") as folder:
        bundle = Path(folder) / "authorities.pem"
        earlier = {name: os.environ.get(name) for name in _READ_BY_CLIENTS}
        files = {earlier["SSL_CERT_FILE"] or certifi.where(), *filter(None, earlier.values()), authority}
        bundle.write_text("\n".join(Path(file).read_text() for file in sorted(files)))
        os.environ.update(dict.fromkeys(_READ_BY_CLIENTS, str(bundle)))
        try:
            yield
        finally:
            for name, value in earlier.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _check_certificate_file(tls: TlsConfig) -> None:
    try:
        server_context(tls)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"cluster.tls: the certificate {tls.certificate} with the key {tls.key} cannot be used: {error}"
        ) from None


def _check_authority_file(tls: TlsConfig) -> None:
    try:
        ssl.create_default_context(cafile=tls.authority)
    except OSError as error:
        raise ConfigError(f"cluster.tls.authority: {tls.authority} cannot be used: {error}") from None
