"""The quick-start model: a small model, trained to call tools, with which the whole loop runs on a laptop.

In a wheel it is the folder `quickstart_model` of the package; in a checkout it is that of the search-agent
example, of which the wheel's folder is a copy.
"""

from __future__ import annotations

from pathlib import Path

NAME = "quickstart"  # the name of the model in a configuration
_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE / "quickstart_model", _PACKAGE.parent / "examples" / "search_agent" / "model")


def quickstart_model() -> Path | None:
    """Return the folder of the quick-start model, or None if this installation has none."""
    return next((folder for folder in _FOLDERS if (folder / "config.json").is_file()), None)
