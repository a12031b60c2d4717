"""Deletes conversations of a run: through its proxy while that is running, and in its store otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from areal_agents.config import Config
from areal_agents.direct_http import direct_client
from areal_agents.errors import ConfigError, StoreError
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store
from areal_agents.tls import trusting_authority

_TIMEOUT_S = 120.0  # of one request
USER = "user"  # the key of the user's name in the metadata of an episode, see proxy/calls/labels.py


def delete(folder: RunFolder, config: Config, *, episodes: Sequence[str], user: str) -> list[str]:
    """Delete the given episodes and those of a user; return the ids of those that existed.

    Args:
        user: the name that the header X-Episode-User gave; "": nobody.

    Raises:
        ConfigError: the run is being started or stopped, so that neither way is open.
        StoreError: the store or the proxy refused; it says for which conversation.
    """
    try:
        with folder.locked(config.store.url), Store.open(folder.store_at(config.store.url)) as store:
            return _in_store(store, episodes, user)
    except ConfigError as locked:
        try:
            return _through_proxy(folder, episodes, user)
        except (httpx.TransportError, FileNotFoundError) as error:
            raise ConfigError(f"{locked}; and its proxy does not answer ({error}): try again") from error


def _in_store(store: Store, episodes: Sequence[str], user: str) -> list[str]:
    ids = list(episodes)
    ids += [episode.id for episode in store.episodes(metadata={USER: user})] if user else []
    for episode in store.episodes(status="open"):
        if episode.id in ids:
            store.seal(episode.id, "aborted", error="it is deleted").result()
    deleted = store.delete_episodes(ids).result()
    store.clear_log(is_alone=True)  # the run is locked
    return deleted


def _through_proxy(folder: RunFolder, episodes: Sequence[str], user: str) -> list[str]:
    """The proxy has open episodes in memory, so it ends them itself."""
    endpoints = folder.read_endpoints()
    headers = {"Authorization": f"Bearer {endpoints.admin_key}"}
    deleted: list[str] = []
    with (
        trusting_authority(endpoints.authority),
        direct_client(base_url=endpoints.local_url, headers=headers, timeout_s=_TIMEOUT_S) as http,
    ):
        ids = list(episodes)
        after: str | None = None
        while user:
            query = {"user": user, **({} if after is None else {"after": after})}
            page = http.get("/episodes", params=query).raise_for_status().json()
            ids += [episode["id"] for episode in page["episodes"]]
            if (after := page["next"]) is None:
                break
        for episode_id in ids:
            answer = http.delete(f"/episodes/{episode_id}")
            if answer.status_code == 404:
                continue
            if answer.is_error:
                raise StoreError(
                    f"{episode_id} was not deleted ({len(deleted)} conversations were, before it): "
                    f"{answer.status_code} {answer.text}"
                )
            deleted.append(episode_id)
    return deleted
