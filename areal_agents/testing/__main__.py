"""Runs a scripted engine that answers every call with the same tokens, for benchmarks.

It prints its URL on standard output, and exits on SIGTERM or when standard input closes, which happens when
the parent process dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from areal_agents.errors import ArealAgentsError
from areal_agents.sockets import listen, url_of
from areal_agents.testing.app import ScriptedApp
from areal_agents.testing.script import filler
from areal_agents.testing.server import ANNOUNCEMENT, build_server
from areal_agents.testing.tokenizer import read_tokenizer


def main() -> None:
    """Serve until SIGTERM, Ctrl-C, or the end of standard input."""
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
        ignores_interval=options.ignore_stream_interval,
        keep=0,
        with_text=False,
    )
    server = build_server(app)

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    # After shutting down, uvicorn raises the signal again, which must not kill the process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with listen(options.host, options.port) as listener:
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
        print(ANNOUNCEMENT + url_of(listener), flush=True)
        server.run(sockets=[listener])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m areal_agents.testing", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder whose tokenizer is used")
    parser.add_argument(
        "--reply-tokens",
        type=int,
        default=300,
        help="length of each reply in tokens, including the stop token",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--context-length", type=int, default=262_144, help="maximum tokens of a prompt with its reply"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay before the first token")
    parser.add_argument("--chunk-delay-ms", type=float, default=0.0, help="delay before each further chunk")
    parser.add_argument("--chunk-tokens", type=int, default=1, help="number of tokens in a streamed chunk")
    parser.add_argument("--incremental", action="store_true", help="stream only the new tokens in each chunk")
    parser.add_argument(
        "--ignore-stream-interval", action="store_true", help="send each chunk, whatever stream_interval says"
    )
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
