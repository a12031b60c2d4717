"""HTTP clients that ignore HTTP_PROXY within a run, and NO_PROXY for child processes that use other clients.

These calls never go through a proxy named by the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY): it cannot
reach loopback and cluster addresses, and it would see episode keys. Certificates named by the environment
(SSL_CERT_FILE, SSL_CERT_DIR) are used as usual. Every httpx client of this package is made here; aiohttp
ignores these proxies by default.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from websockets.asyncio.client import ClientConnection

_NO_PROXY = ("NO_PROXY", "no_proxy")  # programs differ in which of the two they read, and which they prefer


def direct_client(
    *,
    timeout_s: float,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    connect_retries: int = 0,
    http_proxy: str | None = None,
) -> httpx.Client:
    """Return a client that connects to the server directly.

    Args:
        timeout_s: time limit in seconds for connecting, for each read and for each write.
        base_url: the URL to which relative URLs are joined.
        headers: headers to send with every request.
        connect_retries: the number of further attempts to connect; a request is never sent twice.
        http_proxy: URL of an HTTP proxy that the user named explicitly.
    """
    transport = httpx.HTTPTransport(retries=connect_retries, proxy=http_proxy)
    return httpx.Client(
        base_url=base_url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
    )


def direct_async_client(
    *,
    timeout_s: float,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    connect_retries: int = 0,
    connections: int = 100,
    http_proxy: str | None = None,
) -> httpx.AsyncClient:
    """Return the same client for asyncio, with at most `connections` open connections."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = httpx.AsyncHTTPTransport(retries=connect_retries, limits=limits, proxy=http_proxy)
    return httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
    )


def endpoint_client(base_url: str, *, connections: int) -> httpx.AsyncClient:
    """Return a client for an endpoint that the user named, without a time limit on its answers.

    The environment's HTTP proxies are used, except for local hosts.
    """
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    trusted = not _is_local(urlsplit(base_url).hostname or "")
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), limits=limits, trust_env=trusted)


def openai_client(*, base_url: str, api_key: str | None, timeout_s: float) -> AsyncOpenAI:
    """Return an OpenAI client, without retries, for an endpoint that the user named.

    The environment's HTTP proxies are used, except for local hosts.

    Args:
        base_url: the URL of the endpoint, with /v1.
        api_key: its key; None: OPENAI_API_KEY.
        timeout_s: time limit of a request in seconds.

    Raises:
        openai.OpenAIError: there is no key.
    """
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(
        timeout=timeout_s, trust_env=not _is_local(urlsplit(base_url).hostname or "")
    )
    return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=0, http_client=http)


def direct_openai_client() -> AsyncOpenAI:
    """Return an OpenAI client whose base URL and key each call sets, without a time limit of its own.

    The proxy answers a repeated call with the reply to the first, so that retries sample nothing twice.
    The time limit of an episode bounds every call.
    """
    from openai import AsyncOpenAI

    http = direct_openai_transport()
    return AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=None, http_client=http)


def direct_openai_transport() -> Any:
    """Return what the OpenAI client takes as its `http_client`, without a time limit.

    Versions of openai differ in the package that it is of.
    """
    from openai import DefaultAsyncHttpxClient

    return DefaultAsyncHttpxClient(trust_env=False, timeout=None)


def openai_client_sync(*, base_url: str, api_key: str) -> OpenAI:
    """Return the real OpenAI client for a proxy of ours, connected directly."""
    from openai import DefaultHttpxClient, OpenAI

    return OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(trust_env=False))


def openai_errors() -> tuple[type[Exception], ...]:
    """Return the base of the exceptions that `openai_client` and its client raise."""
    from openai import OpenAIError

    return (OpenAIError,)


async def direct_websocket(
    url: str,
    *,
    headers: Mapping[str, str],
    connect_s: float,
    longest_message: int,
    ping_s: float,
    silent_s: float,
    goodbye_s: float,
) -> ClientConnection:
    """Return a WebSocket to a server of the run, connected directly.

    Args:
        url: its URL, with http or https.
        connect_s: time limit in seconds for the connection and the handshake.
        longest_message: the most bytes of a message that is received.
        ping_s, silent_s: a ping is sent every `ping_s`; the connection ends if none is answered for
            `silent_s`.
        goodbye_s: longest wait for the server to confirm the end of the connection.

    Raises:
        OSError: there is no connection, or the server refuses it.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake

    try:
        return await connect(
            "ws" + url.removeprefix("http"),
            additional_headers=headers,
            proxy=None,
            compression=None,
            open_timeout=connect_s,
            max_size=longest_message,
            ping_interval=ping_s,
            ping_timeout=silent_s,
            close_timeout=goodbye_s,
        )
    except InvalidHandshake as error:
        raise ConnectionRefusedError(str(error)) from error


def websocket_errors() -> tuple[type[Exception], ...]:
    """Return what a WebSocket raises when its connection has ended."""
    from websockets.exceptions import ConnectionClosed

    return (ConnectionClosed,)


def bypassing_proxies(
    environment: Mapping[str, str], *urls: str, hosts: Sequence[str] = ()
) -> dict[str, str]:
    """Return `environment` with the hosts of `urls` added to NO_PROXY, for a child process that calls them.

    Only hosts of this machine and of private networks are added: "localhost" and literal addresses that are
    loopback, private or link-local. A public host may be reachable only through the user's HTTP proxy.

    Args:
        hosts: further names and addresses of this machine, which are added whatever they are.
    """
    local = [host for url in urls if (host := urlsplit(url).hostname) is not None and _is_local(host)]
    given = [name.strip() for variable in _NO_PROXY for name in environment.get(variable, "").split(",")]
    if "*" in given:
        return dict(environment) | dict.fromkeys(_NO_PROXY, "*")
    names = dict.fromkeys(name for name in (*given, *local, *hosts) if name)
    return dict(environment) | dict.fromkeys(_NO_PROXY, ",".join(names)) if names else dict(environment)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost"
