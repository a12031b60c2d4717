"""The isolation `bubblewrap`: namespaces without network, a read-only root, and only the named folders.

The processes inside have the rights of this user on the files that are shown to them, and none of root's
capabilities, also if this user is root. Because root owns the switches of the kernel in /proc, these are
mounted read-only; the bwrap program does so only where its own access check notices them.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from areal_agents.errors import SandboxError, SandboxUnavailable
from areal_agents.sandbox.keeper import Command
from areal_agents.sandbox.local import Layout
from areal_agents.sandbox.relay import relayed_url
from areal_agents.sandbox.sandbox import Mount, SandboxSpec
from areal_agents.sandbox.variables import named_back, renamed

WORKDIR, HOME = "/workspace", "/home/agent"
_INSTALL = "install it (apt-get install bubblewrap, dnf install bubblewrap), or set isolation: none"
_OLDEST = (0, 8)  # --disable-userns
_VERSION_S = 10.0
_LOADER = ("LD_", "GLIBC_TUNABLES")  # how variables begin that the loader of programs heeds
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc only what programs need to start, to resolve names and to check certificates.
_ETC = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts", "gai.conf",
    "host.conf", "java", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "mime.types",
    "nsswitch.conf", "os-release", "pki", "protocols", "python3", "services", "shells", "ssl",
    "terminfo", "timezone",
)  # fmt: skip

_GENERATED = {
    "passwd": "root:x:0:0::{home}:/bin/sh\nagent:x:{user}:{user}::{home}:/bin/sh\n",
    "group": "root:x:0:\nagent:x:{user}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}


class Bubblewrap:
    """See `Local`."""

    name = "bubblewrap"
    has_namespaces = True

    def __init__(self) -> None:
        """Find the program.

        Raises:
            SandboxUnavailable: it is not installed, or is too old.
        """
        self._program = _bwrap()
        self._covered = tuple(_switches())

    def layout(self, spec: SandboxSpec, shared: Path) -> Layout:
        _make_etc(_etc(shared, spec.user), spec.user)
        copies = {"work": spec.folder} if spec.folder is not None else {}
        if spec.image:
            image = Path(spec.image)
            if not image.is_dir():
                raise SandboxError(
                    f"with isolation: bubblewrap an image is a folder; there is no folder {image}"
                )
            copies["root"] = image
        elif spec.writable:
            raise SandboxError(
                "writable names folders of an image; without one, only the working folder is writable"
            )
        # A folder of the image that is worked in is that of the image, unless another folder is copied there.
        in_image = bool(spec.image and spec.workdir and spec.folder is None)
        return Layout(["tmp", "home", *([] if copies.get("work") or in_image else ["work"])], copies)

    def command(
        self,
        spec: SandboxSpec,
        scratch: Path,
        argv: Sequence[str],
        own: Mapping[str, str],
        mounts: Sequence[Mount],
    ) -> Command:
        base = {"PATH": _path(spec), "HOME": HOME, "LANG": "C.UTF-8"}
        variables = {**base, **spec.environment, **own}
        # bwrap is started outside of the sandbox, and the loader of its libraries heeds these.
        loader = {name: value for name, value in variables.items() if name.startswith(_LOADER)}
        inside = ["/bin/sh", "-c", named_back(loader) + 'exec "$@"', "run", *argv] if loader else argv
        passed = {name: value for name, value in variables.items() if name not in loader} | renamed(loader)
        words = [self._program, *self._arguments(spec, scratch, mounts), "--", *inside]
        return Command(words, passed, folder="", own_network=True, file_bytes=None)

    def workdir(self, spec: SandboxSpec, scratch: Path) -> str:
        return spec.workdir or WORKDIR

    def inner_url(self, url: str) -> str:
        return relayed_url(url)

    def _arguments(self, spec: SandboxSpec, scratch: Path, mounts: Sequence[Mount]) -> Iterator[str]:
        user = str(spec.user)
        yield from ("--die-with-parent", "--new-session", "--unshare-user", "--disable-userns")
        yield from ("--uid", user, "--gid", user, "--unshare-pid", "--unshare-ipc", "--unshare-uts")
        yield from ("--unshare-cgroup-try", "--hostname", "sandbox")
        yield from ("--bind", str(scratch / "root"), "/") if spec.image else _host_programs()
        yield from ("--proc", "/proc", "--dev", "/dev")
        for switch in self._covered:
            yield from ("--ro-bind", switch, switch)
        etc = _etc(scratch.parent, spec.user)
        for name in _GENERATED if spec.image else ("",):
            yield from ("--ro-bind", str(etc / name), f"/etc/{name}")
        yield from ("--bind", str(scratch / "tmp"), "/tmp", "--bind", str(scratch / "home"), HOME)
        for path in _readable(spec):  # some may be in /tmp
            yield from ("--ro-bind", str(path), str(path))
        workdir = self.workdir(spec, scratch)
        in_image = spec.image and spec.workdir and spec.folder is None
        for path in (*spec.writable, *((workdir,) if in_image else ())):
            yield from ("--dir", path, "--bind", f"{scratch / 'root'}{path}", path)
        if not in_image:
            yield from ("--bind", str(scratch / "work"), workdir)
        for mount in mounts:
            yield from (
                "--bind" if mount.is_writable else "--ro-bind",
                str(mount.host.resolve()),
                mount.inside,
            )
        yield from ("--remount-ro", "/", "--chdir", workdir)


def _bwrap() -> str:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable(f"isolation: bubblewrap needs the program bwrap; {_INSTALL}")
    shown = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=_VERSION_S
    ).stdout.split()
    version = tuple(int(part) for part in shown[-1].split(".")[:2]) if shown else ()
    if version < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise SandboxUnavailable(f"bwrap {shown[-1] if shown else '?'} is older than {oldest}; {_INSTALL}")
    return program


def _switches() -> Iterator[str]:
    """Yield the entries of /proc that are not of a process and that somebody may write in or below."""
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        mode = entry.stat().st_mode
        if stat.S_ISDIR(mode) or mode & 0o222:
            yield str(entry)


def _host_programs() -> Iterator[str]:
    """Yield the arguments that show this machine's programs and libraries."""
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)


def _etc(shared: Path, user: int) -> Path:
    return shared / f"etc-{user}"


def _make_etc(folder: Path, user: int) -> None:
    """Make the /etc of the sandboxes of a user, once: a mount for each file is slow."""
    if folder.exists():
        return
    folder.mkdir()
    for name in _ETC:
        source = Path("/etc") / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=_unreadable)
        elif os.access(source, os.R_OK):
            shutil.copy(source, folder / name)
    for name, text in _GENERATED.items():
        (folder / name).write_text(text.format(home=HOME, user=user))


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: files that not everybody may read, such as private keys."""
    return [name for name in names if not _is_public(Path(folder) / name)]


def _is_public(path: Path) -> bool:
    mode = path.lstat().st_mode
    return bool(mode & stat.S_IROTH)


def _readable(spec: SandboxSpec) -> list[Path]:
    """Return the folders to show: the named ones and, without an image, those of this Python."""
    own = [] if spec.image else [Path(sys.prefix), Path(sys.base_prefix)]
    wanted = dict.fromkeys(path.absolute() for path in (*own, *spec.readable))
    return [path for path in wanted if not path.is_relative_to("/usr")]


def _path(spec: SandboxSpec) -> str:
    usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return usual if spec.image else f"{sys.prefix}/bin:{usual}"
