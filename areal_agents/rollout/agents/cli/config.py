"""The setting `agent` of a run whose agent is a command-line agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from areal_agents.core.settings import Settings
from areal_agents.errors import AgentError
from areal_agents.sandbox.config import Isolation, SandboxLimits, fault_of_image
from areal_agents.sandbox.sandbox import SandboxSpec

DEFAULT_CONTEXT = 32_768  # tokens that an agent is told where nothing is known of the engine


class CliAgentConfig(Settings):
    """A command-line agent, such as {cli: codex, prompt: "{task.instruction}", workdir: "{task.folder}"}."""

    cli: str = Field(
        min_length=1,
        description="Name of an agent, such as codex, or the path of a definition's .toml file.",
    )
    prompt: str = Field(
        default="{task.instruction}",
        min_length=1,
        description="What the agent is told; {task.NAME} is a field of the task, {task} the task as JSON.",
    )
    prompts: tuple[str, ...] | str = Field(
        default=(),
        description="In place of prompt: what the agent is told, turn by turn, in the Agent Client Protocol; "
        "or {task.NAME}, a list of the task.",
    )
    permissions: Literal["allow", "reject"] = Field(
        default="allow", description="With prompts, how its permission requests are answered."
    )
    turn_timeout_s: float = Field(
        default=600.0, gt=0, description="With prompts, the longest wait for the end of a turn, in seconds."
    )
    workdir: str = Field(
        default="",
        description="A folder that every episode gets a copy of, to work in; {task.NAME} is a field of the "
        "task. Empty: an empty folder.",
    )
    executable: str = Field(
        default="", description="The program; empty: the one that the definition names, where PATH has it."
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

    isolation: Isolation = Field(
        default="none", description="Where the program runs, as for commands (docs/sandboxes.md)."
    )
    image: str = Field(
        default="",
        description="With docker, the name of the image that has the program; with bubblewrap, a folder that "
        "is the root file system, or the programs of this machine.",
    )
    readable: tuple[str, ...] = Field(
        default=(),
        description="With bubblewrap or docker, files and folders that it sees, such as the one with the "
        "program.",
    )
    limits: SandboxLimits = Field(
        default_factory=SandboxLimits, description="What all its processes may use together."
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> CliAgentConfig:
        if self.isolation == "none" and (self.readable or self.image or self.limits != SandboxLimits()):
            raise ValueError(
                "readable, image and limits have no effect without isolation: process, bubblewrap or docker"
            )
        if fault := fault_of_image(self.isolation, self.image):
            raise ValueError(fault)
        given = self.model_fields_set
        if not self.prompts and (idle := sorted(given & {"permissions", "turn_timeout_s"})):
            raise ValueError(f"{idle[0]} has no effect without prompts")
        if self.prompts and "prompt" in given:
            raise ValueError("give prompt or prompts, not both")
        return self

    def spec(self, folder: Path | None = None) -> SandboxSpec:
        """Return what the sandbox of an episode is started from: a copy of `folder`, or an empty folder."""
        return SandboxSpec(
            folder=folder,
            image=self.image,
            readable=tuple(Path(path) for path in self.readable),
            limits=self.limits.limits(),
        )

    @classmethod
    def read(cls, agent: Mapping[str, Any]) -> CliAgentConfig:
        """Return the settings of a mapping. Raise AgentError, which names every fault, if it has one."""
        try:
            return cls.model_validate(agent)
        except ValidationError as error:
            faults = (": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
            raise AgentError(f"agent: {'; '.join(faults)}") from error
