"""Templates of jobs: text of the user with named places in double braces, such as {{command}}.

A template must have every place that its kind of job needs, and no other place, so that a mistake in it is
found when the run starts, before the first episode. A place in a comment is not one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from areal_agents.errors import AgentError

_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def read_template(path: str) -> str:
    """Return the text of a template. Raises AgentError if it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(f"agent.job.template: {path} cannot be read: {error}") from None


def check_places(path: str, texts: Iterable[str], places: Collection[str]) -> None:
    """Raise AgentError if a template lacks a place, or has an unknown one.

    Args:
        texts: the parts of the template that are no comments.
        places: the names of the places that it must have.
    """
    found = {name for text in texts for name in _PLACE.findall(text)}
    if missing := [name for name in places if name not in found]:
        raise AgentError(
            f"agent.job.template: {path} has no {_shown(missing[0])}; it needs the places "
            f"{', '.join(map(_shown, places))}, outside comments (docs/clusters.md)"
        )
    if unknown := sorted(found - set(places)):
        raise AgentError(
            f"agent.job.template: {path} has the unknown place {_shown(unknown[0])}; there are "
            f"{', '.join(map(_shown, places))} (docs/clusters.md)"
        )


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text without comments with its places filled in."""
    return _PLACE.sub(lambda place: values[place[1]], text)


def _shown(name: str) -> str:
    return f"{{{{{name}}}}}"
