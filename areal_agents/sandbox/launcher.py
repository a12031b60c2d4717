"""The program that starts and ends sandboxed processes on this machine; it needs the standard library only.

It is run as a file by a process of a run, its owner. The first process only forks: a keeper for each sandbox.
A keeper holds the mounts of its sandbox in namespaces of its own, runs one command at a time and waits for
it. When its socket closes, for whatever reason, it kills everything in the sandbox, removes the cgroups and
the files, and exits. So the death of the owner ends every sandbox, and the mounts end with their keeper.

A message is four bytes of length and JSON; file descriptors travel with the length.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time

_NEW_MOUNTS, _NEW_USERS, _NEW_NETWORK = 0x20000, 0x10000000, 0x40000000  # CLONE_*
_NO_SUID, _NO_DEVICES = 2, 4  # MS_*
_PRIVATE, _RECURSIVE = 0x40000, 0x4000
_PARENT_DEATH_SIGNAL, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 36, 38  # PR_SET_*
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # SIOC*IFFLAGS
_UP, _RUNNING = 0x1, 0x40
_DETACH = 2  # MNT_DETACH
_REMOVE_S = 5.0  # longest wait in seconds until the kernel lets an emptied cgroup be removed
_CANNOT_EXECUTE = 126

_libc = ctypes.CDLL(None, use_errno=True)


def send(sock, message, fds=()):
    """Send a message on a blocking socket."""
    data = json.dumps(message).encode()
    socket.send_fds(sock, [struct.pack("!I", len(data))], list(fds))
    sock.sendall(data)


def receive(sock):
    """Return the next message and its file descriptors; (None, []) when the other side has closed."""
    head, fds, _, _ = socket.recv_fds(sock, 4, 4)
    while head and len(head) < 4:
        head += sock.recv(4 - len(head)) or b"\0" * 4
    if not head:
        return None, []
    length, data = struct.unpack("!I", head)[0], bytearray()
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            return None, fds
        data += piece
    return json.loads(data), fds


def main():
    """Fork a keeper for each request until the owner closes the socket."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the owner, which then closes the sockets
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers report on their own sockets
    while True:
        try:
            request, fds = receive(sock)
        except ConnectionError:
            return
        if request is None:
            return
        if os.fork() == 0:
            sock.close()
            with socket.socket(fileno=fds[0]) as own:
                _keep(own, request)
            os._exit(0)
        os.close(fds[0])


