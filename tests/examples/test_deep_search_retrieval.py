"""The retrieval server of deep_search finds passages in each mode, opens pages, and refuses bad requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from retrieval import Columns, Index, Mode, Passage, build_app, build_index, read_corpus
from retrieval.batching import Batcher, TooBusy
from retrieval.index import Hit, fused
from starlette.testclient import TestClient

from areal_agents.errors import ConfigError, DataError

PASSAGES = [
    Passage("a", "The Rhône flows through Lyon.", "Lyon", "https://x.example/lyon"),
    Passage("b", "Lyon was the capital of Gaul.", "History of Lyon", "https://x.example/lyon"),
    Passage("c", "The capital of France is Paris.", "France"),
    Passage("d", "Potassium is a metal.", "Potassium"),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("deep-search") / "index"
    build_index(PASSAGES, folder)
    opened = Index(folder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def client(index: Index) -> Iterator[TestClient]:
    with TestClient(build_app(index)) as client:
        yield client


def ids(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


def test_bm25_weighs_titles_and_ignores_case_accents_and_stop_words(index: Index) -> None:
    [france, rhone, both, nothing, empty] = index.search(
        ["france", "RHONE", "the capital of Lyon", "of the", "zzz"], k=3
    )
    assert (ids(france), ids(rhone), nothing, empty) == (["c"], ["a"], [], [])
    assert ids(both)[0] == "b" and set(ids(both)) == {"a", "b", "c"}
    assert [hit.score for hit in both] == sorted((hit.score for hit in both), reverse=True)
    assert index.search(["lyon"], k=1)[0] == index.search(["lyon"], k=50)[0][:1]
    assert index.search([], k=1) == [] and len(index) == 4 and index.modes == ("bm25",)


def test_a_page_is_all_passages_with_its_url(index: Index) -> None:
    assert index.page("https://x.example/lyon") == PASSAGES[:2]
    assert index.page("b") == [PASSAGES[1]] and index.page("") == index.page("nowhere") == []


def test_reciprocal_rank_fusion() -> None:
    assert fused([[(7, 9.0), (8, 1.0)], [(8, 0.5)]]) == [
        (8, pytest.approx(1 / 62 + 1 / 61)),
        (7, pytest.approx(1 / 61)),
    ]


def test_the_server_searches_and_opens_pages(client: TestClient) -> None:
    answer = client.post("/retrieve", json={"queries": ["potassium", "gaul"], "k": 1}).json()
    [[potassium], [gaul]] = answer["results"]
    assert (potassium["id"], gaul["url"]) == ("d", "https://x.example/lyon") and potassium["score"] > 0
    page = client.post("/access", json={"url": "https://x.example/lyon"}).json()
    assert page["text"] == f"{PASSAGES[0].text}\n\n{PASSAGES[1].text}" and page["title"] == "Lyon"
    assert client.post("/access", json={"id": "d"}).json()["text"] == "Potassium is a metal."
    assert client.get("/health").json() == {"passages": 4, "modes": ["bm25"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/retrieve", "{", 400, "not JSON"),
        ("/retrieve", "[]", 400, "must be a JSON object"),
        ("/retrieve", {"query": "x"}, 400, "unknown field 'query'"),
        ("/retrieve", {"queries": []}, 400, "list of 1 to 1024"),
        ("/retrieve", {"queries": [1]}, 400, "must be a string"),
        ("/retrieve", {"queries": ["x"], "k": 0}, 400, "k must be"),
        ("/retrieve", {"queries": ["x"], "k": True}, 400, "k must be"),
        ("/retrieve", {"queries": ["x"], "mode": "dense"}, 400, "mode must be one of bm25"),
        ("/retrieve", " " * (8 * 2**20 + 1), 413, "at most"),
        ("/access", {}, 400, "either url or id"),
        ("/access", {"url": "a", "id": "a"}, 400, "either url or id"),
        ("/access", {"url": "nowhere"}, 404, "no page nowhere"),
    ],
)
def test_bad_requests_are_refused(
    client: TestClient, path: str, body: object, status: int, says: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = client.post(path, content=content)
    assert answer.status_code == status and says in answer.json()["error"]["message"]
    assert client.get(path).status_code == 405


class HeldIndex:
    """An index whose searches wait for `go_on`, and which records the queries that are searched together."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int, Mode]] = []
        self.go_on = asyncio.Event()
        self.began = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def search(self, queries: list[str], *, k: int, mode: Mode) -> list[list[Hit]]:
        self.calls.append((queries, k, mode))
        self._loop.call_soon_threadsafe(self.began.set)
        asyncio.run_coroutine_threadsafe(self.go_on.wait(), self._loop).result(20)
        if queries == ["fails"]:
            raise ValueError("no")
        return [[Hit(Passage(query, query), rank) for rank in range(k)] for query in queries]


