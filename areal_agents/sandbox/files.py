"""Reads and writes files of a sandbox by commands within it, so that a link leads nowhere outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.errors import SandboxError

if TYPE_CHECKING:
    from areal_agents.sandbox.sandbox import Sandbox

_FILE_S = 60.0  # time limit in seconds
_READ = 'test -f "$1" || { echo "there is no file $1" >&2; exit 1; }; head -c "$2" -- "$1"'
_WRITE = 'case $1 in */*) mkdir -p -- "${1%/*}/" ;; esac && cat > "$1"'


async def read_file(sandbox: Sandbox, path: str, *, most_bytes: int) -> bytes:
    """See `Sandbox.read`."""
    argv = ["/bin/sh", "-c", _READ, "read", path, str(most_bytes + 1)]
    done = await sandbox.run(argv, timeout_s=_FILE_S, kept_bytes=most_bytes + 1)
    if done.status != 0:
        raise SandboxError(f"cannot read {path!r}: {done.stderr.text().strip()}")
    if done.stdout.length > most_bytes:
        raise SandboxError(f"cannot read {path!r}: it is longer than {most_bytes} bytes")
    return done.stdout.kept


async def write_file(sandbox: Sandbox, path: str, data: bytes) -> None:
    """See `Sandbox.write`."""
    done = await sandbox.run(["/bin/sh", "-c", _WRITE, "write", path], timeout_s=_FILE_S, stdin=data)
    if done.status != 0:
        raise SandboxError(f"cannot write {path!r}: {done.stderr.text().strip()}")
