"""Every integration: what its model says, what it must answer, and which turns must be recorded.

A new one is a folder under integrations/ and an entry here. The replies are awkward on purpose: odd
whitespace, escapes, 2.0, keys in another order, calls side by side, padded content.
"""

from __future__ import annotations

from typing import Any

from integration_support import Case, call, thought

from areal_agents.testing import Script, ScriptedCall, ScriptedReply

ANTHROPIC = {"anthropic_sdk"}  # folders whose clients want the base_url without /v1
QUESTIONS = ("Do I need an umbrella in Zürich or in Tokyo?", "And in Bern?")
WEATHER = (
    thought("I have to look it up.") + call("weather", r'{"days":  2.0,   "city" : "Z\u00fcrich"}'),
    thought("Now the others.")
    + "Two more.\n"
    + call("weather", '{ "days":3,"city":"東京" }')
    + "\n"
    + call("weather", '{"city": "Gen\\u00e8ve \\"Cornavin\\"",\n "days": 1.0}'),
    thought("Rain everywhere.") + "\n  Yes: take one. ☂  \n\n",
    thought("Bern, then.") + call("weather", '{"city":"Bern","days":1}'),
    thought("Rain.") + "Yes, again.",
)
# The second question makes the template drop the reasoning before it, so a root begins there.
STRIPS = "template strips reasoning"
WEATHER_TURNS = (None, 0, 1, STRIPS, 3)


def weather_case(folder: str, **options: Any) -> Case:
    """The weather conversation, whatever the framework."""
    return Case(folder, WEATHER, "Yes, again.", WEATHER_TURNS, QUESTIONS, options)


def structured_case(**options: Any) -> Case:
    """Pydantic AI has the model call a tool of its own, `final_result`, for an answer of a declared type."""
    final = call("final_result", '{"why" : "rain in Z\\u00fcrich",  "umbrella":true}')
    again = call("final_result", '{"umbrella": false, "why": "sunny"}')
    replies = (*WEATHER[:2], thought("Done.") + final, thought("Bern.") + again)
    answer = "umbrella=False why='sunny'"
    turns = (None, 0, 1, STRIPS)
    return Case("pydantic_ai", replies, answer, turns, QUESTIONS, options, name="structured", reused=0.4)


def travel_case(**options: Any) -> Case:
    """A sub-agent as a tool, whose conversation is a root of its own; then a handoff, which is another."""
    replies = (
        thought("The forecaster knows.") + call("ask_forecaster", '{"input" :  "Z\\u00fcrich, two days?"}'),
        thought("Look.") + call("weather", '{"days": 2.0, "city": "Zürich"}'),
        "It rains.",
        "Take an umbrella.",
        call("transfer_to_clerk", "{}"),
        thought("Book it.") + call("book", '{  "hotel":"Bellevue"}'),
        "Booked.",
    )
    questions = ("Do I need an umbrella in Zürich?", "Book the Bellevue.")
    turns = (None, "new conversation", 1, 0, STRIPS, "edited", 5)
    return Case("openai_agents", replies, "Booked.", turns, questions, options, name="travel", reused=0.4)


def parallel_case(**options: Any) -> Case:
    """Two sub-agents at the same time: whichever calls first, each continues its own conversation."""
    asks = "\n".join(call("ask_forecaster", f'{{"input": "forecast: {city}"}}') for city in ("Bern", "Genf"))
    turns = (None, "new conversation", 1, "new conversation", 3, 0)
    script = by_conversation(
        {
            "umbrella anywhere": [asks, "Nowhere."],
            "forecast: Bern": [call("weather", '{"city":"Bern",  "days": 1}'), "Bern: rain."],
            "forecast: Genf": [thought("Hm.") + call("weather", '{"days":1.0,"city":"Genf"}'), "Genf: rain."],
        }
    )
    questions = ("Do I need an umbrella anywhere?",)
    return Case("openai_agents", script, "Nowhere.", turns, questions, options, name="parallel")


def by_conversation(conversations: dict[str, list[str]]) -> Script:
    """For calls that run at the same time: the next reply of the first conversation whose opening occurs in
    the prompt."""
    rest = {opening: iter(replies) for opening, replies in conversations.items()}

    def script(call: ScriptedCall) -> str | ScriptedReply:
        for opening, replies in rest.items():
            if opening in call.prompt_text:
                return next(
                    replies, ScriptedReply(error=f"unexpected call: {call.last_text!r}", error_status=400)
                )
        return ScriptedReply(error=f"unknown conversation: {call.prompt_text!r}", error_status=400)

    return script


CASES = [
    weather_case("openai_sdk"),
    weather_case("openai_sdk", stream=True),
    weather_case("openai_sdk", api="responses"),
    weather_case("openai_sdk", api="responses", stream=True),
    weather_case("openai_sdk", api="previous_response"),
    weather_case("anthropic_sdk"),
    weather_case("anthropic_sdk", stream=True),
    travel_case(),
    travel_case(stream=True),
    travel_case(api="chat"),
    parallel_case(api="chat"),
    weather_case("langgraph"),
    weather_case("langgraph", stream=True),
    weather_case("langgraph", api="responses"),
    weather_case("pydantic_ai", api="chat", structured=False),
    structured_case(),
    structured_case(api="chat"),
    structured_case(api="chat", stream=True),
]
