"""The definition of a command-line agent: how it is found, called, and pointed at the proxy, as data.

The files of definitions/ ship with the package; a user's own file has the same form. A definition is
validated as a whole when it is read, so that a run does not start with one that cannot work.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from areal_agents.core.settings import Settings
from areal_agents.errors import AgentError

DEFINITIONS = Path(__file__).parent / "definitions"
PLACEHOLDERS = frozenset(
    {
        "anthropic_base_url",
        "base_url",
        "context",
        "episode",
        "google_base_url",
        "home",
        "key",
        "max_turns",
        "model",
        "prompt",
        "workdir",
    }
)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_VERSION = r"^\d+(\.\d+)*$"


class TurnLimit(Settings):
    """How an agent is told to end after a number of turns, and how it says that it did."""

    arguments: tuple[str, ...] = Field(min_length=1, description="Further arguments, with {max_turns}.")
    statuses: tuple[int, ...] = Field(
        default=(), description="Exit statuses besides 0 with which it ends at the limit."
    )
    says: str = Field(
        default="", description="What it prints at the limit, if such a status can mean something else too."
    )


class AcpMode(Settings):
    """How an agent is started so that it speaks the Agent Client Protocol on its standard streams."""

    arguments: tuple[str, ...] = Field(
        description="The arguments in place of those of a run with one prompt."
    )


class CliDefinition(Settings):
    """How one command-line agent is run. Strings may contain the placeholders that `PLACEHOLDERS` names."""

    program: str = Field(min_length=1, description="The name of the program, as PATH has it.")
    install: str = Field(min_length=1, description="The command that installs it.")
    least_version: str = Field(
        pattern=_VERSION, description="The oldest version that this is for; an older one is refused."
    )
    version_arguments: tuple[str, ...] = Field(
        default=("--version",), description="Arguments with which the program prints its version."
    )
    dialect: Literal["chat", "responses", "messages", "gemini"] = Field(
        description="The API in which it calls the model."
    )
    arguments: tuple[str, ...] = Field(
        default=(),
        description="The arguments of a run that ends by itself; none, with acp: it has only that mode.",
    )
    stdin: str = Field(default="", description="What it reads on standard input.")
    environment: dict[str, str] = Field(
        default={}, description="Its variables, besides those that every agent gets."
    )
    files: dict[str, str] = Field(
        default={}, description="Files of its home folder, by their relative paths."
    )
    turn_limit: TurnLimit | None = Field(default=None, description="Its own limit of turns, if it has one.")
    acp: AcpMode | None = Field(
        default=None, description="Its mode for several prompts, in the Agent Client Protocol, if it has one."
    )

    @property
    def takes_one_prompt(self) -> bool:
        """Whether it can be run with one prompt, to an end that it reaches by itself."""
        return bool(self.arguments or self.stdin)

    @field_validator("files")
    @classmethod
    def _check_paths(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"must be paths within the home folder, got {name!r}")
        return files

    @model_validator(mode="after")
    def _check_placeholders(self) -> CliDefinition:
        for where, text in self._strings():
            if unknown := sorted(set(_PLACEHOLDER.findall(text)) - PLACEHOLDERS):
                known = ", ".join(sorted(PLACEHOLDERS))
                raise ValueError(f"{where}: there is no placeholder {{{unknown[0]}}}; known: {known}")
            if "{prompt}" in text and where == "acp.arguments":
                raise ValueError("acp.arguments: prompts are sent in the protocol, not in the arguments")
            if "{max_turns}" in text and where != "turn_limit":
                raise ValueError(f"{where}: {{max_turns}} belongs into turn_limit.arguments")
        if self.acp is not None and not self.takes_one_prompt:
            return self
        told = [where for where, text in self._strings() if "{prompt}" in text]
        if len(told) != 1 or told[0] not in ("arguments", "stdin"):
            raise ValueError(f"{{prompt}} must be in arguments or in stdin, once, got it in {told or 'none'}")
        return self

    def _strings(self) -> Iterator[tuple[str, str]]:
        """Yield every string that may have placeholders, with its field."""
        for argument in self.arguments:
            yield "arguments", argument
        for argument in self.acp.arguments if self.acp else ():
            yield "acp.arguments", argument
        for argument in self.turn_limit.arguments if self.turn_limit else ():
            yield "turn_limit", argument
        yield "stdin", self.stdin
        for name, value in self.environment.items():
            yield f"environment.{name}", value
        for name, value in self.files.items():
            yield f"files.{name}", value


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a string with its placeholders replaced. Values are not searched for placeholders."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


def known_definitions() -> list[str]:
    """Return the names of the agents whose definitions ship with the package."""
    return sorted(file.stem for file in DEFINITIONS.glob("*.toml"))


def load_definition(name: str) -> CliDefinition:
    """Return the definition of an agent that the package knows by its name, or the one in a .toml file.

    Raises:
        AgentError: there is none, or it is not valid; the message names the file and the field.
    """
    is_file = name.endswith(".toml") or "/" in name
    file = Path(name).expanduser() if is_file else DEFINITIONS / f"{name}.toml"
    try:
        return CliDefinition.model_validate(tomllib.loads(file.read_text()))
    except FileNotFoundError:
        raise AgentError(
            f"there is no command-line agent {name!r}; known: {', '.join(known_definitions())}; or give the "
            "path of a .toml file (docs/agents.md)"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AgentError(f"the definition {file} cannot be read: {error}") from error
    except ValidationError as error:
        faults = "; ".join(_fault(fault["loc"], fault["msg"]) for fault in error.errors())
        raise AgentError(f"the definition {file} is not valid: {faults}") from error


def _fault(location: tuple[int | str, ...], message: str) -> str:
    field = ".".join(str(part) for part in location)
    message = message.removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
