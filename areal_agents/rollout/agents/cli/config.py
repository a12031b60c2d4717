"""The setting `agent` of a run whose agent is a command-line agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from areal_agents.core.settings import Settings
from areal_agents.errors import AgentError

DEFAULT_CONTEXT = 32_768  # tokens that an agent is told where nothing is known of the engine


class CliAgentConfig(Settings):
    """A command-line agent, such as {cli: codex, prompt: "{task.instruction}", workdir: "{task.folder}"}."""

    cli: str = Field(
        min_length=1, description="Name of a seam, such as codex, or the path of a seam's .toml file."
    )
    prompt: str = Field(
        default="{task.instruction}",
        min_length=1,
        description="What the agent is told; {task.NAME} is a field of the task, {task} the task as JSON.",
    )
    workdir: str = Field(
        default="",
        description="A folder that every episode gets a copy of, to work in; {task.NAME} is a field of the "
        "task. Empty: an empty folder.",
    )
    executable: str = Field(
        default="", description="The program; empty: the seam's program, where PATH has it."
    )
    model: str = Field(
        default="policy",
        pattern=r"^[\w./:-]+$",
        description="The name of the model that the agent asks for; the policy answers to any name.",
    )
    context: int | None = Field(
        default=None,
        ge=1,
        description="The context of the model in tokens, as the agent is told; default: that of the engine.",
    )
    max_turns: int | None = Field(
        default=None,
        ge=1,
        description="Most turns, if the agent has an option for it; rollout.limits holds for all agents.",
    )

    @classmethod
    def read(cls, agent: Mapping[str, Any]) -> CliAgentConfig:
        """Return the settings of a mapping. Raise AgentError, which names every fault, if it has one."""
        try:
            return cls.model_validate(agent)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise AgentError(f"agent: {'; '.join(faults)}") from error
