"""What each engine that reads its weights from an object storage has loaded.

The engine's process writes its row, and the trainer waits for the rows: it reaches the engines in no other
way. A process that was cut off may still be running when its successor has the place, in a later epoch
(`roles.py`); it never overwrites the successor's row. All times are those of the database, so the clocks of
the machines need not agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from areal_agents.store.roles import DEAD_AFTER_S, database_now
from areal_agents.store.schema import engine_weights


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What an engine serves, as its process says.

    Attributes:
        index: the index of the engine.
        process: names the process that writes the row.
        version: the version that it has loaded since it was started; None: none yet.
        problem: why it has not loaded a newer version; None: nothing is wrong.
        pause_s: how many seconds it did not sample to load the version. fetch_s: how many seconds it took to
            fetch the version. received_bytes: how many bytes of the storage were read for it.
        agreement: the share of its weights that equal those published; None: not compared.
        busy_s: the seconds that it has spent sampling; None if it does not count them.
        epoch: that of the process's place in the run; None: it has none, as in a run on one machine.
    """

    index: int
    process: str
    version: int | None = None
    problem: str | None = None
    pause_s: float = 0.0
    fetch_s: float = 0.0
    received_bytes: int = 0
    agreement: float | None = None
    busy_s: float | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class EngineWeightsRow:
    """A row: what an engine serves, and how many seconds ago that was written."""

    weights: EngineWeights
    age_s: float

    @property
    def is_alive(self) -> bool:
        """Whether the engine's process is running, as far as the row tells."""
        return self.age_s < DEAD_AFTER_S


def show(connection: sa.Connection, weights: EngineWeights) -> bool:
    """Write the row of an engine; return False, and write nothing, if it has that of a later epoch.

    A process without a place replaces every row.
    """
    values = {**asdict(weights), "beat_at": database_now(connection)}
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    epoch = engine_weights.c.epoch
    is_ours = sa.true() if weights.epoch is None else sa.or_(epoch.is_(None), epoch <= weights.epoch)
    written = connection.execute(
        insert(engine_weights)
        .values(**values)
        .on_conflict_do_update(index_elements=[engine_weights.c.index], set_=values, where=is_ours)
        .returning(engine_weights.c.index)
    )
    return written.one_or_none() is not None


def leave(connection: sa.Connection, index: int, process: str) -> None:
    """Remove the row of an engine that ends, unless another process writes it."""
    connection.execute(
        sa.delete(engine_weights).where(engine_weights.c.index == index, engine_weights.c.process == process)
    )


def all_of(connection: sa.Connection) -> list[EngineWeightsRow]:
    """Return the rows of all engines by index."""
    now = database_now(connection)
    rows = connection.execute(sa.select(engine_weights).order_by(engine_weights.c.index)).mappings()
    return [
        EngineWeightsRow(
            EngineWeights(**{name: value for name, value in row.items() if name != "beat_at"}),
            max(0.0, now - row["beat_at"]),
        )
        for row in rows
    ]
