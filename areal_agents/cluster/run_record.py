"""What the store has of a run on several machines: its configuration, and who may take part in it.

The keys of the run are not in the store. Each process computes them from the token of the run, so that
somebody who can only read the database, or a copy of it, gets none of them. If the processes bring no token
with them, it is in the store.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_agents.config import Config, load_config, save_config
from areal_agents.errors import ConfigError
from areal_agents.secret_variables import RUN_TOKEN, given_engine_key
from areal_agents.store import NotFound, Store

SHORTEST_TOKEN = 20  # characters; a shorter one could be found by trying


@dataclass(frozen=True, slots=True, repr=False)
class RunKeys:
    """The keys of one start of a run.

    Attributes:
        admin, view: keys of the proxies.
        secret: the secret by which the proxies know one another.
        engine: the key that requests to the engines must have; "": they want none.
    """

    admin: str
    view: str
    secret: str
    engine: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record that each process of the run reads first.

    Attributes:
        config: the resolved configuration, as YAML.
        nodes: the number of processes of the trainer, each of which has an equal share of its ranks.
        first_version: the version that the trainer starts with; earlier ones are from before a resume.
        nonce: gives each start of the run new keys.
        proof: what a process computes from the right token.
        token: the token of the run; "": processes bring it.
        engine_key: the key of running engines; "": they want none, or processes bring it.
        epoch: that of the supervisor's place when it wrote this record.
    """

    config: str
    nodes: int
    first_version: int
    nonce: str
    proof: str
    token: str
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
        token: str = "",
        engine_key: str = "",
    ) -> RunRecord:
        """Return the record of a run.

        Args:
            epoch: that of the supervisor's place.
            token: the token that the processes bring; "": a new one is in the record.
            engine_key: the key of running engines, which is in the record only if the token is.

        Raises:
            ConfigError: the token is too short.
        """
        if token and len(token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"{RUN_TOKEN} must have at least {SHORTEST_TOKEN} characters; openssl rand -hex 32 makes one"
            )
        nonce, own = secrets.token_hex(16), token or secrets.token_urlsafe(24)
        kept = ("", "") if token else (own, engine_key)
        proof = _derived(own, nonce, "proof")
        return cls(config, nodes, first_version, nonce, proof, *kept, epoch)

    def keys(self, token: str, config: Config) -> RunKeys:
        """Return the keys of the run.

        Args:
            token: the token that this process has; "" if it has none.
            config: the configuration of the run.

        Raises:
            ConfigError: this process does not have the token of the run.
        """
        token = self.token or token
        if not token:
            raise ConfigError(
                f"this process needs the token of the run: set {RUN_TOKEN} to that of the supervisor, which "
                "must have the variable too; without it, only the processes that it starts itself get a token"
            )
        if not hmac.compare_digest(_derived(token, self.nonce, "proof"), self.proof):
            raise ConfigError(
                f"{RUN_TOKEN} is not the token of the run in this store; use that of its supervisor"
            )
        given = self.engine_key or given_engine_key()
        return RunKeys(
            admin=config.proxy.admin_key or f"admin-{_derived(token, self.nonce, 'admin')}",
            view=f"view-{_derived(token, self.nonce, 'view')}",
            secret=_derived(token, self.nonce, "proxies"),
            engine=given if config.engine.urls else _derived(token, self.nonce, "engines"),
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


def _derived(token: str, nonce: str, purpose: str) -> str:
    """Return a key that says nothing about the token, nor about the keys of other purposes."""
    digest = hmac.digest(token.encode(), f"{nonce}:{purpose}".encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
