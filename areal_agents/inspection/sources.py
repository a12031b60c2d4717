"""Where episodes are read from: a store or a running proxy, both in the forms of the proxy's control API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from areal_agents.client import Client
from areal_agents.core.reward_values import RewardValue
from areal_agents.core.rollout import Reward
from areal_agents.errors import ConfigError, RequestError, shown
from areal_agents.launch.run_folder import RunFolder
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.episodes.control_forms import describe
from areal_agents.store import Store
from areal_agents.store.postgres import is_postgres, schema_exists
from areal_agents.store.urls import shown_store
from areal_agents.tls import trusting_authority

_OF_A_RERUN = ("run", "store", "step", "until", "changes", "new_rewards")
HERE = "give a run's folder, a store file, the URL of a store in PostgreSQL, or that of a proxy"


class Source(Protocol):
    """A place that has episodes."""

    def list(self, *, split: str | None, status: str | None, group: str | None) -> list[dict[str, Any]]:
        """Return summaries of the matching episodes, in the order in which they were opened."""
        ...

    def get(self, episode_id: str) -> dict[str, Any]:
        """Return an episode with its turns and their versions. Raises NotFound or RequestError."""
        ...

    def reward(self, episode_id: str, value: float, name: str) -> None:
        """Give an episode a reward. Raises ArealAgentsError if that is not possible."""
        ...


@dataclass(frozen=True, slots=True)
class ProxySource:
    """A running proxy."""

    client: Client

    def list(self, *, split: str | None, status: str | None, group: str | None) -> list[dict[str, Any]]:
        """See `Source`."""
        return self.client.list_episodes(split=split, status=status, group=group)

    def get(self, episode_id: str) -> dict[str, Any]:
        """See `Source`."""
        return self.client.get_episode(episode_id, tokens=True)

    def reward(self, episode_id: str, value: float, name: str) -> None:
        """See `Source`."""
        self.client.reward(episode_id, value, name=name)


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A store; `give` is called for rewards."""

    store: Store
    give: Callable[[str, RewardValue, str], None]

    def list(self, *, split: str | None, status: str | None, group: str | None) -> list[dict[str, Any]]:
        """See `Source`."""
        return [asdict(found) for found in self.store.episodes(split, status, group_id=group)]

    def get(self, episode_id: str) -> dict[str, Any]:
        """See `Source`."""
        row, episode = self.store.episode_row(episode_id), self.store.load_episode(episode_id)
        shown = describe(row, episode, with_tokens=True)
        return {**shown, "rewards": [asdict(reward) for reward in episode.rewards]}

    def reward(self, episode_id: str, value: float, name: str) -> None:
        """See `Source`."""
        self.give(episode_id, value, name)


@contextmanager
def opened(where: str, admin_key: str | None = None) -> Iterator[Source]:
    """Open a place that has episodes.

    Args:
        where: a run's folder, a store file, the URL of a store in PostgreSQL, or that of a proxy.
        admin_key: the admin key of a proxy that needs one.

    Raises:
        ConfigError: there is no such place, or the proxy needs another admin key.
    """
    if where.startswith(("http://", "https://")):
        with Client(where.rstrip("/").removesuffix("/v1"), admin_key) as client:
            try:
                yield ProxySource(client)
            except RequestError as error:
                if error.status != 401:
                    raise
                raise ConfigError(
                    f"{where} needs its admin key: --admin-key, or AREAL_AGENTS_ADMIN_KEY. That of a run is "
                    f"in endpoints.json of its folder, which can be given in place of the URL ({error})"
                ) from error
        return
    folder, file = _found(where)
    with _open(file) as store:

        def give(episode_id: str, value: RewardValue, name: str) -> None:
            if folder is None:
                raise ConfigError(
                    f"rewards are written by the proxy that owns {shown_store(file)}; give its URL instead "
                    "of the store (areal-agents serve prints it)"
                )
            _refuse_rerun(folder, where)
            _reward_in_run(folder, store, file, episode_id, value, name)

        yield StoreSource(store, give)


@contextmanager
def stored(where: str) -> Iterator[tuple[Store, dict[str, Any]]]:
    """Open a store to read it, with the configuration of the run that it belongs to; {} for a store alone.

    Args:
        where: a run's folder, a store file, or the URL of a store in PostgreSQL.

    Raises:
        ConfigError: there is no such store.
    """
    if where.startswith(("http://", "https://")):
        raise ConfigError(f"{where} is a proxy; give the folder of its run, or its store file")
    folder, file = _found(where)
    with _open(file) as store:
        has_config = folder is not None and folder.config.is_file()
        yield store, config_of_run(folder) if folder is not None and has_config else {}


def store_of_run(folder: RunFolder) -> Store:
    """Open the store of a run; that of a rerun has no episodes. Raises ConfigError if there is none yet."""
    return _open(folder.store if folder.rerun.exists() else _store_of(folder))


def config_of_run(folder: RunFolder) -> dict[str, Any]:
    """Return the configuration that a run has written. Raises ConfigError if this is not a run's folder."""
    import yaml

    try:
        tree = yaml.safe_load(folder.config.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        tree = None
    if isinstance(tree, dict) and isinstance(tree.get("trainer"), dict) and "steps" in tree["trainer"]:
        return tree
    raise ConfigError(f"{folder.root} is not the folder of a run; `areal-agents runs` lists runs")


def import_target(where: str) -> Path | str:
    """Return the store of a run, or a store file, which may not exist yet.

    Raises:
        ConfigError: it is neither, or the folder of a new file does not exist.
    """
    path = Path(where)
    if where.startswith(("http://", "https://")):
        raise ConfigError(f"{where} is a proxy; give a store file, or the folder of a run")
    if path.is_dir():
        folder = RunFolder(path)
        _refuse_rerun(folder, where)
        return _store_of(folder)
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}")
    return path


