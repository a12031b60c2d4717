"""A table of transfer: models that were trained through some agents, evaluated through others.

Each model is evaluated through each agent by `areal-agents eval`, and the share of tasks that are repaired is
printed with its interval of 95%. What has been evaluated is read, and what was interrupted goes on:

    python examples/repair_tasks/transfer.py --out evals/transfer \\
        --model mini=runs/repair_tasks-seed0@final \\
        --agent mini=examples/repair_tasks/config.yaml \\
        --agent other="examples/repair_tasks/config.yaml 'agent.prompt=Mend {task.file}'" \\
        agent.executable=.venv-environments-mini-swe-agent/bin/mini
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_agents.evaluation.results import Results

UNTRAINED = "untrained"  # the model of each agent's own configuration


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", default=[], type=named, metavar="NAME=MODEL",
        help="a model, as `areal-agents eval --model` takes it, under the name of the agent that trained it",
    )  # fmt: skip
    parser.add_argument(
        "--agent", action="append", required=True, type=named, metavar="NAME=CONFIG",
        help="a configuration whose agent plays its eval.data; settings of this agent may follow, as words",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="the folder of all evaluations")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of all evaluations")
    options = parser.parse_args()
    models, agents = {UNTRAINED: "", **dict(options.model)}, dict(options.agent)
    for trained, model in models.items():
        for agent, config in agents.items():
            words = [*shlex.split(config), *options.settings]
            evaluate(words, model, options.out / trained / agent)
    print("\n".join(table(options.out, list(models), list(agents))))


def named(text: str) -> tuple[str, str]:
    """Read NAME=VALUE; the name becomes that of a folder."""
    name, _, value = text.partition("=")
    if not value or not name.replace("-", "").replace("_", "").isalnum():
        raise argparse.ArgumentTypeError(
            f"must be NAME=VALUE, with a name of letters, digits, - and _, got {text!r}"
        )
    return name, value


def evaluate(words: Sequence[str], model: str, out: Path) -> None:
    """Evaluate a model through the agent of a configuration, which is the first of the words.

    An evaluation that is complete costs seconds; one with other settings in the same folder is refused.
    """
    named_model = ["--model", model] if model else []
    print(
        f"{out}: {model or 'the model of the configuration'} through {words[0]}", file=sys.stderr, flush=True
    )
    command = [sys.executable, "-m", "areal_agents", "eval", *words, "--out", str(out), *named_model]
    subprocess.run(command, check=True, stdout=sys.stderr)


def table(out: Path, models: Sequence[str], agents: Sequence[str]) -> list[str]:
    """The lines of a Markdown table: a row for each model, a column for each agent."""
    lines = [f"| trained through | {' | '.join(agents)} |", f"| --- |{' --- |' * len(agents)}"]
    return lines + [
        f"| {model} | {' | '.join(shown(out / model / agent) for agent in agents)} |" for model in models
    ]


def shown(folder: Path) -> str:
    """A cell: the mean score with its interval, and the attempts that failed, which count as 0."""
    found = Results.read(folder).metrics()
    mean = found.scores["avg@1"]
    bounds = "" if mean.low is None or mean.high is None else f" [{mean.low:.3f}, {mean.high:.3f}]"
    return f"{mean.value:.3f}{bounds}" + (f", {found.failed} failed" if found.failed else "")


if __name__ == "__main__":
    main()
