"""Settings of the sandbox in which a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from areal_agents.core.settings import Settings
from areal_agents.sandbox.sandbox import Limits, SandboxSpec
from areal_agents.secret_variables import STORE_PASSWORD

Isolation = Literal["none", "process", "bubblewrap", "docker"]


class SandboxLimits(Settings):
    """What all processes of a sandbox may use together; null: no limit."""

    memory_mb: int | None = Field(default=4096, ge=1, description="Memory in MiB.")
    processes: int | None = Field(default=512, ge=1, description="Processes and threads.")
    cpus: float | None = Field(default=None, gt=0, description="Processor time, in cores.")
    disk_mb: int | None = Field(
        default=1024,
        ge=1,
        description="What it may write, in MiB. With bubblewrap, files lie in memory and count as memory "
        "too; null: on the disk, without a limit. With process it limits each file.",
    )

    def limits(self) -> Limits:
        """Return them as a sandbox is started with them."""
        return Limits(**self.model_dump())


class SandboxConfig(Settings):
    """Where a command runs."""

    isolation: Isolation = Field(
        default="none",
        description="none: as this user, in the environment of the run. process: in a copy of workdir, with "
        "limits and a clean environment. bubblewrap: without network but the model, with a read-only root "
        "and only the named folders. docker: in a container of image. A run is refused where it is not "
        "available. docs/sandboxes.md.",
    )
    workdir: str = Field(
        default="",
        description="A folder of which each episode works in a copy; the command's relative paths are "
        "relative to it. Empty: an empty folder.",
    )
    image: str = Field(
        default="",
        description="The root file system: a folder (bubblewrap) or the name of an image (docker). Empty: "
        "the programs of this machine.",
    )
    readable: tuple[str, ...] = Field(
        default=(), description="Files and folders that are shown inside, read-only, under their own path."
    )
    pass_environment: tuple[str, ...] = Field(
        default=(),
        description="Names of variables of the run that the command gets. Without isolation it gets all but "
        "the secrets of the run, and only PGPASSWORD can be named.",
    )
    limits: SandboxLimits = Field(default_factory=SandboxLimits)
    warm: int = Field(default=0, ge=0, description="Sandboxes that are kept started for the next episodes.")

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> SandboxConfig:
        settings = {
            name: field.get_default(call_default_factory=True) for name, field in self._fields().items()
        }
        changed = [name for name, default in settings.items() if getattr(self, name) != default]
        if self.isolation == "none" and {STORE_PASSWORD}.issuperset(self.pass_environment):
            changed = [name for name in changed if name != "pass_environment"]
        if self.isolation == "none" and changed:
            raise ValueError(f"{changed[0]} has no effect without isolation: process, bubblewrap or docker")
        if fault := fault_of_image(self.isolation, self.image):
            raise ValueError(fault)
        return self

    @classmethod
    def _fields(cls) -> dict[str, FieldInfo]:
        """Return the settings of a sandbox, without those of a subclass."""
        return {name: field for name, field in SandboxConfig.model_fields.items() if name != "isolation"}

    def spec(self) -> SandboxSpec:
        """Return what its sandboxes are started from. Raises ValueError if workdir does not exist."""
        return SandboxSpec(
            folder=Path(self.workdir) if self.workdir else None,
            image=self.image,
            readable=tuple(Path(path) for path in self.readable),
            limits=self.limits.limits(),
        )


def fault_of_image(isolation: Isolation, image: str) -> str:
    """Return why an isolation cannot have this image; "": it can."""
    if isolation == "process" and image:
        return "image needs isolation: bubblewrap or docker"
    if isolation == "docker" and not image:
        return "isolation: docker needs image, the name of an image"
    return ""