def template_of(where: str, *, model: str | None, config: Path | None) -> tuple[str, ProxyConfig]:
    """Return the folder of the model whose template is used, and the settings of the template.

    Args:
        where: a store file, or the folder of a run, whose configuration is used if no other is given.
        model: a model that replaces that of the configuration.

    Raises:
        ConfigError: no model is named, or the configuration or the model cannot be used.
    """
    from areal_agents.config.files import proxy_config, read_file, with_absolute_paths
    from areal_agents.config.models import model_folder

    own = Path(where) / "config.yaml"
    source = config or (own if own.is_file() else None)
    # Not the whole configuration is validated: the store that it trains on need not exist yet.
    tree = {} if source is None else with_absolute_paths(read_file(source), source.resolve().parent)
    name = model or tree.get("model")
    if not isinstance(name, str):
        raise ConfigError(
            "the chat template of a model is needed: give the model that is to be trained with --model, or "
            "the configuration of its training with --config"
        )
    proxy = tree.get("proxy") or {}
    if not isinstance(proxy, dict):
        raise ConfigError(f"{source}:\n  proxy: must be a mapping of settings")
    return model_folder(name, Path.cwd(), weights=False), proxy_config((), **proxy)


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Return the tools in a JSON file. Raises ConfigError if the file has no list of tools."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools: {path} cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ConfigError(f"--tools: {path} must have a list of tools, as in `tools` of chat completions")
    return found


def rerun_in(folder: RunFolder) -> dict[str, Any] | None:
    """Return the content of rerun.json (`areal_agents.rerun.record`); None if the folder has no rerun.

    Raises ConfigError if the file cannot be read, or lacks what describes a rerun.
    """
    found = read_json(folder.rerun)
    if found is not None and (missing := [name for name in _OF_A_RERUN if name not in found]):
        raise ConfigError(f"{folder.rerun} describes no rerun: it has no {', '.join(missing)}")
    return found


def _refuse_rerun(folder: RunFolder, where: str) -> None:
    """Raise ConfigError if a folder has a rerun: its episodes are those of another run."""
    if (rerun := rerun_in(folder)) is not None:
        raise ConfigError(f"{where} is a rerun and has no episodes of its own; name {rerun['run']}")


def _found(where: str) -> tuple[RunFolder | None, Path | str]:
    """Return the folder of the run at a place, if it is one, and its store."""
    if is_postgres(where):
        return None, where
    path = Path(where)
    folder = RunFolder(path) if path.is_dir() else None
    return folder, path if folder is None else _store_of(folder)


def _open(file: Path | str) -> Store:
    if isinstance(file, str) and is_postgres(file) and not schema_exists(file):  # opening it would create it
        raise ConfigError(f"there is no store {shown_store(file)}; {HERE}")
    if not isinstance(file, str) and not file.is_file():
        raise ConfigError(f"there is no store {file}; {HERE}")
    if not isinstance(file, str) and file.stat().st_size == 0:  # opening it would write a store into it
        raise ConfigError(f"{file} is empty; {HERE}")
    return Store.open(file)


def _store_of(folder: RunFolder) -> Path | str:
    """Return the store that has the episodes of a run. Raises ConfigError if it is not a run's folder."""
    if (rerun := rerun_in(folder)) is not None:
        return folder.store_at(rerun["store"])
    try:
        url = (config_of_run(folder).get("store") or {}).get("url")
    except ConfigError:
        url = None
    if url is not None or folder.store.is_file():
        return url or folder.store
    raise ConfigError(f"{folder.root} has no store.db; {HERE}")


def _reward_in_run(
    folder: RunFolder, store: Store, file: Path | str, episode_id: str, value: RewardValue, name: str
) -> None:
    """Give a reward through the proxy of a run, or directly if the run has ended."""
    try:
        endpoints = folder.read_endpoints()
        with (
            trusting_authority(endpoints.authority),
            Client(endpoints.proxy_url, endpoints.admin_key) as client,
        ):
            client.reward(episode_id, value, name=name)
        return
    except FileNotFoundError:
        pass  # a run on recorded episodes has no proxy
    except RequestError as error:
        if error.code != "unreachable":
            raise
    # With the lock of the run, no proxy of it can start meanwhile.
    with folder.locked(None if isinstance(file, Path) else file):
        store.set_rewards(episode_id, [Reward("episode", "", name, float(value))]).result(timeout=60)  # type: ignore[arg-type]


def matching(
    episodes: list[dict[str, Any]],
    *,
    task: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
) -> list[dict[str, Any]]:
    """Return the summaries of this task whose score is within the bounds; without a score none is."""

    def fits(episode: Mapping[str, Any]) -> bool:
        score = episode["score"]
        bounded = min_reward is not None or max_reward is not None
        return (task is None or episode["task_id"] == task) and (
            not bounded
            or (
                score is not None
                and (min_reward is None or score >= min_reward)
                and (max_reward is None or score <= max_reward)
            )
        )

    return [episode for episode in episodes if fits(episode)]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None if there is no such file. Raises ConfigError if it is broken."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must have a JSON object, got {shown(found)}")
    return found
