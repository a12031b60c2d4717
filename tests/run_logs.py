"""The last log lines of a run's processes, for the message of a test whose run failed."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 40


def ends_of_logs(run_dir: Path) -> str:
    """Return the end of every log in the run's folder, each under its name."""
    logs = sorted((run_dir / "logs").glob("*.log"))
    return "".join(f"\n--- the end of {log.name}\n{_end_of(log)}\n" for log in logs)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