async def test_waiting_requests_are_searched_together() -> None:
    held = HeldIndex()
    batcher = Batcher(held, most_queries=3, most_waiting=6)  # type: ignore[arg-type]
    first = asyncio.create_task(batcher.search(["1"], 1, "bm25"))
    await held.began.wait()
    later = [
        asyncio.create_task(batcher.search(*wanted))
        for wanted in [(["2"], 1, "bm25"), (["3"], 2, "dense"), (["4", "5"], 3, "bm25"), (["6"], 1, "bm25")]
    ]
    gone = asyncio.create_task(batcher.search(["7"], 1, "bm25"))
    while batcher._queries_waiting < 6:
        await asyncio.sleep(0)
    with pytest.raises(TooBusy):
        await batcher.search(["8"], 1, "bm25")
    gone.cancel()
    held.go_on.set()
    found = [await task for task in (first, *later)]
    assert held.calls == [
        (["1"], 1, "bm25"), (["2", "4", "5"], 3, "bm25"), (["3"], 2, "dense"), (["6"], 1, "bm25")
    ]  # fmt: skip
    assert [len(hits) for hits in found[3]] == [3, 3] and [len(hits) for hits in found[1]] == [1]
    with pytest.raises(ValueError, match="no"):
        await batcher.search(["fails"], 1, "bm25")
    await batcher.close()
    assert batcher._queries_waiting == 0


async def test_a_search_that_takes_too_long_is_ended(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with TestClient(build_app(index, timeout_s=0.0)) as hurried:
        answer = hurried.post("/retrieve", json={"queries": ["lyon"]})
    assert answer.status_code == 504 and "longer than 0 s" in answer.json()["error"]["message"]


def test_jsonl_and_parquet_give_the_same_passages(tmp_path: Path) -> None:
    rows = [
        {"key": 1, "name": "Lyon", "body": "A city.", "link": "u"},
        {"key": 2, "name": None, "body": "Text.", "link": None},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    columns = Columns("key", "name", "body", "link")
    wanted = [Passage("1", "A city.", "Lyon", "u"), Passage("2", "Text.")]
    assert [*read_corpus(tmp_path / "c.jsonl", columns)] == wanted
    assert [*read_corpus(tmp_path / "c.parquet", columns)] == wanted
    (tmp_path / "pyserini.jsonl").write_text(json.dumps({"id": "7", "contents": '"Lyon"\nA city.'}))
    pyserini = read_corpus(tmp_path / "pyserini.jsonl", Columns(text="contents"))
    assert [*pyserini] == [Passage("7", "A city.", "Lyon")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "{", "a.jsonl:1 is not JSON"),
        ("a.jsonl", "1", "must be an object"),
        ("a.jsonl", '{"body": "x"}', "no text in its column 'text'; it has"),
        ("a.jsonl", "", "no passages"),
        ("a.jsonl", r'{"id": "7", "text": "\ud800"}', "passage '7' .row 0. is not Unicode text"),
        ("a.txt", "", "a .jsonl or a .parquet"),
        ("a.parquet", "no", "cannot be read as Parquet"),
    ],
)
def test_a_corpus_that_cannot_be_indexed_leaves_no_index(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=says):
        build_index(read_corpus(tmp_path / name, Columns()), tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(ConfigError, match="python -m retrieval build"):
        Index(tmp_path / "index")


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT model with random weights, and a vocabulary of the words of the passages."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    words = sorted({word for passage in PASSAGES for word in passage.text.lower().strip(".").split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    BertModel(shape).save_pretrained(folder)
    return folder


def test_a_damaged_index_is_refused_and_the_file_named(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    build_index(PASSAGES, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) > 5
    for file in files:
        whole = file.read_bytes()
        named = re.escape(str(file.relative_to(folder)))
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ConfigError, match=f"is damaged: {named} .*build it with"):
            Index(folder)
        file.unlink()
        with pytest.raises(ConfigError, match=f"is damaged: {named} is missing|there is no index in"):
            Index(folder)
        file.write_bytes(whole)
    Index(folder).close()
    (folder / "index.json").write_text('{"format": "deep_search index 1"}')
    with pytest.raises(ConfigError, match="expected 'deep_search index 2'; remove it and build it again"):
        Index(folder)


def test_dense_and_fused_retrieval(tmp_path: Path, embedding_model: Path) -> None:
    said: list[str] = []
    untitled = [Passage(passage.id, passage.text) for passage in PASSAGES]
    build_index(untitled, tmp_path / "index", embedding_model=str(embedding_model), report=said.append)
    assert said[-1] == "4 of 4 passages embedded"
    index = Index(tmp_path / "index")
    try:
        assert index.modes == ("bm25", "dense", "fused")
        found = index.search([passage.text for passage in untitled], k=4, mode="dense")
        assert [ids(hits)[0] for hits in found] == ["a", "b", "c", "d"]
        assert all(hits[0].score == pytest.approx(1, abs=2e-3) for hits in found)
        kept = np.load(tmp_path / "index" / "embeddings.npy").astype(np.float32)
        assert found[0][1].score == pytest.approx(np.sort(kept @ kept[0])[-2], abs=2e-3)
        [hits] = index.search(["Potassium is a metal."], k=2, mode="fused")
        assert ids(hits)[0] == "d" and hits[0].score == pytest.approx(2 / 61)
        with TestClient(build_app(index)) as client:
            answer = client.post("/retrieve", json={"queries": ["Lyon"], "k": 2, "mode": "fused"})
            assert len(answer.json()["results"][0]) == 2
    finally:
        index.close()
    with pytest.raises(ConfigError, match="exists"):
        build_index(untitled, tmp_path / "index")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_index(untitled, tmp_path / "other", embedding_model=str(tmp_path))
