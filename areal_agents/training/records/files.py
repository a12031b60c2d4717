"""The files of trained tokens: `<run>/trained/step-<n>/rank-<r>.parquet`, one row for each turn.

A file is complete or absent. A rank writes the tokens of its own micro-batches; the first rank also writes
the turns of the batch that were not trained, with the reason. A turn that context parallelism splits over
ranks has a row in the file of each, and a value in exactly one of them. This module needs pyarrow and no
torch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_agents.errors import ConfigError
from areal_agents.whole_files import replacing

Floats = npt.NDArray[np.float32]

FOLDER = "trained"
# What happened to a token: it carried a gradient; it exceeded the staleness bound; the off-policy correction
# rejected it; the trust region dropped it. Null: the turn was not trained, or another rank has the token.
STATES = ("trained", "stale", "rejected", "dropped")
CLIPPED = ("no", "low", "high", "dual")
# float32, one for each sampled token; null where the token was not trained or the algorithm has no such value
VALUES = (
    "advantage", "proximal", "current", "reference", "value", "ratio", "weight", "loss_weight", "loss",
)  # fmt: skip
_ROW_GROUP = 128  # rows; a reader of one turn decodes one row group
# Columns whose values differ from token to token: their bytes are stored by significance, which compresses
# better than the numbers one after the other.
_SPLIT = ("proximal", "current", "reference", "value", "ratio", "weight", "loss")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecord:
    """A turn of a batch, as the step that had it recorded it.

    Attributes:
        step: the step, counted from 1. version: the trainer's version when the batch began.
        use: how often earlier batches were trained on the turn's group.
        minibatch: the optimizer step of the batch that trained it, counted from 0; None if not trained.
        untrained: why none of its tokens was trained (`algorithms.samples.Untrained`), None if one was.
        tokens: C, the number of sampled tokens.
        states: [C] what happened to each token, see `STATES`; None in a turn that was not trained.
        clipped: [C] which bound of the loss took effect: "no", "low", "high", "dual"; None as above.
        values: by name (`VALUES`) an array [C] float32, nan where there is no value:
            advantage, as the loss used it; proximal, current, reference: logprobs under the weights when the
            batch began, in the pass of the token's minibatch, and of the reference policy; value: the
            critic's; ratio: current/proximal as the loss compared it with its bounds, which for GSPO is that
            of the sequence or turn; weight: the off-policy weight as applied; loss_weight: the token's
            coefficient c in the loss; loss: the token's share, c · (weight · policy loss + the other terms).
    """

    step: int
    version: int
    use: int
    minibatch: int | None
    group_id: str
    episode_id: str
    turn_id: str
    untrained: str | None
    tokens: int
    states: tuple[str | None, ...]
    clipped: tuple[str | None, ...]
    values: Mapping[str, Floats]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data: lists of numbers, None where there is no value."""
        values = {
            name: [None if number != number else number for number in array.tolist()]
            for name, array in self.values.items()
        }
        fields = (
            "step",
            "version",
            "use",
            "minibatch",
            "group_id",
            "episode_id",
            "turn_id",
            "untrained",
            "tokens",
        )
        own = {name: getattr(self, name) for name in fields}
        return {**own, "states": list(self.states), "clipped": list(self.clipped), **values}


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of one file, as arrays.

    Attributes:
        turns: R rows, each with the columns of a row that are not lists.
        lengths: [R] the lengths of each row's lists: its sampled tokens, or 0 if the turn was not trained.
        states, clipped: [Σ lengths] int8, indices into `STATES` and `CLIPPED`; -1: null.
        values: by name [Σ lengths] float32; nan: null. A name that is absent is null everywhere.
    """

    turns: Sequence[Mapping[str, Any]]
    lengths: npt.NDArray[np.int64]
    states: npt.NDArray[np.int8]
    clipped: npt.NDArray[np.int8]
    values: Mapping[str, Floats]


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's files."""
    return run_dir / FOLDER / f"step-{step:06d}"


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a folder, ascending."""
    found = [_STEP.fullmatch(path.name) for path in (run_dir / FOLDER).glob("step-*")]
    return sorted(int(match[1]) for match in found if match)


def drop_steps(run_dir: Path, steps: Iterable[int]) -> None:
    """Remove the files of these steps, as far as they exist."""
    for step in steps:
        folder = step_folder(run_dir, step)
        if folder.exists():
            shutil.rmtree(folder)


def write_rows(path: Path, rows: StepRows) -> None:
    """Write a file. It appears under its name when it is complete. Raises OSError."""
    pyarrow, parquet = _pyarrow()
    ends = np.concatenate([[0], np.cumsum(rows.lengths)])
    trained = pyarrow.array([turn["untrained"] is None for turn in rows.turns], pyarrow.bool_())

    def lists(flat: Any) -> Any:
        offsets = pyarrow.array(ends, pyarrow.int32())
        return pyarrow.compute.if_else(
            trained,
            pyarrow.ListArray.from_arrays(offsets, flat),
            pyarrow.scalar(None, pyarrow.list_(flat.type)),
        )

    def words(codes: npt.NDArray[np.int8], names: Sequence[str]) -> Any:
        indices = pyarrow.array(codes, pyarrow.int8(), mask=codes < 0)
        return lists(pyarrow.DictionaryArray.from_arrays(indices, list(names)).dictionary_decode())

    columns: dict[str, Any] = {
        name: pyarrow.array([turn[name] for turn in rows.turns], kind())
        for name, kind in _columns(pyarrow).items()
    }
    columns["states"], columns["clipped"] = words(rows.states, STATES), words(rows.clipped, CLIPPED)
    missing = np.full(int(ends[-1]), np.nan, np.float32)
    for name in VALUES:
        values = rows.values.get(name, missing)
        columns[name] = lists(pyarrow.array(values, pyarrow.float32(), mask=np.isnan(values)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        parquet.write_table(
            pyarrow.table(columns),
            temporary,
            row_group_size=_ROW_GROUP,
            compression="zstd",
            use_dictionary=[name for name in columns if name not in _SPLIT],
            column_encoding=dict.fromkeys((f"{name}.list.element" for name in _SPLIT), "BYTE_STREAM_SPLIT"),
        )


def read_records(
    run_dir: Path, *, turn_ids: Collection[str] | None = None, steps: Collection[int] | None = None
) -> list[TurnRecord]:
    """Return records in the order of their steps, then of their rows.

    Args:
        turn_ids: only records of these turns; None: of all.
        steps: only records of these steps; None: of all that have files.

    Raises:
        ConfigError: pyarrow is not installed, or a file cannot be read.
    """
    found: list[TurnRecord] = []
    wanted = None if turn_ids is None else set(turn_ids)
    for step in recorded_steps(run_dir):
        if steps is None or step in steps:
            found += _merged(
                _rows(path, wanted) for path in sorted(step_folder(run_dir, step).glob("rank-*.parquet"))
            )
    return found


def _columns(pyarrow: Any) -> dict[str, Any]:
    """The columns with one value for each turn, and their types."""
    whole, string = pyarrow.int32, pyarrow.string
    return {
        "step": whole, "version": whole, "use": whole, "minibatch": whole,
        "tokens": whole, "group_id": string, "episode_id": string, "turn_id": string, "untrained": string,
    }  # fmt: skip


def _rows(path: Path, turn_ids: set[str] | None) -> Iterator[TurnRecord]:
    pyarrow, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                if turn_ids is not None:
                    names = file.read_row_group(group, columns=["turn_id"])["turn_id"].to_pylist()
                    if turn_ids.isdisjoint(names):
                        continue
                table = file.read_row_group(group)
                for index in range(len(table)):
                    row = {name: table[name][index] for name in table.column_names}
                    if turn_ids is None or row["turn_id"].as_py() in turn_ids:
                        yield _record(row)
    except FileNotFoundError:  # a running trainer removed an old step
        return
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ConfigError(f"cannot read {path} as a record of trained tokens: {error}") from error


def _record(row: Mapping[str, Any]) -> TurnRecord:
    own = {name: row[name].as_py() for name in _columns(_pyarrow()[0])}
    states, clipped = row["states"].as_py() or (), row["clipped"].as_py() or ()
    values = {}
    for name in VALUES:
        array = row[name].values
        values[name] = (
            np.full(0, np.nan, np.float32)
            if array is None
            else array.to_numpy(zero_copy_only=False).astype(np.float32)
        )
    return TurnRecord(**own, states=tuple(states), clipped=tuple(clipped), values=values)


def _merged(files: Iterable[Iterable[TurnRecord]]) -> list[TurnRecord]:
    """Join the rows of one turn in several files of a step; each has the values of other tokens."""
    by_turn: dict[tuple[str, int], TurnRecord] = {}
    for rows in files:
        for row in rows:
            key = (row.turn_id, row.use)
            by_turn[key] = row if key not in by_turn else _joined(by_turn[key], row)
    return list(by_turn.values())


def _joined(one: TurnRecord, other: TurnRecord) -> TurnRecord:
    def first(a: Sequence[str | None], b: Sequence[str | None]) -> tuple[str | None, ...]:
        return tuple(x if x is not None else y for x, y in zip(a, b, strict=True))

    return replace(
        one,
        states=first(one.states, other.states),
        clipped=first(one.clipped, other.clipped),
        values={
            name: np.where(np.isnan(array), other.values[name], array) for name, array in one.values.items()
        },
    )


def check_installed() -> None:
    """Raise ConfigError if records cannot be written or read here, because pyarrow is missing."""
    _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.compute
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ConfigError(
            "records of trained tokens need pyarrow: pip install 'areal-agents[train]'; or set "
            "trainer.record_tokens: none"
        ) from None
    return pyarrow, parquet
