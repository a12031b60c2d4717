"""The changes from one file to another of the same size, where most numbers stay as they are.

A file is a sequence of words, the numbers of its weights, in blocks of 65,536. For each block, the file of
changes has the count of words that differ (uint32), their positions in the block (uint16 each) and their new
values; a block that would not become smaller by that is written whole. All numbers are little-endian. The
bytes of an incomplete word at the end follow as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from areal_agents.errors import StorageError

_BLOCK = 1 << 16  # words
_WHOLE = 0xFFFFFFFF  # the count of a block that is written whole
_POSITION = 2  # bytes
_WORDS: Mapping[int, str] = {2: "<u2", 4: "<u4", 8: "<u8"}
_ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_MOST_HEADER = 100_000_000  # bytes, the limit of safetensors


def word_bytes(file: Path) -> int:
    """Return the size of the numbers in a safetensors file, in bytes; 4 if it cannot be told."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if length <= _MOST_HEADER else b""
    try:
        entries = json.loads(header)
        return max(_ITEM_BYTES[entry["dtype"]] for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        return 4


def write_changes(before: Path, after: Path, target: Path, *, word: int) -> int | None:
    """Write the changes from `before` to `after`, and return how many words differ; None, and no `target`, if
    the changes would not be smaller than the file.

    Args:
        word: the size of a word in bytes: 2, 4 or 8.
    """
    nbytes = after.stat().st_size
    if before.stat().st_size != nbytes:
        return None
    changed = written = 0
    with before.open("rb") as old_file, after.open("rb") as new_file, target.open("wb") as out:
        while block := new_file.read(_BLOCK * word):
            earlier = old_file.read(len(block))
            count = len(block) // word
            new, old = (np.frombuffer(data, _WORDS[word], count) for data in (block, earlier))
            where = np.flatnonzero(new != old)
            changed += len(where)
            if len(where) * (_POSITION + word) < count * word:
                parts = [_count(len(where)), where.astype("<u2").tobytes(), new[where].tobytes()]
            else:
                parts = [_count(_WHOLE), block[: count * word]]
            written += sum(map(len, parts)) + len(block) - count * word
            if written >= nbytes:
                break
            out.write(b"".join(parts))
            out.write(block[count * word :])
    if written < nbytes:
        return changed
    target.unlink()
    return None


def apply_changes(before: Path, changes: Path, target: Path, *, word: int) -> None:
    """Write the file that results from applying `changes` to `before`.

    Raises StorageError if they are not changes of it.
    """
    remaining = before.stat().st_size
    with before.open("rb") as old, changes.open("rb") as source, target.open("wb") as out:
        while remaining:
            block = bytearray(old.read(min(_BLOCK * word, remaining)))
            remaining -= len(block)
            count = len(block) // word
            words = np.frombuffer(block, _WORDS[word], count)
            if count:
                differing = int.from_bytes(_exactly(source, 4, changes), "little")
                if differing == _WHOLE:
                    words[:] = np.frombuffer(_exactly(source, count * word, changes), words.dtype)
                elif differing <= count:
                    where = np.frombuffer(_exactly(source, differing * _POSITION, changes), "<u2")
                    values = np.frombuffer(_exactly(source, differing * word, changes), words.dtype)
                    if differing and int(where.max()) >= count:
                        raise StorageError(f"{changes} changes a word beyond the end of {before}")
                    words[where] = values
                else:
                    raise StorageError(f"{changes} does not hold changes of {before}")
            rest = len(block) - count * word
            if rest:
                block[count * word :] = _exactly(source, rest, changes)
            out.write(block)


def _count(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _exactly(source: BinaryIO, nbytes: int, changes: Path) -> bytes:
    found = source.read(nbytes)
    if len(found) != nbytes:
        raise StorageError(f"{changes} ends before it should")
    return found
