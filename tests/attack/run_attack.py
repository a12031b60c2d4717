"""`make attack`: sends attacks to a real proxy and prints which defences held.

    python tests/attack/run_attack.py --json

The proxy is `areal-agents serve` in a separate process, in front of an engine that responds immediately.
With `--json` the last line is one JSON object with a row per attack. The exit status is 1 if a defence did
not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from attack_support import Neighbour, Row, open_episode, proxy, scripted_engine
from big_support import big
from lying_support import lying
from slow_support import slow
from web_support import forged, web

from areal_agents.rendering.tokenization.tokenizer import Tokenizer
from benchmarks.proxy.qwen_vocabulary import SPECIAL, qwen_folder

KINDS = ("big", "slow", "web", "forged", "lying")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all attacks of the given kinds; return 1 if a defence did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="kinds of attacks to run, by default all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        for row in attacks(folder, options.kind or KINDS):
            rows.append(row)
            show(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = sum(not row.holds for row in rows)
    print(f"the defences held against {len(rows) - failed} of {len(rows)} attacks")
    if options.json:
        print(json.dumps({"failed": failed, "rows": [asdict(row) for row in rows]}, ensure_ascii=False))
    return 1 if failed else 0


def attacks(folder: Path, kinds: Sequence[str], *, one_whole_lie_of: int = 1) -> Iterator[Row]:
    """Yield a row for each attack of these kinds when it completes; see `lying` for `one_whole_lie_of`."""
    model = qwen_folder()
    with scripted_engine(model, reply_tokens=4000) as engine:
        if {"big", "slow"} & set(kinds):
            with (
                proxy(model, engine.url, folder / "keys.db") as server,
                Neighbour(server.url, open_episode(server.url)["key"]) as neighbour,
            ):
                began = time.monotonic()
                time.sleep(2.0)
                p99, longest, failed = neighbour.during(began, time.monotonic())
                yield Row(
                    "calm", "nothing", "", f"p99 {p99:.0f} ms, longest {longest:.0f} ms", holds=not failed
                )
                if "big" in kinds:
                    yield from big(server, neighbour)
                if "slow" in kinds:
                    yield from slow(server, neighbour)
        if {"web", "forged"} & set(kinds):
            with proxy(model, engine.url, folder / "open.db", admin_key=None) as server:
                if "web" in kinds:
                    yield from web(server.url)
                if "forged" in kinds:
                    tokenizer = Tokenizer.from_folder(model)
                    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
                    yield from forged(server.url, ids)
    if "lying" in kinds:
        yield from lying(model, folder, one_whole_of=one_whole_lie_of)


def show(row: Row) -> None:
    """Print one line of the table."""
    print(f"{'held' if row.holds else 'FAILED':6} {row.kind:6} {row.attack}: {row.found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
