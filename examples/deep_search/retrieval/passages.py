"""The passages of a corpus: read from JSONL or Parquet, and kept on disk by row, by id and by URL.

A store of passages is three files: the passages as JSON lines, where each line begins, and a table from the
hashes of ids and URLs to rows. Nothing but the table is held in memory, so a corpus may be larger than it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage; those with one URL are, in the order of the corpus, the page at this URL."""

    id: str
    text: str
    title: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns of a corpus; only that of the text must be there."""

    id: str = "id"
    title: str = "title"
    text: str = "text"
    url: str = "url"


def read_corpus(path: Path, columns: Columns) -> Iterator[Passage]:
    """Yield the passages of a .jsonl or .parquet file.

    A passage without an id gets the number of its row. Where the column of the text is named "contents" and
    there is no title, the first line is the title, as in the corpora that Pyserini indexes.

    Raises:
        DataError: the file cannot be read, or a row has no text.
    """
    for row, record in enumerate(_records(path)):
        yield _passage(record, columns, row, path)


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet as parquet  # imported late: only Parquet needs it

        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=4096):
                    yield from batch.to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    elif path.suffix == ".jsonl":
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _json_object(line, path, number)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    else:
        raise DataError(f"a corpus is a .jsonl or a .parquet file, got {path}")


def _json_object(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}:{number} must be an object, got {line[:80]!r}")
    return record


def _passage(record: Mapping[str, Any], columns: Columns, row: int, path: Path) -> Passage:
    text = record.get(columns.text)
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"row {row} of {path} has no text in its column {columns.text!r}; it has {sorted(record)}. "
            "Name the column of the text with --text"
        )
    title = record.get(columns.title) or ""
    if not title and columns.text == "contents":
        title, _, rest = text.partition("\n")
        title, text = title.strip().strip('"'), rest.strip() or text
    given = record.get(columns.id)
    return Passage(str(row if given is None else given), text, str(title), str(record.get(columns.url) or ""))


def write_passages(passages: Iterable[Passage], folder: Path) -> Iterator[Passage]:
    """Write the files of a store of passages, and yield each passage when it is written.

    Raises:
        DataError: there is no passage, or one has a half of a surrogate pair, which no file can hold.
    """
    ends, hashes, rows = [0], [], []
    with (folder / "passages.jsonl").open("wb") as file:
        for row, passage in enumerate(passages):
            try:
                line = json.dumps(asdict(passage), ensure_ascii=False).encode() + b"\n"
            except UnicodeEncodeError as error:
                raise DataError(f"passage {passage.id!r} (row {row}) is not Unicode text: {error}") from None
            file.write(line)
            ends.append(ends[-1] + len(line))
            for key in {passage.id, passage.url} - {""}:
                hashes.append(_hash(key))
                rows.append(row)
            yield passage
    if len(ends) == 1:
        raise DataError("the corpus has no passages")
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    np.save(folder / "ends.npy", np.array(ends, np.int64))
    np.save(folder / "keys.npy", np.array(hashes, np.uint64)[order])
    np.save(folder / "rows.npy", np.array(rows, np.int64)[order])


class PassageStore:
    """Reads what `write_passages` wrote."""

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / "ends.npy")  # int64 [N + 1]
        self._keys = np.load(folder / "keys.npy")  # uint64 [K], sorted
        self._rows = np.load(folder / "rows.npy")  # int64 [K]
        with (folder / "passages.jsonl").open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> Passage:
        return Passage(**json.loads(self._lines[self._ends[row] : self._ends[row + 1]]))

    def page(self, key: str) -> list[Passage]:
        """Return the passages with this URL or id, in the order of the corpus; empty without one."""
        wanted = _hash(key)
        begin, end = (int(np.searchsorted(self._keys, wanted, side)) for side in ("left", "right"))
        found = [self[int(row)] for row in sorted(self._rows[begin:end])]
        return [passage for passage in found if key in (passage.id, passage.url)]

    def close(self) -> None:
        """Close the file of the passages."""
        self._lines.close()


def _hash(key: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
