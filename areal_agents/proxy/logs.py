"""The proxy's log: one line per record on standard error, as text or as JSON.

The log contains neither keys nor message texts: anything that looks like an episode's key is masked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson

from areal_agents.proxy.calls.record import CallRecord

LogFormat = Literal["text", "json"]

_logger = logging.getLogger(__name__)
_PACKAGE = "areal_agents"
_OTHERS = ("uvicorn", "asyncio", "py.warnings")  # loggers of other packages
_KEY = re.compile(r"\bep-[A-Za-z0-9_-]{16,}")
_CALL = "call"  # attributes that this package's log records may have
_EXTRAS = ("episode_id", "turn_ids")


def log_call(record: CallRecord) -> None:
    """Log a model call: its numbers and ids, not its messages. It is an `Observer`."""
    _logger.log(
        logging.WARNING if record.status >= 500 else logging.INFO,
        "%s %d in %.3f s, %d prompt tokens, %d reused",
        record.endpoint, record.status, record.duration_s, record.prompt_tokens, record.reused_tokens,
        extra={_CALL: record, "episode_id": record.episode_id, "turn_ids": [t.id for t in record.turns]},
    )  # fmt: skip


@contextlib.contextmanager
def logging_as(log_format: LogFormat, stream: TextIO | None = None) -> Iterator[None]:
    """Within the with-block, write the log records of this package and of the HTTP server to `stream`.

    The default is standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    loggers = [logging.getLogger(name) for name in (_PACKAGE, *_OTHERS)]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if logger.name == _PACKAGE else logging.WARNING)
        logger.propagate = False  # otherwise a handler of the root logger writes the record again
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _EXTRAS:
            if value := getattr(record, name, None):
                line[name] = value
        if isinstance(call := getattr(record, _CALL, None), CallRecord):
            line[_CALL] = call_fields(call)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _masked(orjson.dumps(line, default=str).decode())


class TextLines(logging.Formatter):
    """Formats a record as time, level, logger and message, followed by the ids."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_time(record)} {record.levelname:<7} {record.name}: {record.getMessage()}"]
        if episode_id := getattr(record, "episode_id", ""):
            parts.append(f"episode={episode_id}")
        if turn_ids := getattr(record, "turn_ids", ()):
            parts.append(f"turns={','.join(turn_ids)}")
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return _masked(line)


def call_fields(call: CallRecord) -> dict[str, Any]:
    """Return the fields of a call for JSON; each turn is summarised, without its messages and tokens."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    del fields["episode"]  # it has the hash of a key
    fields |= {"episode_id": call.episode_id, "split": call.split}
    fields["turns"] = [
        {
            "id": turn.id,
            "parent": turn.parent,
            "forked": turn.forked_from.reason if turn.forked_from else None,
            "sampled_tokens": len(turn.completion),
            "finish_reason": turn.completion.finish_reason,
            "constrained": turn.constrained,
        }
        for turn in call.turns
    ]
    return fields


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _masked(line: str) -> str:
    return _KEY.sub("ep-***", line)
