"""`areal-agents verify`: compares the weights in a run's engines with the published weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from areal_agents.config import load_config
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.inference.clients import Protocol, connect, protocol_of
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.store import Store
from areal_agents.tls import trusting_authority
from areal_agents.training.publish.verifying import verify


def run(folder: Path, console: Console) -> bool:
    """Verify every engine of the run in `folder`, and print the results; return whether all agree.

    Raises ConfigError if `folder` is not a run folder, or the run was never started or has ended.
    """
    found = RunFolder(folder)
    if not found.config.is_file():
        raise ConfigError(f"{folder} is not the folder of a run (no {found.config.name} in it)")
    config = load_config(found.config)
    try:
        endpoints = found.read_endpoints()
    except FileNotFoundError:
        raise ConfigError(f"{folder}: the run has no engines yet; start it first") from None
    if found.summary.is_file():
        raise ConfigError(
            f"{folder}: the run has ended, and its engines with it; verify compares the engines of a running "
            "run"
        )
    base = Path(config.model) if config.trainer.publishes_adapters else None
    with Store.open(found.store_at(config.store.url)) as store, trusting_authority(endpoints.authority):
        protocol = protocol_of(config.engine.kind)
        return asyncio.run(_verify_all(endpoints, protocol, store, base, console))


async def _verify_all(
    endpoints: Endpoints, protocol: Protocol, store: Store, base: Path | None, console: Console
) -> bool:
    agree = True
    for url in endpoints.engine_urls:
        async with connect(url, protocol, key=endpoints.engine_key) as engine:
            try:
                one = await verify(engine, store, base=base)
            except ArealAgentsError as error:
                agree = False
                console.print(f"{url}: {error}", markup=False)
            else:
                found, what = one.agreement, "its weights cannot be compared"
                if found is not None:
                    what = f"{found.compared} of {found.tensors} weights agree"
                console.print(f"{url}: version {one.version}, {what}", markup=False)
    return agree
