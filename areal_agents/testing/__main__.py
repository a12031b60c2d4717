"""`python -m areal_agents.testing` runs a scripted engine in a process of its own, for benchmarks.

It answers every call with the same tokens, says on standard output where it serves, and ends on SIGTERM or
when standard input closes, which it does when the parent dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from areal_agents.errors import ArealAgentsError
from areal_agents.testing.app import ScriptedApp
from areal_agents.testing.script import filler
from areal_agents.testing.server import ANNOUNCEMENT, build_server, listen, url_of
from areal_agents.testing.tokenizer import read_tokenizer


def main() -> None:
    """Serve until told to end."""
    options = _options()
    tokenizer, stop_token_id = read_tokenizer(options.model)
    script = filler(
        options.reply_tokens,
        tokenizer,
        stop_token_id=stop_token_id,
        delay_s=options.delay_ms / 1000,
        chunk_delay_s=options.chunk_delay_ms / 1000,
        chunk_tokens=options.chunk_tokens,
    )
    app = ScriptedApp(
        tokenizer,
        script,
        stop_token_id=stop_token_id,
        model_path=options.model,
        context_length=options.context_length,
        incremental=options.incremental,
        keep=0,
        with_text=False,
    )
    server = build_server(app)

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn raises a signal again when it has shut down for it; that must not end the process a second way.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with listen(options.host, options.port) as listener:
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
        print(ANNOUNCEMENT + url_of(listener), flush=True)
        server.run(sockets=[listener])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m areal_agents.testing", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder whose tokenizer is used")
    parser.add_argument("--reply-tokens", type=int, default=300, help="tokens of every reply, stop included")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--context-length", type=int, default=262_144, help="most tokens of one sequence")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="before the first token")
    parser.add_argument("--chunk-delay-ms", type=float, default=0.0, help="before every further chunk")
    parser.add_argument("--chunk-tokens", type=int, default=1, help="tokens that are streamed together")
    parser.add_argument("--incremental", action="store_true", help="stream only what is new in each chunk")
    return parser.parse_args()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    try:
        main()
    except (ArealAgentsError, ValueError) as error:
        sys.exit(f"error: {error}")
