"""What the scripted model says to an agent, and what the agent must answer.

The replies are awkward on purpose: odd whitespace, escapes, 2.0, keys in another order, calls side by side,
padded content. An agent that continues the recorded tokens keeps all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from areal_agents.testing import Script, ScriptedCall, ScriptedReply


@dataclass(frozen=True)
class Conversation:
    """Questions for an agent, and the model's side of it.

    Attributes:
        questions: asked one after the other, in one conversation.
        replies: the model's replies, call by call; or a function that returns a script, if calls run at the
            same time.
        answer: what the agent must return.
    """

    questions: tuple[str, ...]
    replies: Sequence[str | ScriptedReply] | Callable[[], Script]
    answer: str

    def script(self) -> Script:
        """Return a fresh script of the replies; it refuses a call beyond the last one."""
        return self.replies() if callable(self.replies) else in_order(self.replies)


def thought(text: str) -> str:
    """Return reasoning in Qwen's markup."""
    return f"<think>\n{text}\n</think>\n\n"


def call(name: str, arguments: str) -> str:
    """Return a tool call in Qwen's markup. `arguments` stay as they are, so that they may look odd."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def in_order(replies: Sequence[str | ScriptedReply]) -> Script:
    """Return a script that gives the replies one after the other, and refuses a call beyond the last."""
    rest = iter(replies)

    def script(call: ScriptedCall) -> str | ScriptedReply:
        return next(rest, _refused(f"unexpected call: {call.last_text!r}"))

    return script


def by_conversation(conversations: Mapping[str, Sequence[str]]) -> Script:
    """Return a script for calls that run at the same time: it gives the next reply of the first conversation
    whose opening occurs in the prompt."""
    rest = {opening: iter(replies) for opening, replies in conversations.items()}

    def script(call: ScriptedCall) -> str | ScriptedReply:
        for opening, replies in rest.items():
            if opening in call.prompt_text:
                return next(replies, _refused(f"unexpected call: {call.last_text!r}"))
        return _refused(f"unknown conversation: {call.prompt_text!r}")

    return script


def _refused(why: str) -> ScriptedReply:
    return ScriptedReply(error=why, error_status=400)


QUESTIONS = ("Do I need an umbrella in Zürich or in Tokyo?", "And in Bern?")
LOOKED_UP = (
    thought("I have to look it up.") + call("weather", r'{"days":  2.0,   "city" : "Z\u00fcrich"}'),
    thought("Now the others.")
    + "Two more.\n"
    + call("weather", '{ "days":3,"city":"東京" }')
    + "\n"
    + call("weather", '{"city": "Gen\\u00e8ve \\"Cornavin\\"",\n "days": 1.0}'),
)
WEATHER = Conversation(
    QUESTIONS,
    (
        *LOOKED_UP,
        thought("Rain everywhere.") + "\n  Yes: take one. ☂  \n\n",
        thought("Bern, then.") + call("weather", '{"city":"Bern","days":1}'),
        thought("Rain.") + "Yes, again.",
    ),
    "Yes, again.",
)

# Pydantic AI has the model call a tool of its own, `final_result`, for an answer of a declared type.
STRUCTURED = Conversation(
    QUESTIONS,
    (
        *LOOKED_UP,
        thought("Done.") + call("final_result", '{"why" : "rain in Z\\u00fcrich",  "umbrella":true}'),
        thought("Bern.") + call("final_result", '{"umbrella": false, "why": "sunny"}'),
    ),
    "umbrella=False why='sunny'",
)

# A sub-agent as a tool, whose conversation is a root of its own; then a handoff, which is another.
TRAVEL = Conversation(
    ("Do I need an umbrella in Zürich?", "Book the Bellevue."),
    (
        thought("The forecaster knows.") + call("ask_forecaster", '{"input" :  "Z\\u00fcrich, two days?"}'),
        thought("Look.") + call("weather", '{"days": 2.0, "city": "Zürich"}'),
        "It rains.",
        "Take an umbrella.",
        call("transfer_to_clerk", "{}"),
        thought("Book it.") + call("book", '{  "hotel":"Bellevue"}'),
        "Booked.",
    ),
    "Booked.",
)


def _two_forecasts() -> Script:
    asks = "\n".join(call("ask_forecaster", f'{{"input": "forecast: {city}"}}') for city in ("Bern", "Genf"))
    return by_conversation(
        {
            "umbrella anywhere": [asks, "Nowhere."],
            "forecast: Bern": [call("weather", '{"city":"Bern",  "days": 1}'), "Bern: rain."],
            "forecast: Genf": [thought("Hm.") + call("weather", '{"days":1.0,"city":"Genf"}'), "Genf: rain."],
        }
    )


# Two sub-agents at the same time: whichever calls first, each continues its own conversation.
PARALLEL = Conversation(("Do I need an umbrella anywhere?",), _two_forecasts, "Nowhere.")
