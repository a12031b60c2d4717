"""Training, evaluating and serving from Python: the programs of the command line, as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.lazy_imports import on_first_use

if TYPE_CHECKING:
    from areal_agents.api.serving import Server, serve
    from areal_agents.api.training import Evaluation, Run, evaluate, train

__all__ = ["Evaluation", "Run", "Server", "evaluate", "serve", "train"]

# The process that trains for a caller needs neither what waits for it nor what shows it in a notebook.
__getattr__ = on_first_use(
    __name__, {"serving": ("Server", "serve"), "training": ("Evaluation", "Run", "evaluate", "train")}
)
