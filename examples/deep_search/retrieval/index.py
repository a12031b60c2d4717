"""The index of a corpus: built once into a folder, opened by the server or in the agent's own process.

A folder that exists is complete: an index is built beside it and moved into place when it is whole.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from areal_agents.errors import ConfigError
from retrieval.bm25 import Bm25
from retrieval.dense import Dense, Encoder, embed_corpus
from retrieval.passages import Passage, PassageStore, write_passages

Mode = Literal["bm25", "dense", "fused"]
MODES: tuple[Mode, ...] = get_args(Mode)
FORMAT = "deep_search index 2"
RANK_CONSTANT = 60  # of reciprocal rank fusion (Cormack et al. 2009)
_FUSED_DEPTH = 5  # times k: how far down each list fusion looks
_REPORT_EVERY = 10_000  # passages
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a query found; a larger score is better, within one mode."""

    passage: Passage
    score: float


def build_index(
    passages: Iterable[Passage],
    folder: Path,
    *,
    embedding_model: str | None = None,
    device: str = "cpu",
    report: Report = lambda line: None,
) -> None:
    """Build the index of a corpus in `folder`, which must not exist.

    Args:
        embedding_model: a model folder or a name of the Hub, for dense retrieval; None: BM25 alone.
        device: where the passages are embedded.
        report: is told about the progress.

    Raises:
        ConfigError: the folder exists, or the model cannot be loaded.
        DataError: the corpus is empty or cannot be read.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; remove it, or name another folder")
    encoder = None if embedding_model is None else Encoder(embedding_model, device=device)
    building = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    building.mkdir(parents=True)
    try:
        _build(passages, building, encoder, embedding_model, report)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(
    passages: Iterable[Passage], folder: Path, encoder: Encoder | None, model: str | None, report: Report
) -> None:
    count = 0

    def documents() -> Iterable[tuple[str, str]]:
        nonlocal count
        for passage in write_passages(passages, folder):
            count += 1
            if count % _REPORT_EVERY == 0:
                report(f"{count:,} passages read")
            yield passage.title, passage.text

    bm25 = Bm25.build(documents())
    report(f"{count:,} passages read and indexed")
    bm25.save(folder / "bm25")
    bm25.close()
    if encoder is not None:
        store = PassageStore(folder)
        texts = (f"{store[row].title}\n{store[row].text}".strip() for row in range(count))
        for done in embed_corpus(encoder, texts, count, folder / "embeddings.npy"):
            report(f"{done:,} of {count:,} passages embedded")
        store.close()
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)}
    facts = {"format": FORMAT, "passages": count, "embedding_model": model, "sizes": sizes}
    (folder / "index.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if a file is not as it was written, such as one whose copying was interrupted."""
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise _damaged(folder, f"{name} is missing")
        if (found := file.stat().st_size) != size:
            raise _damaged(folder, f"{name} has {found:,} bytes, and {size:,} were written")


def _damaged(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the index in {folder} is damaged: {what}; copy it again, or remove it and build it with "
        f"`python -m retrieval build CORPUS {folder}`"
    )


class Index:
    """An index that `build_index` built.

    Args:
        folder: its folder.
        device: where dense retrieval computes.

    Raises:
        ConfigError: the folder is no index, a file of it is missing or has another size than was written, or
            its embedding model cannot be loaded.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        try:
            facts = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"there is no index in {folder}; `python -m retrieval build CORPUS {folder}` builds it"
            ) from None
        except ValueError as error:
            raise _damaged(folder, f"index.json is not JSON ({error})") from error
        found = facts.get("format") if isinstance(facts, dict) else None
        if found != FORMAT:
            raise ConfigError(
                f"{folder} has the format {found!r}, expected {FORMAT!r}; remove it and build it again"
            )
        _check_sizes(folder, facts["sizes"])
        self.embedding_model: str | None = facts["embedding_model"]
        self._passages = PassageStore(folder)
        self._bm25 = Bm25.load(folder / "bm25", len(self._passages))
        self._dense = None
        if self.embedding_model is not None:
            encoder = Encoder(self.embedding_model, device=device)
            self._dense = Dense(folder / "embeddings.npy", encoder, device=device)

    def __len__(self) -> int:
        return len(self._passages)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes in which it can be searched."""
        return MODES if self._dense is not None else ("bm25",)

    def search(self, queries: Sequence[str], *, k: int, mode: Mode = "bm25") -> list[list[Hit]]:
        """Return the best k hits of each query, the best first.

        Raises:
            ValueError: k is below 1, or the index was built without what the mode needs.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if mode not in self.modes:
            raise ValueError(f"mode must be one of {', '.join(self.modes)} for this index, got {mode!r}")
        if not queries:
            return []
        if mode == "bm25":
            found = self._bm25.search(queries, k)
        else:
            assert self._dense is not None
            if mode == "dense":
                found = self._dense.search(queries, k)
            else:
                both = (one.search(queries, _FUSED_DEPTH * k) for one in (self._bm25, self._dense))
                found = [fused(lists)[:k] for lists in zip(*both, strict=True)]
        return [[Hit(self._passages[row], score) for row, score in of_query] for of_query in found]

    def page(self, key: str) -> list[Passage]:
        """Return the passages of the page with this URL, or the passage with this id; empty without one."""
        return self._passages.page(key)

    def close(self) -> None:
        """Close its files and end its threads."""
        self._bm25.close()
        self._passages.close()


def fused(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Fuse rankings by reciprocal rank: the score of a row is Σ 1 / (60 + its rank) over the rankings.

    Args:
        rankings: (row, score) of each ranking, the best first.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, start=1):
            scores[row] = scores.get(row, 0.0) + 1 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
