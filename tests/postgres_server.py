"""A PostgreSQL server for tests: Debian's package, with its data and its socket in a temporary folder."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

_START_S = 60.0


class PostgresServer:
    """A server that listens on a socket in its own folder. Both are removed at the end of the with-block.

    Args:
        port: the port of 127.0.0.1 on which the server also listens; None: it listens on the socket only.
        standby_of: a running server that listens on a port; the new server starts as its standby.
        certificate: PEM files with a certificate and its key, for connections with TLS; None: without TLS.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        standby_of: PostgresServer | None = None,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self._port = port
        self._certificate = certificate
        self._primary = standby_of
        # Not in pytest's folder, whose path is too long for a socket and which only its owner may enter.
        self._folder = Path(tempfile.mkdtemp(prefix="areal-agents-postgres-"))
        self._stores = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing() -> str | None:
        """Return what is missing for a server; None if nothing is."""
        try:
            import psycopg  # noqa: F401
        except ImportError:
            return "psycopg is not installed: pip install 'areal-agents[postgres]'"
        if _binaries() is None:
            return "PostgreSQL is not installed: apt-get install postgresql"
        return None

    def __enter__(self) -> PostgresServer:
        if os.geteuid() == 0:  # the server refuses to run as root
            user = pwd.getpwnam("postgres")
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        if self._primary is None:
            made = ["initdb", "-D", "data", "-U", "areal", "--auth=trust", "--no-sync", "-E", "UTF8"]
        else:
            made = [
                "pg_basebackup", "-D", "data", "-d", self._primary._address, "--checkpoint=fast",
                "--write-recovery-conf", "--no-sync",
            ]  # fmt: skip
        subprocess.run(
            self._command(*made), cwd=self._folder, check=True, stdout=subprocess.DEVNULL, timeout=_START_S
        )
        for source, name in zip(self._certificate or (), ("server.crt", "server.key"), strict=False):
            copy = self._folder / "data" / name
            shutil.copy(source, copy)
            shutil.chown(copy, (self._folder / "data").owner())
            copy.chmod(0o600)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, and wait until it answers. It ends when the calling thread ends."""
        import psycopg

        listens = ["-c", "listen_addresses="]
        if self._port is not None:
            listens = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={self._port}"]
        if self._certificate is not None:
            listens += ["-c", "ssl=on"]
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command(
                    "postgres", "-D", "data", "-k", str(self._folder), *listens,
                    "-c", "max_connections=300",
                ),
                cwd=self._folder, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self._address, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self._folder / "server.log").read_text()) from None
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT ends all sessions first, SIGQUIT is like a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None

    def wait_for_standby(self, *, synchronous: bool) -> None:
        """Wait until a standby follows; with `synchronous`, every commit waits for it from now on."""
        if synchronous:
            self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.execute("SELECT pg_reload_conf()")
        wanted = "sync" if synchronous else "async"
        deadline = time.monotonic() + _START_S
        while self.execute("SELECT sync_state FROM pg_stat_replication") != [(wanted,)]:
            assert time.monotonic() < deadline, "no standby follows"
            time.sleep(0.05)

    def promote(self) -> None:
        """Make a standby the server that accepts writes."""
        assert self.execute("SELECT pg_promote()") == [(True,)]

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement, and return its rows."""
        import psycopg

        with psycopg.connect(self._address, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return [] if cursor.description is None else cursor.fetchall()

    def table_files(self) -> list[Path]:
        """Return the files of all tables and indices, as they are on the disk now."""
        self.execute("CHECKPOINT")  # it also deletes files that were replaced
        return [path for path in (self._folder / "data" / "base").rglob("*") if path.is_file()]

    def new_store(self) -> str:
        """Return the URL of a store that does not exist yet."""
        return f"postgresql://areal@/postgres?host={self._folder}&schema=s{os.getpid()}_{next(self._stores)}"

    @property
    def _address(self) -> str:
        port = "" if self._port is None else f" port={self._port}"
        return f"host={self._folder}{port} user=areal dbname=postgres"

    def _command(self, program: str, *arguments: str) -> list[str]:
        binaries = _binaries()
        assert binaries is not None
        command = [str(binaries / program), *arguments]
        owner = ["--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", "--pdeathsig=QUIT", *owner, *command]  # the server ends with the tests


def _binaries() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return folders[-1] if folders and (folders[-1] / "initdb").exists() and sys.platform == "linux" else None