def _keep(sock, request):
    """Set a sandbox up, run its commands, and remove it when the socket closes or the owner says so."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _check(_libc.prctl(_SUBREAPER, 1, 0, 0, 0))
    try:
        try:
            _set_up(request)
        except OSError as error:
            send(sock, {"error": f"{request['doing']}: {error}"})
            return
        send(sock, {})
        while True:
            command, fds = receive(sock)
            if command is None or "argv" not in command:
                return
            status = _run(sock, command, fds, request["cgroups"])
            if status is None:
                return
            send(sock, status)
    except ConnectionError:
        pass
    finally:
        _kill_everything(request["cgroups"])
        _remove(request)
        sock.close()


def _set_up(request):
    """Make the folders of a sandbox, with namespaces in a file system of limited size."""
    scratch = request["scratch"]
    if request["namespaces"]:
        uid, gid = os.getuid(), os.getgid()
        request["doing"] = "cannot make a user namespace"
        _check(_libc.unshare(_NEW_USERS | _NEW_MOUNTS))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
        _mount("none", "/", None, _PRIVATE | _RECURSIVE)
        if request["disk_bytes"]:
            request["doing"] = "cannot mount a tmpfs"
            _mount(
                "tmpfs", scratch, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={request['disk_bytes']},mode=700"
            )
    request["doing"] = "cannot prepare the folders"
    for name in request["folders"]:
        os.makedirs(os.path.join(scratch, name), exist_ok=True)
    for name, source in request["copies"].items():
        _copy(source, scratch, name, overlay=request["namespaces"])


def _copy(source, scratch, name, *, overlay):
    """Show a copy of `source` at `scratch`/`name`: an overlay where the kernel permits it, else files."""
    target = os.path.join(scratch, name)
    os.makedirs(target)
    if overlay:
        upper, work = (os.path.join(scratch, f".{kind}-{name}") for kind in ("upper", "work"))
        os.mkdir(upper)
        os.mkdir(work)
        lower, upper, work = (_escaped(path) for path in (source, upper, work))
        try:
            options = f"userxattr,lowerdir={lower},upperdir={upper},workdir={work}"
            _mount("overlay", target, "overlay", _NO_SUID | _NO_DEVICES, options)
        except OSError as error:
            # Without overlays in user namespaces (Linux before 5.11), on a file system that cannot be the
            # lower one, or with a path that is too long for mount options: a real copy has the same content.
            if error.errno not in (
                errno.EPERM,
                errno.EINVAL,
                errno.ENODEV,
                errno.EOPNOTSUPP,
                errno.ENAMETOOLONG,
            ):
                raise
        else:
            return
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def _run(sock, command, fds, cgroups):
    """Run one command; return how it ended, or None if the socket closed meanwhile."""
    parent_end, child_end = os.pipe()  # tells why the program was not executed; closed by its execution
    pid = os.fork()
    if pid == 0:
        try:
            _become(sock, command, fds, cgroups)
        except OSError as error:
            os.write(child_end, f"{command['doing']}: {error.strerror}".encode())
        finally:
            os._exit(_CANNOT_EXECUTE)
    for fd in (*fds, child_end):
        os.close(fd)
    watched = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(watched, select.POLLIN)
    is_open = True
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if sock.fileno() in ready:
            # While a command runs, the only message is the wish to kill it.
            poll.unregister(sock)
            is_open = receive(sock)[0] is not None
            os.kill(pid, signal.SIGKILL)
        if watched in ready:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(watched)
    _kill_everything(cgroups)
    with open(parent_end, "rb") as reasons:
        reason = reasons.read().decode()
    if not is_open:
        return None
    return {"error": reason} if reason else {"status": status}


def _become(sock, command, fds, cgroups):
    """Turn this process into the command; with a network of its own, send a listening socket of it first."""
    command["doing"] = "cannot join the cgroups"
    for cgroup in cgroups:
        _write(os.path.join(cgroup, "cgroup.procs"), "0")
    command["doing"] = "cannot make a network namespace"
    if command["own_network"]:
        _check(_libc.unshare(_NEW_NETWORK))
        listener = _loopback(command["listen"])
        if listener is not None:
            send(sock, {"listening": True}, [listener.fileno()])
    command["doing"] = "cannot set limits"
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if command["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["file_bytes"],) * 2)
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    # The parent dies with its socket; if it is killed, the kernel kills this process with it.
    _check(_libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    # Nothing else is for the command, above all not the owner's lock.
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            os.set_inheritable(fd, fd <= 2)
    command["doing"] = f"cannot run {command['argv'][0]}"
    if command["folder"]:
        os.chdir(command["folder"])
    os.execvpe(command["argv"][0], command["argv"], command["environment"])


def _loopback(port):
    """Bring the loopback interface of this network namespace up; return a socket that listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP | _RUNNING))
    if port is None:
        return None
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _kill_everything(cgroups):
    """Kill and reap every process of the sandbox, whatever session and parent it has.

    Orphans become children of this process, so that killing its children until there are none reaches all.
    """
    limits = {}
    for cgroup in cgroups:
        limit = os.path.join(cgroup, "pids.max")
        if os.path.exists(limit):
            with open(limit) as file:
                limits[limit] = file.read()
            _write(limit, "0")  # nothing forks from now on
    while True:
        for pid in _members(cgroups) | _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not _members(cgroups):
                break
        time.sleep(0.002)
    for limit, text in limits.items():
        _write(limit, text)


def _members(cgroups):
    """Return the processes in cgroups, without this one."""
    found: set[int] = set()
    for cgroup in cgroups:
        try:
            with open(os.path.join(cgroup, "cgroup.procs")) as file:
                found.update(int(line) for line in file)
        except FileNotFoundError:
            pass
    return found - {os.getpid()}


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def _remove(request):
    """Remove the cgroups and the files; the mounts end with this process."""
    for cgroup in request["cgroups"]:
        deadline = time.monotonic() + _REMOVE_S
        while os.path.isdir(cgroup):
            try:
                os.rmdir(cgroup)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
    if request["namespaces"]:
        for name in request["copies"]:
            _libc.umount2(os.path.join(request["scratch"], name).encode(), _DETACH)
    if not request["disk_bytes"] or not request["namespaces"]:
        # What cannot be removed here, such as folders without permissions, is removed by the owner.
        shutil.rmtree(request["scratch"], ignore_errors=True)
    else:
        _libc.umount2(request["scratch"].encode(), _DETACH)
        os.rmdir(request["scratch"])


def _mount(source, target, kind, flags, options=None):
    _check(
        _libc.mount(
            source.encode(),
            os.fsencode(target),
            kind and kind.encode(),
            ctypes.c_ulong(flags),
            options and os.fsencode(options),
        )
    )


def _escaped(path):
    """Return a path as overlay's options read it."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


def _check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
