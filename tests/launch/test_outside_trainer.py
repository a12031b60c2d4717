"""A run whose trainer something else starts says for how long it waits, and ends if none comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_agents.errors import ArealAgentsError
from areal_agents.launch.outside_trainer import OutsideTrainer
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store.trainer_lock import TrainerLock


def test_a_trainer_is_waited_for_with_a_limit_also_after_one_has_ended(tmp_path: Path) -> None:
    clock, said = [1000.0], []
    store = tmp_path / "store.db"
    watch = OutsideTrainer(RunFolder(tmp_path), store, limit_s=100, say=said.append, now=lambda: clock[0])

    def until(time: float) -> None:
        while clock[0] < time:
            clock[0] += 1
            watch.check()

    until(1029)
    assert said == []
    until(1099)
    waiting = f"areal-agents processes trainer --folder {tmp_path}"
    assert len(said) == 3 and all(waiting in text for text in said)
    assert [text.rpartition(": ")[2] for text in said] == [f"{s} s of at most 100 s" for s in (31, 61, 91)]
    trainer = TrainerLock(store)
    trainer.take()
    until(1500)
    assert said[3:] == ["the trainer has been started"]
    trainer.release()
    until(1504)
    assert "waiting for the trainer" in said[4] and "0 s of at most 100 s" in said[4]
    until(1599)
    with pytest.raises(ArealAgentsError, match=r"no trainer has been started for 100 s .*join_timeout_s"):
        until(1610)
