from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from areal_agents.core.rollout import Task
from areal_agents.errors import DataError
from areal_agents.rollout.config import DataConfig
from areal_agents.rollout.data import TaskSource, load_tasks

ROWS = [{"id": f"t{i}", "question": f"q{i}", "n": i} for i in range(5)]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def write_parquet(path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_tasks_are_read_from_files_of_every_format(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"tasks.{form}"
    if form == "parquet":
        write_parquet(file)
    elif form == "csv":
        write(file, "id,question,n\n" + "".join(f"{r['id']},{r['question']},{r['n']}\n" for r in ROWS))
    elif form == "json":
        write(file, json.dumps(ROWS))
    else:
        write(file, "\n".join(map(json.dumps, ROWS)))
    source = load_tasks(DataConfig(path=str(file)))
    assert [task.id for task in source.tasks] == ["t0", "t1", "t2", "t3", "t4"]
    assert source.tasks[3].input == {"id": "t3", "question": "q3", "n": "3" if form == "csv" else 3}


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_task_from_a_json_file_equals_its_row(tmp_path: Path, form: str) -> None:
    rows = [
        {"day": "2024-01-01", "at": "2024-01-01T10:00:00", "n": 1},
        {"n": 1.5, "deep": {"x": 1}},
        {"n": "1", "deep": {"y": [1, "a", None]}, "big": 12345678901234567890123, "text": "日本\u2028語"},
    ]
    lines = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file = write(tmp_path / f"tasks.{form}", json.dumps(rows) if form == "json" else lines)
    read = [task.input for task in load_tasks(DataConfig(path=file)).tasks]
    assert read == rows and [type(task["n"]) for task in read] == [int, float, str]


def test_every_field_of_a_csv_file_is_a_string(tmp_path: Path) -> None:
    file = write(tmp_path / "tasks.csv", 'zip,text\n00123,"a\nb"\n1.0,\n')
    read = [task.input for task in load_tasks(DataConfig(path=file)).tasks]
    assert read == [{"zip": "00123", "text": "a\nb"}, {"zip": "1.0", "text": ""}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tasks.jsonl", '{"a": 1}\n\n{"a": \n', "tasks.jsonl, line 3 is not valid JSON"),
        ("tasks.jsonl", '{"a": 1}\n5\n', "row 1 must be a dict or a Task, got int"),
        ("tasks.jsonl", "\n \n", "has no tasks"),
        ("tasks.jsonl", '{"a": NaN}', "row 0 cannot be written as JSON"),
        (
            "tasks.jsonl",
            '{"a": 1}\n{"a": "\\ud800"}',
            "row 1 cannot be written as JSON.*surrogates not allowed",
        ),
        ("tasks.jsonl", '{"a": ' + "[" * 100_000, "line 1 is not valid JSON"),
        ("tasks.json", '[{"a": 1},', "tasks.json is not valid JSON"),
        ("tasks.json", "[]", "has no tasks"),
        ("tasks.csv", "a,b\n1,2,3\n", "tasks.csv, line 2: expected 2 fields"),
        ("tasks.csv", "a,b\n1,2\n3\n", "tasks.csv, line 3: expected 2 fields"),
        ("tasks.csv", 'a,b\n1,"2\n', "is not valid CSV"),
        ("tasks.csv", "a,b\n", "has no tasks"),
        ("tasks.parquet", "x", "cannot load"),
    ],
)
def test_an_error_in_a_file_is_reported_with_its_line_or_row(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(DataConfig(path=write(tmp_path / name, text)))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match=r"tasks\.jsonl is not a UTF-8 text"):
        load_tasks(DataConfig(path=str(tmp_path / "tasks.jsonl")))


FUNCTIONS = """
from neighbour import WORD
from areal_agents.core.rollout import Task
def plain(): return [{"q": WORD}, {"q": WORD}]
def seeded(seed): return [{"id": f"s{seed}"}]
def split_of(*, split="none", **rest): return [{"id": f"{split} {sorted(rest)}"}]
def generator(split, limit=2):
    for i in range(limit): yield Task(f"{split}{i}", {"i": i})
def empty(): return []
def raises(): raise OSError("no disk")
def raises_late():
    yield {"q": 1}
    raise KeyError("late")
def not_tasks(): return [1]
def not_a_list(): return {"id": "x"}
def not_json(): return [{"when": object()}]
def infinite(): return [{"x": float("nan")}]
def twice(): return [{"id": 1}, {"id": "1"}]
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("WORD = 'from a neighbour'")
    return write(tmp_path / "functions_of_the_test.py", FUNCTIONS)


def test_functions_get_the_arguments_that_they_accept(functions: str) -> None:
    def ids(name: str, **config: object) -> list[str]:
        return [t.id for t in load_tasks(DataConfig(path=f"{functions}:{name}", **config), seed=3).tasks]  # type: ignore[arg-type]

    assert load_tasks(DataConfig(path=f"{functions}:plain")).tasks[1].input == {"q": "from a neighbour"}
    assert ids("plain") == ["0", "1"]
    assert ids("seeded") == ["s3"] and ids("seeded", seed=7) == ["s7"]
    assert ids("split_of", split="dev") == ["dev ['seed']"] and ids("split_of") == ["none ['seed']"]
    assert ids("generator", split="dev") == ["dev0", "dev1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "has no tasks"),
        ("raises", "raised OSError: no disk"),
        ("raises_late", "raised KeyError: 'late'"),
        ("not_tasks", "row 0 must be a dict or a Task, got int"),
        ("not_a_list", "must return a sequence of tasks, got dict"),
        ("not_json", "row 0 cannot be written as JSON"),
        ("infinite", "row 0 cannot be written as JSON"),
        ("twice", "has the id '1' twice"),
        ("missing", "has no function 'missing'; it has"),
    ],
)
def test_errors_of_task_functions_are_reported(functions: str, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(DataConfig(path=f"{functions}:{name}"))


@pytest.mark.parametrize("name", ["split", "subset"])
def test_a_split_or_subset_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "tasks.jsonl", '{"id": 1}')
    with pytest.raises(DataError, match=f"is a file, which has no {name}; leave data.{name} out"):
        load_tasks(DataConfig(path=path, **{name: "dev"}))


def test_missing_or_broken_data_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path, message in [
        (str(tmp_path / "no.jsonl"), "there is no data file"),
        (str(tmp_path / "no.py") + ":tasks", "there is no file"),
        ("no_such_module:tasks", "cannot import no_such_module: ModuleNotFoundError"),
        (str(tmp_path / "folder-without-data"), "expected a .jsonl, .json, .parquet or .csv file"),
        (write(tmp_path / "empty.jsonl", ""), "is empty"),
        (write(tmp_path / "broken.jsonl", '{"id": '), "is not valid JSON"),
    ]:
        with pytest.raises(DataError, match=message):
            load_tasks(DataConfig(path=path))


def test_the_id_column_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "tasks.jsonl", "\n".join(map(json.dumps, ROWS)))
    assert [t.id for t in load_tasks(DataConfig(path=file, id="question")).tasks][:2] == ["q0", "q1"]
    with pytest.raises(DataError, match="no id column 'name'; it has id, question, n"):
        load_tasks(DataConfig(path=file, id="name"))


def source(n: int = 6, **options: int) -> TaskSource:
    return TaskSource(tuple(Task(f"t{i}", {}) for i in range(n)), **{"seed": 0, **options})


def test_every_epoch_has_each_task_once_in_an_order_that_depends_on_the_seed() -> None:
    first, second = source().epoch(0), source().epoch(1)
    assert sorted(t.id for t in first) == sorted(t.id for t in second) == [f"t{i}" for i in range(6)]
    assert first == source().epoch(0) and first != second and first != source(seed=1).epoch(0)


def test_the_stream_continues_after_a_restart() -> None:
    whole = list(itertools.islice(source().stream(), 15))
    assert [epoch for _, epoch in whole] == [0] * 6 + [1] * 6 + [2] * 3
    started = {(task.id, epoch) for task, epoch in whole[:8]}
    assert list(itertools.islice(source().stream(started), 7)) == whole[8:]
    assert len(list(source(epochs=2).stream(started))) == 4


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        TaskSource((), seed=0)
