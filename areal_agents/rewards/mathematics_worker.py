"""The process that compares mathematical answers for `mathematics.py`: one JSON object per line each way.

A comparison that takes too long ends the process, also when its parent has died and can no longer kill it.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from typing import Any

_MEMORY_BYTES = 2 << 30  # of one comparison, such as of 10**10**10
_LATER_S = 1.0  # after the time limit, at which the parent kills the process if it can


def main() -> None:
    """Answer each {"answer", "expected", "worked_out", "time_s"} with {"equal"} or {"error"}.

    It returns when standard input ends.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        _say({"error": f"math_answer needs math-verify ({error}): pip install 'areal-agents[rewards]'"})
        return
    logging.disable(logging.WARNING)  # math-verify warns that it has no time limit of its own, see below
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # The first comparison loads a parser, which can take longer than the time limit of a comparison.
    _compared("$1+1$", "2", False, parse, verify)
    _say({"ready": True})
    for line in sys.stdin:
        pair = json.loads(line)
        # The default action of SIGALRM ends the process in the kernel, so C code cannot hold it up.
        signal.setitimer(signal.ITIMER_REAL, pair["time_s"] + _LATER_S)
        try:
            found = _compared(pair["answer"], pair["expected"], pair["worked_out"], parse, verify)
        except (MemoryError, RecursionError):
            found = {"equal": False}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(found)


def _compared(answer: str, expected: str, worked_out: bool, parse: Any, verify: Any) -> dict[str, Any]:
    # The time limits of math-verify work by a signal, which C code ignores; this process is killed instead.
    wanted = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    if not wanted:
        return {"error": f"math-verify cannot read the expected answer {expected!r:.200}"}
    given = parse(answer, parsing_timeout=None)
    if not given:
        return {"equal": False}
    # The last part is the text of the answer, as math-verify found it in the reply.
    if worked_out and _is_whole(expected) and not _is_one_number(str(given[-1])):
        return {"equal": False}
    return {"equal": bool(verify(wanted, given, timeout_seconds=None))}


def _is_whole(expected: str) -> bool:
    return _without_separators(expected).strip().removeprefix("-").isdecimal()


def _is_one_number(answer: str) -> bool:
    """Return whether an answer, or the text after its last equals sign, has exactly one number."""
    return len(re.findall(r"\d+(?:\.\d+)?", _without_separators(answer).rpartition("=")[2])) == 1


def _without_separators(text: str) -> str:
    return re.sub(r"(?<=\d)(?:,|\{,\}|,?\\!)(?=\d{3}(?!\d))", "", text)  # 1,234 is one number


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
