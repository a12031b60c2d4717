"""The schemes of environments: what each is, its options, and the module that adapts it.

`docs/environments.md` has its tables from here (`areal_agents/environments/reference.py`), and adapters read
their options with these defaults. Nothing here imports an adapter, which may need a package that is not
installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_agents.environments.line import EnvironmentLine
from areal_agents.errors import TaskEnvironmentError


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a line.

    Attributes:
        name: its name.
        default: its value where the line has none; its type is the type of the option, except that None
            allows any.
        meaning: what it does.
        shown: how the documentation shows the default; "": as it is.
    """

    name: str
    default: Any
    meaning: str
    shown: str = ""


@dataclass(frozen=True, slots=True)
class Scheme:
    """An adapter.

    Attributes:
        module: the module of `adapters` whose function `open` takes an EnvironmentLine and returns an
            Environment.
        example, played, tasks, reward: an example of a line, what is played, and where the tasks and the
            reward come from, for the documentation.
        options: the options that are not given to the environment.
        package: the import name of the package that it needs; "": none.
        requirement: what pip installs for it.
        rewards: whether `play` returns the reward; otherwise the configuration's reward function gives it.
        takes_data: whether its tasks may be rows of the user's data.
        gives_options: whether further options are given to the environment, instead of being refused.
    """

    module: str
    example: str
    played: str
    tasks: str
    reward: str
    options: tuple[Option, ...]
    package: str = ""
    requirement: str = ""
    rewards: bool = True
    takes_data: bool = False
    gives_options: bool = True

    @property
    def distribution(self) -> str:
        """The name of the package on PyPI; "" if the scheme needs none."""
        return re.split(r"[\[<>=]", self.requirement.strip("'"))[0]

    def take(self, line: EnvironmentLine) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the options of a line into this scheme's, completed by the defaults, and the others.

        Raises:
            TaskEnvironmentError: an option has another type than its default, or there are others and they
                are not given to the environment.
        """
        defaults = {option.name: option.default for option in self.options}
        own, others = line.take(**defaults)
        if others and not self.gives_options:
            raise TaskEnvironmentError(
                f"{line.text!r}: {line.scheme} has no option {', '.join(sorted(others))}; it has "
                f"{', '.join(sorted(defaults)) or 'none'}"
            )
        return own, others


def _seeded(held_out: int) -> tuple[Option, ...]:
    return (
        Option("size", 1000, "training tasks"),
        Option("held_out", held_out, "held-out tasks"),
        Option("seed", 0, "the seed that the tasks begin with"),
    )


def _turns(default: int, what: str) -> Option:
    return Option("max_turns", default, f"most {what}")


_CALLS = "calls of the model"
_STEP_TIMEOUT = Option("step_timeout_s", 300.0, "time limit of each answer of the server, in seconds")
_LISTED = (
    Option("size", 0, "training tasks, the first of them", "all"),
    Option(
        "held_out",
        None,
        'held-out tasks: how many, a list of ids such as `["a","b"]`, or a file with an id on each line',
        "a tenth, at least 1, at most 128",
    ),
    Option("seed", 0, "decides which tasks are held out"),
)

SCHEMES: Mapping[str, Scheme] = {
    "reasoning-gym": Scheme(
        "reasoning_gym",
        "reasoning-gym:countdown?size=500&difficulty=1",
        "one question, one answer",
        "generated from seeds",
        "`score_answer` of the data set",
        (
            *_seeded(128),
            Option("difficulty", -1, "a level of the data set's curriculum, 0 the first", "none"),
            Option(
                "system",
                "",
                "the system message; an answer without tags is the whole reply",
                "asks for `<answer>` tags",
            ),
        ),
        "reasoning_gym",
        "reasoning-gym",
    ),
    "tools": Scheme(
        "tool_class",
        "tools:my_environment.py:Search?max_turns=8",
        "tool calls until the model answers",
        "`tasks(split)` of the class, or `data`",
        "`get_reward()` or `reward` of the object",
        (_turns(16, _CALLS),),
        takes_data=True,
        gives_options=False,
    ),
    "textarena": Scheme(
        "textarena",
        "textarena:GuessTheNumber-v0?size=500",
        "a game in text for one player",
        "seeds",
        "the reward of the player",
        (*_seeded(64), _turns(100, "moves")),
        "textarena",
        "textarena",
    ),
    "gymnasium": Scheme(
        "gymnasium",
        "gymnasium:FrozenLake-v1?is_slippery=false",
        "observations and actions in text",
        "seeds",
        "the sum of all rewards",
        (
            *_seeded(64),
            _turns(100, "moves"),
            Option("instructions", "", "what the model reads first", "the environment's own description"),
        ),
        "gymnasium",
        "'gymnasium[toy-text]'",
    ),
    "inspect": Scheme(
        "inspect_task",
        "inspect:my_tasks.py:my_task?score=accuracy",
        "the solver of the task",
        "the task's data set",
        "a score of the task",
        (
            *_LISTED,
            Option(
                "score",
                "",
                "which score is the reward: the name of a scorer, or `scorer.key` where its value has keys",
                "the only one",
            ),
            Option("grader", "", "the model of the role `grader`, such as `openai/gpt-5-mini`", "none"),
            Option("sandbox", "", "the sandbox of all samples, in place of the task's", "the task's"),
        ),
        "inspect_ai",
        "inspect-ai",
    ),
    "verifiers": Scheme(
        "verifiers_environment",
        "verifiers:my-taskset",
        "the environment's own agent",
        "those of the taskset or the environment",
        "the sum of its weighted rewards",
        (
            *_LISTED,
            Option("max_turns", None, f"most {_CALLS}", "no limit"),
            Option("harness", "", "the agent (0.4)", "the taskset's own; `null`, which only calls tools"),
            Option("runtime", "subprocess", "where the agent runs (0.4), such as `docker`"),
        ),
        "verifiers",
        "verifiers",
    ),
    "openenv": Scheme(
        "openenv_server",
        "openenv:http://127.0.0.1:8000",
        "tool calls, actions or text, as the server's schema says",
        "seeds, or `data`",
        "the sum of all rewards",
        (
            *_seeded(64),
            _turns(100, "moves"),
            Option("instructions", "", "what the model reads before the first observation", "nothing"),
            _STEP_TIMEOUT,
            Option(
                "unrewarded",
                None,
                "the reward of an episode in which the server gives none",
                "the episode fails",
            ),
        ),
        "openenv.core",
        "openenv",
        takes_data=True,
    ),
    "harbor": Scheme(
        "harbor",
        "harbor:path/to/tasks",
        "commands and files in a sandbox until the model answers",
        "the folders",
        "`tests/test.sh` of the task",
        (
            *_LISTED,
            _turns(64, _CALLS),
            Option("command_timeout_s", 120.0, "time limit of a command of the model, in seconds"),
            Option("score", "", "which reward of reward.json counts", "`reward`, or the only one"),
            Option(
                "isolation",
                "auto",
                "`docker`, `bubblewrap`, or `auto`: docker if an engine answers",
            ),
            Option(
                "network",
                False,
                "give the containers of tasks that allow it Docker's default network",
                "false",
            ),
            Option(
                "ignore_dockerfile",
                False,
                "without Docker, leave out what a Dockerfile does beyond copies and variables",
                "false",
            ),
        ),
        gives_options=False,
    ),
    "nemo-gym": Scheme(
        "nemo_gym",
        "nemo-gym:http://127.0.0.1:8000?rows=train.jsonl",
        "tool calls until the model answers",
        "rows of a file, or `data`",
        "`/verify` of the server",
        (
            Option("rows", "", "a JSONL file of rows with `responses_create_params`", "none"),
            *_LISTED,
            _turns(32, _CALLS),
            _STEP_TIMEOUT,
        ),
        takes_data=True,
        gives_options=False,
    ),
    "mcp": Scheme(
        "mcp_server",
        "mcp:python my_server.py",
        "tool calls until the model answers",
        "`data`",
        "`reward`",
        (_turns(16, _CALLS),),
        "mcp.client",
        "'mcp>=2'",
        rewards=False,
        takes_data=True,
        gives_options=False,
    ),
}


def scheme_of(line: EnvironmentLine) -> Scheme:
    """Return the scheme of a line. Raises TaskEnvironmentError if there is none of this name."""
    if line.scheme not in SCHEMES:
        raise TaskEnvironmentError(
            f"there is no environment scheme {line.scheme!r} ({line.text!r}); there are {', '.join(SCHEMES)}"
        )
    return SCHEMES[line.scheme]
