"""The sandbox hosts of a run on several machines, as the table of roles has them."""

from __future__ import annotations

import logging

from areal_agents.errors import StoreError
from areal_agents.sandbox.remote.hosts import HostAddress, SandboxHosts
from areal_agents.sandbox.remote.messages import token_of
from areal_agents.store import Store

logger = logging.getLogger(__name__)


def hosts_of_run(store: Store, secret: str) -> SandboxHosts:
    """Return the hosts that are running, also those that are started or moved later.

    Args:
        store: the store of the run, which is only read.
        secret: the secret of the run.
    """
    found: list[HostAddress] = []

    def addresses() -> list[HostAddress]:
        nonlocal found
        try:
            rows = store.role_rows("sandbox")
        except StoreError as error:
            logger.warning("the addresses of the sandbox hosts cannot be read: %s", error)
            return found
        running = [row for row in rows if row.is_alive and row.url is not None]
        found = [HostAddress(row.url or "", token_of(secret, row.index, row.epoch)) for row in running]
        return found

    return SandboxHosts(addresses)
