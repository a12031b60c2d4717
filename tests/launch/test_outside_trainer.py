"""A run whose trainer is started elsewhere reports how long it has waited, and ends if no trainer starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal_agents.errors import ArealAgentsError
from areal_agents.launch.outside_trainer import OutsideTrainer
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store.trainer_lock import TrainerLock


@dataclass
class Run:
    """A watched run whose clock and end are set by the test."""

    folder: Path
    time: float = 1000.0
    has_ended: bool = False
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = self.folder / "store.db"
        self.watch = OutsideTrainer(
            RunFolder(self.folder),
            self.store,
            limit_s=100,
            has_ended=lambda: self.has_ended,
            say=self.said.append,
            now=lambda: self.time,
        )

    def until(self, time: float) -> None:
        while self.time < time:
            self.time += 1
            self.watch.check()


def test_the_wait_for_a_trainer_is_limited_even_after_one_has_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    until, said = run.until, run.said
    until(1029)
    assert said == []
    until(1099)
    waiting = f"areal-agents processes trainer --folder {tmp_path}"
    assert len(said) == 3 and all(waiting in text for text in said)
    assert [text.rpartition(": ")[2] for text in said] == [f"{s} s of at most 100 s" for s in (31, 61, 91)]
    trainer = TrainerLock.of(run.store)
    trainer.take()
    until(1500)
    assert said[3:] == ["the trainer has been started"]
    trainer.release()
    until(1504)
    assert "waiting for the trainer" in said[4] and "0 s of at most 100 s" in said[4]
    until(1599)
    with pytest.raises(ArealAgentsError, match=r"no trainer has been started for 100 s .*join_timeout_s"):
        until(1610)


def test_a_process_that_only_checks_the_lock_is_not_taken_for_a_trainer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.until(1050)
    other = TrainerLock.of(run.store)
    other.take()
    run.until(1052)  # the watch looks once
    other.release()
    with pytest.raises(ArealAgentsError, match=r"no trainer has been started for 10\d s"):
        run.until(1110)
    assert all("waiting for the trainer" in text for text in run.said)


def test_no_trainer_is_awaited_once_the_training_has_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, has_ended=True)
    run.until(2000)
    assert run.said == []
