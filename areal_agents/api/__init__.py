"""Training, evaluating and serving from Python: the programs of the command line, as functions."""

from areal_agents.api.serving import Server, serve
from areal_agents.api.training import Evaluation, Run, evaluate, train

__all__ = ["Evaluation", "Run", "Server", "evaluate", "serve", "train"]
