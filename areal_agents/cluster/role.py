"""`areal-agents role`: one process of a run on several machines.

It needs the URL of the store and nothing else: the configuration is in the store, and so are the addresses of
the other processes. It takes its place, waits for those that it needs, and runs the same program as a run on
one machine does, as a child process, which it ends when it loses the place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from areal_agents.cluster.place import Place, address_for_store
from areal_agents.cluster.proxy_forwarder import forwarding_to_proxies
from areal_agents.cluster.run_record import RunKeys, RunRecord
from areal_agents.cluster.sandbox_role import serve_sandboxes
from areal_agents.config import Config, save_config
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.run_folder import ClusterPlace, Endpoints, RunFolder
from areal_agents.launch.stopping import stop_timeout_s
from areal_agents.launch.supervision import EXIT_STOPPED, SUPERVISED, end_with_supervisor
from areal_agents.process_control import RUN_MARK, end_leftovers, end_process, signal_group
from areal_agents.secret_variables import take_token
from areal_agents.sockets import address_of, is_name, is_this_machine
from areal_agents.store import Store
from areal_agents.store.roles import SERVERS, Role
from areal_agents.store.urls import shown_store
from areal_agents.tls import check_certificate, trusting

logger = logging.getLogger(__name__)

LONGEST_NAME_S = 300.0  # until the name servers know a new machine
_POLL_S = 0.2
_LONGEST_WAIT_S = 3600.0  # for the others, whose machines may have to wait in a queue
_SERVER_STOP_S = 15.0
_LOOPBACK = "127.0.0.1"


def run_role(
    role: Role, index: int, store_url: str, *, host: str = "", port: int = 0, run_dir: str = ""
) -> int:
    """Run one process of a run until it ends, or SIGTERM; return its exit code.

    Args:
        host: the address, or a name, of this machine at which the others reach it; "": the address from
            which this machine reaches the store.
        port: the port of its server; 0: one that is free.
        run_dir: the run folder on this machine; "": that of the configuration.

    Raises:
        ConfigError: the run has no such process, this one does not have the token of the run, another
            process has its place, or `cluster.tls` has no certificate for the address of a server.
        StoreError: the store cannot be opened, or has no run.
    """
    end_with_supervisor()
    token = take_token()  # what this process starts does not need it
    with (
        _told_to_end() as told,
        Store.open(store_url) as store,
        tempfile.TemporaryDirectory(prefix="areal-agents-") as own,  # for its owner only
    ):
        record = RunRecord.read(store)
        config, _ = record.resolved(Path(own))
        record.keys(token, config)  # refuses a process that has no part in the run
        count = counts(config, record.nodes)[role]
        if not 0 <= index < count:
            raise ConfigError(
                f"the run has {count} processes of the role {role}, numbered from 0: no {index}"
            )
        address = host or address_for_store(store_url)
        with Place.claim(store, role, index, host=address) as place:
            # While this process waited for the place, a supervisor may have started again with a new record.
            record = RunRecord.read(store)
            config, file = record.resolved(Path(own))
            if run_dir:
                config = config.model_copy(update={"run_dir": run_dir})
                save_config(config, file)
            if role == "sandbox":
                file.unlink()  # the programs in its sandboxes might read it
            logger.info("%s %d of %s at %s", role, index, shown_store(store_url), address)
            count = counts(config, record.nodes)[role]
            serves = role in SERVERS
            with trusting(config.cluster.tls, serves=serves):
                if serves and config.cluster.tls is not None:
                    check_certificate(config.cluster.tls, address)
                if serves and not _knows_own_name(address, told):
                    return EXIT_STOPPED
                keys = record.keys(token, config)
                if role == "sandbox":
                    return serve_sandboxes(store, config, keys.secret, place, told, port)
                return _Process(store, record, keys, config, file, place, count, told).run(port)


def _knows_own_name(host: str, told: threading.Event) -> bool:
    """Wait until a name resolves to this machine, which the name of a new machine may not do at once.

    Returns:
        False if the process was told to end meanwhile. An address is not checked.

    Raises:
        ConfigError: it does not within `LONGEST_NAME_S`.
    """
    if not is_name(host):
        return True
    deadline = time.monotonic() + LONGEST_NAME_S
    while not is_this_machine(host):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--host {host} has not become a name of this machine within {LONGEST_NAME_S:.0f} s; give "
                "a name that the name servers of this machine resolve to its address"
            )
        if told.wait(_POLL_S):
            return False
    return True


def counts(config: Config, nodes: int) -> dict[Role, int]:
    """Return the number of processes of each role.

    Args:
        nodes: the number of processes of the trainer.
    """
    return {
        "engine": 0 if config.engine.urls else config.engine.replicas,
        "proxy": config.cluster.proxies,
        "trainer": nodes,
        "rollout": config.cluster.rollouts,
        "sandbox": config.cluster.sandboxes,
    }


class _Process:
    """The process of one place, from the addresses that it needs to its end."""

    def __init__(
        self,
        store: Store,
        record: RunRecord,
        keys: RunKeys,
        config: Config,
        file: Path,
        place: Place,
        count: int,
        told: threading.Event,
    ) -> None:
        self._store = store
        self._record = record
        self._keys = keys
        self._config = config
        self._file = file
        self._place = place
        self._role, self._index = place.row.role, place.row.index
        # A rollout process is reached by the agents of its machine only, and in plain HTTP.
        self._host = _LOOPBACK if self._role == "rollout" else place.row.host
        self._scheme = "http" if config.cluster.tls is None else "https"
        self._told = told
        self._count = count
        self._is_trainer = self._role == "trainer"
        self._stop_timeout_s = stop_timeout_s(config) if self._is_trainer else _SERVER_STOP_S

    def run(self, port: int) -> int:
        Path(self._config.run_dir, "logs").mkdir(parents=True, exist_ok=True)
        run_folder = RunFolder(Path(self._config.run_dir))
        if not run_folder.config.exists():  # it is not the supervisor's folder, but one of this machine
            save_config(self._config, run_folder.config)
        with contextlib.ExitStack() as held:
            port = port or held.enter_context(reserved_ports(1, self._host))[0]
            endpoints = self._endpoints(port)
            if endpoints is None:
                return EXIT_STOPPED
            if self._role == "rollout":
                count = self._config.cluster.proxies
                near = self._index % count
                held.enter_context(
                    forwarding_to_proxies(self._store, self._host, port, count=count, preferred=near)
                )
            return self._child(endpoints, port)

    def _endpoints(self, port: int) -> Endpoints | None:
        """Wait for the processes that this one needs, and return the addresses; None if told to end."""
        place = ClusterPlace(self._index, self._count, self._place.row.epoch, self._keys.secret)
        engines = self._config.engine.urls
        if self._role == "engine":
            # The other engines are nothing to this one, but its place in the list is its index.
            engines = ("",) * self._index + (f"{self._scheme}://{address_of(self._host, port)}",)
        elif not engines:
            found = self._wait_for("engine", self._config.engine.replicas)
            if found is None:
                return None
            engines = tuple(found)
        if self._role == "rollout" and self._wait_for("proxy", self._config.cluster.proxies) is None:
            return None
        # A rollout process reaches the proxies through its own port.
        keys = self._keys
        # A rollout process, which runs the agents, has nothing to do with engines.
        engine_key = "" if self._role == "rollout" else keys.engine
        return Endpoints(engines, self._host, port, keys.admin, keys.view, engine_key, place)

    def _child(self, endpoints: Endpoints, port: int) -> int:
        """Run the child to its end, and return the exit code."""
        with tempfile.TemporaryDirectory(prefix="areal-agents-") as own:
            file = Path(own) / "endpoints.json"
            folder = RunFolder(Path(self._config.run_dir), file)
            folder.write_endpoints(endpoints)
            command = self._command(file, port)
            if command is None:
                return EXIT_STOPPED
            if self._role in ("engine", "proxy"):
                self._place.announce(f"{self._scheme}://{address_of(self._host, port)}")
            mark = f"{folder.log(f'{self._role}-{self._index}')}@{os.getpid()}"
            child = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                env={**os.environ, RUN_MARK: mark, SUPERVISED: f"{self._stop_timeout_s:g}"},
                start_new_session=True,
                pass_fds=(self._place.lock_fd,),  # if this process is killed, the child may still be ending
            )
            try:
                return self._watch(child)
            finally:
                end_process(child, grace_s=0.0)
                signal_group(child.pid, signal.SIGKILL)
                end_leftovers(RUN_MARK, mark)

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        while (code := child.poll()) is None:
            if (loss := self._place.loss) is not None:
                logger.error("%s; this one ends", loss)
                return 1
            if self._told.is_set():
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return _exit_code(child.wait(self._stop_timeout_s))
                logger.error("%s %d did not end within %.0f s", self._role, self._index, self._stop_timeout_s)
                return 128 + signal.SIGKILL
            time.sleep(_POLL_S)
        return _exit_code(code)

    def _command(self, endpoints: Path, port: int) -> list[str] | None:
        """Return the arguments of Python for the child; None if told to end while it waited."""
        options = [
            "--folder",
            self._config.run_dir,
            "--config",
            str(self._file),
            "--endpoints",
            str(endpoints),
        ]
        program = "areal_agents.launch.processes"
        if self._role == "engine":
            gpus = ",".join(map(str, range(engine_gpus(self._config))))
            return [program, "engine", *options, "--replica", str(self._index), "--gpus", gpus]
        if self._role == "rollout":
            return [program, "rollout", *options, "--first-version", str(self._record.first_version)]
        ranks = self._config.trainer.ranks
        if not self._is_trainer or ranks == 1:
            return [program, self._role, *options]
        master = self._master(port)
        if master is None:
            return None
        nodes = ["--nodes", str(self._count), "--node-rank", str(self._index), "--master", master]
        return ["areal_agents.launch.local_ranks", "--ranks", str(ranks), *nodes, "--", "trainer", *options]

    def _master(self, port: int) -> str | None:
        """Return where the ranks of the trainer meet: at the first of its processes."""
        if self._index == 0:
            master = address_of(self._host, port)
            self._place.announce(f"tcp://{master}")
            return master
        found = self._wait_for("trainer", 1)
        return None if found is None else urlsplit(found[0]).netloc

    def _wait_for(self, role: Role, count: int) -> list[str] | None:
        """Wait until the first `count` processes of a role have addresses; None if told to end."""
        return wait_for_addresses(
            self._store, role, count, is_over=lambda: self._told.is_set() or self._place.loss is not None
        )


def wait_for_addresses(
    store: Store,
    role: Role,
    count: int,
    *,
    is_over: Callable[[], bool],
    say: Callable[[str], None] = logger.info,
) -> list[str] | None:
    """Wait until the first `count` processes of a role have addresses, and return these.

    Args:
        is_over: called again and again; True ends the wait, and None is returned.
        say: called with a message when it changes for whom this process waits.

    Raises:
        ArealAgentsError: some have none after an hour.
    """
    said = ""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while not is_over():
        found = store.addresses(role)
        missing = [index for index in range(count) if index not in found]
        if not missing:
            return [found[index] for index in range(count)]
        text = f"waiting for {role} {', '.join(map(str, missing))}"
        if time.monotonic() > deadline:
            raise ArealAgentsError(
                f"{text}: nothing took these places within {_LONGEST_WAIT_S / 60:.0f} minutes; see the logs "
                "of what starts them"
            )
        if text != said:
            say(text)
            said = text
        time.sleep(_POLL_S)
    return None


def engine_gpus(config: Config) -> int:
    """Return the number of GPUs of one engine; 0 if it computes on a CPU."""
    engine = config.engine
    if engine.device == "cpu" or config.cluster.gpus_per_node == 0:
        return 0
    if engine.kind == "embedded":
        return 1 if engine.device.startswith("cuda") else 0
    return engine.tensor_parallel


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    told = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda number, frame: told.set()) for number in numbers}
    try:
        yield told
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
