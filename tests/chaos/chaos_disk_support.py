"""Disks that are too small or too slow: a tmpfs of some megabytes, and a library that delays writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
static void wait_for_disk(const char *name) {
    const char *ms = getenv(name);
    if (ms) usleep(atoi(ms) * 1000);
}
#define SLOW(name) \
    int name(int fd) { \
        static int (*real)(int); \
        if (!real) real = (int (*)(int)) dlsym(RTLD_NEXT, #name); \
        wait_for_disk("CHAOS_SYNC_MS"); \
        return real(fd); \
    }
SLOW(fsync)
SLOW(fdatasync)
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off64_t)) dlsym(RTLD_NEXT, "pwrite64");
    wait_for_disk("CHAOS_WRITE_MS");
    return real(fd, data, count, offset);
}
"""


def can_mount() -> bool:
    """Whether this process may mount a tmpfs."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """Mount a disk of this size at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "chaos", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, *, leave_bytes: int) -> Path:
    """Fill a disk except for `leave_bytes`; return the file that fills it."""
    ballast = folder / "ballast"
    with open(ballast, "wb") as file:
        while (room := shutil.disk_usage(folder).free - leave_bytes) > 0:
            try:
                file.write(bytes(min(room, 1 << 20)))
                file.flush()
            except OSError:
                break
    return ballast


def slow_disk(folder: Path, *, sync_ms: int, write_ms: int) -> dict[str, str] | None:
    """Return variables that delay fsync, fdatasync and pwrite of a process; None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(_SLOW)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CHAOS_SYNC_MS": str(sync_ms), "CHAOS_WRITE_MS": str(write_ms)}
