"""What the store has of a run on several machines: its configuration, and the keys of its processes."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_agents.config import Config, load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.store import NotFound, Store


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record that each process of the run reads first.

    Attributes:
        config: the resolved configuration, as YAML.
        nodes: the number of processes of the trainer, each of which has an equal share of its ranks.
        first_version: the version that the trainer starts with; earlier ones are from before a resume.
        admin_key, view_key: keys of the proxies.
        secret: the secret by which the proxies of the run know one another.
        engine_key: the key that requests to the engines must have; "": they want none.
        epoch: that of the supervisor's place when it wrote this record.
    """

    config: str
    nodes: int
    first_version: int
    admin_key: str
    view_key: str
    secret: str
    engine_key: str
    epoch: int

    @classmethod
    def of(
        cls,
        config: str,
        *,
        nodes: int,
        first_version: int,
        epoch: int,
        admin_key: str,
        engine_key: str = "",
    ) -> RunRecord:
        """Return the record of a run, with new keys where the configuration has none."""
        keys = [secrets.token_urlsafe(24) for _ in range(3)]
        return cls(
            config,
            nodes,
            first_version,
            admin_key or f"admin-{keys[0]}",
            view_key=keys[1],
            secret=keys[2],
            engine_key=engine_key,
            epoch=epoch,
        )

    @classmethod
    def read(cls, store: Store) -> RunRecord:
        """Return the record in the store. ConfigError if there is none, or another release wrote it."""
        try:
            found = store.read_run()
            return cls(**found)
        except NotFound as error:
            raise ConfigError(f"{error}; areal-agents train CONFIG --launcher … starts one") from None
        except TypeError as error:
            raise ConfigError(
                f"the run in this store was started by another release of areal-agents ({error}); use the "
                "same release on every machine"
            ) from None

    def write(self, store: Store) -> None:
        """Write the record into the store, in place of an earlier one."""
        store.write_run(asdict(self))

    def resolved(self, folder: Path) -> tuple[Config, Path]:
        """Return the configuration, and the file in `folder` that it was written to, for the owner only."""
        file = folder / "config.yaml"
        file.touch(mode=0o600)
        file.write_text(self.config)
        return load_config(file), file


def text_of(config: Config, folder: Path) -> str:
    """Return a resolved configuration as YAML; it passes through a file in `folder`."""
    file = folder / "config.yaml"
    save_config(config, file)
    return file.read_text()
