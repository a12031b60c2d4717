"""Turns the definition of an agent and an episode into a command line, an environment and files.

The agent's environment is made from nothing: of this process's variables only those that concern the machine
are kept, so no key and no setting of the host reaches the agent. The episode's key is in its variables and in
the files of its home folder, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.direct_http import bypassing_proxies
from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.cli.definition import CliDefinition, filled

_KEPT = frozenset(
    {
        "ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME",
        "NODE_EXTRA_CA_CERTS", "NO_PROXY", "PATH", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR",
        "SSL_CERT_FILE", "TERM", "TZ", "USER", "all_proxy", "http_proxy", "https_proxy", "no_proxy",
    }
)  # fmt: skip
_FOLDERS = {
    "HOME": "",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}
_FIELD = re.compile(r"\{task((?:\.\w+)*)\}")


@dataclass(frozen=True, slots=True)
class Launch:
    """How the agent of one episode is started.

    Attributes:
        arguments: of the program.
        environment: all of its variables.
        files: the texts of the files of its home folder, by their relative paths.
        stdin: what it reads on standard input.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    stdin: str


def prepare(
    definition: CliDefinition,
    ep: Episode,
    *,
    prompt: str | None,
    model: str,
    context: int,
    max_turns: int | None,
    home: Path,
    workdir: Path,
    inherited: Mapping[str, str],
) -> Launch:
    """Return how an agent is started in an episode.

    Args:
        prompt: what it is told; None: it is started in its mode of the Agent Client Protocol.
        context: the context of the model in tokens.
        max_turns: the most turns, if it has an option for them; None: no limit of its own.
        home: the agent's own home folder.
        workdir: the folder in which it works.
        inherited: the variables of this process.
    """
    root = ep.base_url.removesuffix("/v1")
    values = {
        "anthropic_base_url": root,
        "base_url": ep.base_url,
        "context": str(context),
        "episode": ep.id,
        "google_base_url": root,
        "home": str(home),
        "key": ep.api_key,
        "max_turns": str(max_turns),
        "model": model,
        "prompt": prompt or "",
        "workdir": str(workdir),
    }
    if prompt is None:
        assert definition.acp is not None
        arguments = definition.acp.arguments
    else:
        limit = definition.turn_limit.arguments if definition.turn_limit and max_turns is not None else ()
        arguments = (*limit, *definition.arguments)
    environment = {name: filled(value, values) for name, value in definition.environment.items()}
    return Launch(
        arguments=tuple(filled(argument, values) for argument in arguments),
        environment={**bypassing_proxies(clean_environment(inherited, home), ep.base_url), **environment},
        files={name: filled(text, values) for name, text in definition.files.items()},
        stdin=filled(definition.stdin, values) if prompt is not None else "",
    )


def clean_environment(inherited: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables that concern the machine, with every folder of the user within `home`."""
    kept = {name: value for name, value in inherited.items() if name in _KEPT or name.startswith("LC_")}
    return {**kept, **{name: str(home / folder) for name, folder in _FOLDERS.items()}}


def make_home(home: Path, files: Mapping[str, str]) -> None:
    """Create a home folder with these files; only this user can read it."""
    home.mkdir(mode=0o700)
    for folder in _FOLDERS.values():
        (home / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def of_task(template: str, task: Mapping[str, Any], what: str) -> str:
    """Return a template with the fields of a task in place of {task.NAME}, and the task as JSON for {task}.

    Strings are put in as they are, other values as JSON. All other braces stay.

    Args:
        what: the setting, for the error.

    Raises:
        AgentError: the task lacks a field.
    """

    def field(found: re.Match[str]) -> str:
        value: Any = task
        for name in found[1].split(".")[1:]:
            if not isinstance(value, Mapping) or name not in value:
                has = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else "no fields"
                raise AgentError(f"agent.{what}: the task has no {found[0]}; there is {has or 'nothing'}")
            value = value[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _FIELD.sub(field, template)


def prompts_of_task(templates: Sequence[str] | str, task: Mapping[str, Any]) -> list[str]:
    """Return the prompts of an episode: each template as `of_task` fills it, or the list that a field has.

    Raises:
        AgentError: the task lacks a field, or the field is not a list of strings.
    """
    if not isinstance(templates, str):
        return [of_task(template, task, "prompts") for template in templates]
    text = of_task(templates, task, "prompts")
    try:
        prompts = json.loads(text)
    except ValueError:
        prompts = None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise AgentError(
            f"agent.prompts: {templates} must be a list of strings in the task, got {text[:100]}"
        )
    return prompts


def folder_of_task(template: str, task: Mapping[str, Any]) -> Path:
    """Return the folder that `workdir` names for a task; a field that is an absolute path stays one.

    Raises:
        AgentError: the task lacks a field, or there is no such folder.
    """
    folder = Path(*(of_task(part, task, "workdir") for part in Path(template).parts)).expanduser()
    if not folder.is_dir():
        raise AgentError(f"agent.workdir: there is no folder {folder}")
    return folder
