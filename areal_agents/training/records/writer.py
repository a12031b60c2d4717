"""Writes the records of each step on a background thread, so that training does not wait for the disk.

At most one file is being written. The next step and the next checkpoint wait for it, so every step that a
checkpoint contains has its files. A resumed run removes the files of the steps that it takes again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from areal_agents.errors import TrainingError
from areal_agents.training.records.files import (
    StepRows,
    check_installed,
    drop_steps,
    recorded_steps,
    step_folder,
    write_rows,
)

RecordTokens = Literal["all", "none"] | int


class RecordWriter:
    """Writes the files of one rank.

    Args:
        keep: "all", or the number of the newest steps whose files are kept; up to one more exists while a
            step is being written.
        prunes: whether this rank removes the files of older steps; exactly one rank does.
    """

    def __init__(self, run_dir: Path, *, rank: int, keep: Literal["all"] | int, prunes: bool) -> None:
        check_installed()
        self._run_dir, self._rank, self._keep, self._prunes = run_dir, rank, keep, prunes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._pending: tuple[int, Future[None]] | None = None

    def write(self, step: int, rows: Callable[[], StepRows]) -> None:
        """Write the file of a step on the thread, which also calls `rows`. Raises as `wait` does."""
        self.wait()
        self._pending = (step, self._thread.submit(self._write, step, rows))

    def wait(self) -> None:
        """Wait until the last file is written.

        Raises:
            TrainingError: it could not be written.
        """
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        try:
            written.result()
        except OSError as error:
            raise TrainingError(
                f"the records of the tokens of step {step} cannot be written: {error}; free space, or set "
                "trainer.record_tokens to a smaller number or to none"
            ) from error

    def close(self) -> None:
        """Wait for the last file and end the thread."""
        self._thread.shutdown(wait=True)

    def _write(self, step: int, rows: Callable[[], StepRows]) -> None:
        write_rows(step_folder(self._run_dir, step) / f"rank-{self._rank}.parquet", rows())
        if self._prunes and self._keep != "all":
            # Another rank may still be writing the step before this one, but none that is earlier.
            oldest = step - self._keep
            drop_steps(self._run_dir, [old for old in recorded_steps(self._run_dir) if old < oldest])


def drop_steps_after(run_dir: Path, step: int) -> None:
    """Remove the files of the steps after `step`, which a resumed run takes again."""
    drop_steps(run_dir, [later for later in recorded_steps(run_dir) if later > step])
