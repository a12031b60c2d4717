"""Versions in an object storage: the time to write and to read one, whole and as changes.

The weights are float16 noise, of which a share changes from one version to the next at random places, as is
usual after an optimizer step in a 16-bit type.
"""

from __future__ import annotations

import json as json_module
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors.numpy import save_file

from areal_agents.object_storage.fetched import FetchedVersions
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.uploads import Uploads

T = TypeVar("T")
_TENSORS = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of `measure`.

    Attributes:
        whole_mb: size of a version. changes_mb: size of the changes to the next one. Both in 10^6 bytes.
        write_whole_s, write_changes_s: from the folder of the trainer to the manifest in the storage.
        read_whole_s, read_changes_s: from the manifest to the folder of the engine.
    """

    location: str
    changed: float
    whole_mb: float
    changes_mb: float
    write_whole_s: float
    read_whole_s: float
    write_changes_s: float
    read_changes_s: float


def measure(location: str, folder: Path, *, mb: int, changed: float) -> Figures:
    """Write and read a version of `mb` million bytes and the next one, where the share `changed` differs."""
    there = Location.open(location).child(f"benchmark-{time.time_ns()}")
    uploads = Uploads(there, whole_every=2, keep=2)
    engine = FetchedVersions(folder / "engine", there, threading.Event())
    numbers = np.random.default_rng(0)
    count = mb * 1_000_000 // 2 // _TENSORS
    weights = {
        f"w{n}": numbers.standard_normal(count, dtype=np.float32).astype(np.float16) for n in range(_TENSORS)
    }
    seconds: list[float] = []
    sizes: list[float] = []
    try:
        for version in (0, 1):
            path = folder / f"v{version}"
            path.mkdir()
            save_file(weights, path / "model.safetensors")
            write_s, written = _timed(partial(uploads.write, path, version))
            read_s, _ = _timed(partial(engine.fetch, written.stored))
            seconds += [write_s, read_s]
            sizes.append(written.manifest.stored_bytes / 1e6)
            for tensor in weights.values():
                tensor[numbers.random(count) < changed] += np.float16(0.5)
    finally:
        for name in there.names():
            there.remove(name)
    return Figures(there.url.rpartition("/")[0], changed, *sizes, *seconds)


def run(location: str, *, mb: int, changed: float, json: bool) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="areal-agents-") as own:
        found = measure(location or f"file://{own}/bucket", Path(own), mb=mb, changed=changed)
    print(f"a version of {found.whole_mb:.0f} MB, of which {changed:.0%} changes, at {found.location}")
    print(f"  whole:   {found.write_whole_s:6.2f} s to write, {found.read_whole_s:6.2f} s to read")
    print(
        f"  changes: {found.write_changes_s:6.2f} s to write, {found.read_changes_s:6.2f} s to read, "
        f"{found.changes_mb:.0f} MB"
    )
    if json:
        print(json_module.dumps(asdict(found)))


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.monotonic()
    result = call()
    return time.monotonic() - began, result
