"""The page on a proxy, at /view: it shows the run of the proxy, or its store alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from areal_agents.launch.run_folder import RunFolder
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.view.access import Access
from areal_agents.view.app import create_app
from areal_agents.view.runs import Run, Runs

FACTORY = "areal_agents.view.mounted:create_page"


def create_page(
    *, store: str, model: str, run: str | None, keys: Sequence[str], is_stopping: Callable[[], bool]
) -> ASGIApp:
    """Return the app; see `areal_agents.proxy.page.Page`."""
    if run is not None:
        shown = Run.of_folder(RunFolder(Path(run)), model)
    else:
        opened = ReadOnlyStore(store)
        shown = Run(opened.name, None, opened, model)
    return create_app(Runs.of(shown), Access(keys), is_stopping=is_stopping)
