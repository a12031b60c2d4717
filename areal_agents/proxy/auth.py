"""Identifies callers: an episode by its key, or the holder of an admin or project key.

Keys are unguessable; the store keeps only their sha256. Comparisons take constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from starlette.requests import Request

from areal_agents.errors import ConfigError, RequestError
from areal_agents.proxy.config import ProxyConfig
from areal_agents.sockets import is_loopback

EPISODE_KEY_PREFIX = "ep-"
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        episode_key: the key of the only episode that the caller may use, or None.
        is_admin: whether the caller may use the whole control API.
        identity: a digest that distinguishes callers without an episode.
    """

    episode_key: str | None
    is_admin: bool
    identity: str


def new_episode_key() -> str:
    """Return a new random key for an episode."""
    return EPISODE_KEY_PREFIX + secrets.token_urlsafe(24)


def key_hash(key: str) -> str:
    """Return the digest under which the store keeps a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Authenticator:
    """Identifies callers. Without an admin key every caller is an admin, which is safe on loopback only."""

    def __init__(self, config: ProxyConfig) -> None:
        self._admin_key = config.admin_key
        self._project_keys = config.project_keys
        self._open = config.admin_key is None

    def identify(self, request: Request) -> Caller:
        """Return the caller of a request.

        Raise RequestError 401 if its keys are wrong or missing, or if they disagree.
        """
        bearer = _bearer(request)
        path_key = request.path_params.get("key")
        if path_key is not None:
            if bearer is not None and not _same(bearer, path_key) and not self._is_admin_key(bearer):
                raise _unauthorized(
                    "the API key and the base_url name different episodes; use the episode's key for both"
                )
            return Caller(path_key, False, "")
        if bearer is not None and bearer.startswith(EPISODE_KEY_PREFIX):
            return Caller(bearer, False, "")
        if self._open:
            return Caller(None, True, key_hash(bearer or "")[:16])
        if bearer is None:
            raise _unauthorized("no API key was given; send it as Authorization: Bearer <key>")
        if self._is_admin_key(bearer):
            return Caller(None, True, key_hash(bearer)[:16])
        # All keys are compared, so that the time taken does not reveal which one matched.
        if any([_same(bearer, key) for key in self._project_keys]):
            return Caller(None, False, key_hash(bearer)[:16])
        raise _unauthorized(
            "the API key is unknown; use an episode's key, a project key or the admin key of this proxy"
        )

    def require_admin(self, request: Request) -> Caller:
        """Return the caller, who must be an admin. Raise RequestError 401 or 403 otherwise."""
        caller = self.identify(request)
        if not caller.is_admin:
            raise RequestError(
                "this request needs the admin key of the proxy", status=403, code="admin_key_required"
            )
        return caller

    def _is_admin_key(self, key: str) -> bool:
        return self._admin_key is not None and _same(key, self._admin_key)


def _bearer(request: Request) -> str | None:
    """Return the key of a request, from where each API has it; Google's has it in a header or the query."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    for header in _KEY_HEADERS:
        if key := request.headers.get(header):
            return key
    return request.query_params.get("key") or None


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")


def refuse_open_access(config: ProxyConfig) -> None:
    """Raise ConfigError if other machines could reach a proxy that has no admin key."""
    if config.admin_key is None and not is_loopback(config.host):
        raise ConfigError(
            f"{config.host} can be reached from other machines: set an admin key (--admin-key), or listen on "
            "127.0.0.1"
        )
