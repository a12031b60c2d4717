"""What the scripted model says to an agent, and what the agent must answer.

The replies are awkward on purpose: odd whitespace, escapes, 2.0, keys in another order, calls side by side,
padded content. An agent that continues the recorded tokens keeps all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from areal_agents.testing import Script, ScriptedCall, ScriptedReply


@dataclass(frozen=True)
class Conversation:
    """Questions for an agent, and the model's side of it.

    Attributes:
        questions: asked one after the other, in one conversation.
        replies: the model's replies, call by call; or a function that returns a script, if calls run at the
            same time.
        answer: what the agent must return.
        results: parts of the results of tools, which the model must have read by the end. They are ASCII,
            since some agents write results as JSON.
    """

    questions: tuple[str, ...]
    replies: Sequence[str | ScriptedReply] | Callable[[], Script]
    answer: str
    results: tuple[str, ...] = ()

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


RAIN = ("rich, next 2 days: rain", ", next 3 days: rain")
RAIN_TOO = (*RAIN, ", next 1 days: rain", "Bern, next 1 days: rain")
QUESTIONS = ("Do I need an umbrella in Zürich or in Tokyo?", "And in Bern?")


def looked_up(tool: str = "weather") -> tuple[str, str]:
    """Return the replies in which the model looks the first question up, with a tool of this name."""
    return (
        thought("I have to look it up.") + call(tool, r'{"days":  2.0,   "city" : "Z\u00fcrich"}'),
        thought("Now the others.")
        + "Two more.\n"
        + call(tool, '{ "days":3,"city":"東京" }')
        + "\n"
        + call(tool, '{"city": "Gen\\u00e8ve \\"Cornavin\\"",\n "days": 1.0}'),
    )


def weather_talk(tool: str = "weather") -> Conversation:
    """Return the conversation that every agent has that can have one."""
    replies = (
        *looked_up(tool),
        thought("Rain everywhere.") + "\n  Yes: take one. ☂  \n\n",
        thought("Bern, then.") + call(tool, '{"city":"Bern","days":1}'),
        thought("Rain.") + "Yes, again.",
    )
    return Conversation(QUESTIONS, replies, "Yes, again.", RAIN_TOO)


WEATHER = weather_talk()

# Pydantic AI has the model call a tool of its own, `final_result`, for an answer of a declared type.
STRUCTURED = Conversation(
    QUESTIONS,
    (
        *looked_up(),
        thought("Done.") + call("final_result", '{"why" : "rain in Z\\u00fcrich",  "umbrella":true}'),
        thought("Bern.") + call("final_result", '{"umbrella": false, "why": "sunny"}'),
    ),
    "umbrella=False why='sunny'",
    RAIN,
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
    ("rich, next 2 days: rain", "It rains.", "booked: Bellevue"),
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
PARALLEL = Conversation(
    ("Do I need an umbrella anywhere?",), _two_forecasts, "Nowhere.", ("Bern: rain.", "Genf: rain.")
)

# smolagents has the model call a tool of its own, `final_answer`, to answer.
FINAL_ANSWER = Conversation(
    QUESTIONS,
    (
        *looked_up(),
        thought("Rain everywhere.") + call("final_answer", '{"answer" :  "Yes: take one. ☂"}'),
        thought("Bern, then.") + call("weather", '{"city":"Bern","days":1}'),
        thought("Rain.") + call("final_answer", '{"answer":"Yes, again."}'),
    ),
    "Yes, again.",
    RAIN_TOO,
)
# Its agent of code has the model write Python between tags.
CODE = Conversation(
    QUESTIONS,
    (
        'Thought: look it up.\n<code>\nprint(weather(  "Zürich", 2.0))\n</code>',
        'Both.\n<code>\nfor city in ("東京", \'Gen\\u00e8ve "Cornavin"\'):\n    print(weather(city,3))\n'
        "</code>",
        'Thought: rain.\n<code>\nfinal_answer("Yes: take one. ☂")\n</code>',
        'Thought: Bern.\n<code>\nprint(weather(city="Bern",days=1))\n</code>',
        'Thought: rain.\n<code>\nfinal_answer("Yes, again.")\n</code>',
    ),
    "Yes, again.",
    (*RAIN, "Bern, next 1 days: rain"),
)

# Instructor asks once for each answer, which is the arguments of a call, or JSON.
ADVICE = ('{"why" : "rain in Z\\u00fcrich",  "umbrella":true}', '{"umbrella": false, "why": "sunny"}')
EXTRACTED = Conversation(
    QUESTIONS, tuple(call("Advice", text) for text in ADVICE), "umbrella=False why='sunny'"
)
AS_JSON = Conversation(QUESTIONS, ADVICE, "umbrella=False why='sunny'")


def _fields(**texts: str) -> str:
    """Return an answer in the form that DSPy asks for."""
    return (
        "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in texts.items()) + "[[ ## completed ## ]]"
    )


def _step(why: str, tool: str, arguments: str) -> str:
    return _fields(next_thought=why, next_tool_name=tool, next_tool_args=arguments)


# DSPy shows the model everything so far in one message at each step, and then asks for the answer.
REACT = Conversation(
    QUESTIONS,
    (
        _step("Look it up.", "weather", r'{"days":  2.0,   "city" : "Z\u00fcrich"}'),
        _step("Tokyo.", "weather", '{ "days":3,"city":"東京" }'),
        _step("Done.", "finish", "{}"),
        _fields(reasoning="Rain.", answer="Yes: take one. ☂"),
        _step("Bern.", "weather", '{"city":"Bern","days":1}'),
        _step("Done.", "finish", "{}"),
        _fields(reasoning="Rain.", answer="Yes, again."),
    ),
    "Yes, again.",
    (*RAIN, "Bern, next 1 days: rain"),
)

# mini-swe-agent has one task, and the model ends it with a command.
SHELL = Conversation(
    ("Which word is in word.txt?",),
    (
        thought("Write it first.") + call("bash", '{"command" :  "printf \'z\\u00fcrich\' > word.txt"}'),
        thought("Look.")
        + "Two looks.\n"
        + call("bash", '{ "command":"cat word.txt" }')
        + "\n"
        + call("bash", '{"command": "wc -c < word.txt"}'),
        thought("Done.")
        + call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat word.txt"}'),
    ),
    "zürich",
    ("<output>\nz", "<output>\n7"),
)


def shell_talk(tool: str, argument: str, more: str = "") -> Conversation:
    """Return a conversation of an agent with a tool that runs commands.

    Args:
        tool, argument: the names of the tool and of its argument that is the command.
        more: further arguments, as JSON that begins with a comma.
    """

    def run(command: str, before: str = "", after: str = "") -> str:
        return call(tool, f'{{{before}"{argument}" :  "{command}"{more}{after}}}')

    replies = (
        thought("Write it first.") + run("printf 'z\\u00fcrich' > word.txt"),
        thought("Look.")
        + "Two looks.\n"
        + run("cat word.txt", before=" ")
        + "\n"
        + run("wc -c < word.txt; echo $((6*7))", after="\n"),
        thought("Good.") + "The word is zürich.",
    )
    return Conversation(("Which word is in word.txt?",), replies, "The word is zürich.", ("zürich", "42"))


def and_then(talk: Conversation, *calls: str) -> Conversation:
    """Return a conversation with a second question, for which the model calls tools and answers."""
    assert not callable(talk.replies)
    replies = (*talk.replies, thought("Look again.") + "\n".join(calls), "Still the same.\n")
    questions = (*talk.questions, "Is it still there?")
    return replace(talk, questions=questions, replies=replies, answer="Still the same.")


# The program of mini-swe-agent shows results as JSON, other than its default agent.
MINI = replace(SHELL, results=('"output": "z', '"output": "7'))
# For a coding agent with the tools of gemini-cli, in an empty folder.
GEMINI_CLI = Conversation(
    ("Write hello into notes.txt, and tell me what is there.",),
    (
        thought("I write it.") + call("write_file", r'{"content" : "h\u00e9llo",  "file_path":"notes.txt"}'),
        thought("Now I look.")
        + "Two looks.\n"
        + call("read_file", '{"file_path":"notes.txt"}')
        + "\n"
        + call("list_directory", '{\n "dir_path": "."}'),
        thought("Good.") + "notes.txt says héllo.",
    ),
    "notes.txt says héllo.",
    ("Directory listing for", "notes.txt (6 bytes)"),
)


def _browsing(goal: str, action: str) -> str:
    """Return a step of browser-use: JSON with an evaluation, a memory, a goal and actions."""
    return (
        '{"thinking": "Z\\u00fcrich.",  "evaluation_previous_goal":"Success", "memory" : "",\n'
        f' "next_goal":"{goal}", "action": [{action}]}}'
    )


# browser-use shows the model the page and a summary of its own steps in one message at each step.
BROWSING = Conversation(
    ("What does the page say?",),
    (
        _browsing("Look further.", '{"scroll":  {"down": true, "pages" :2.0}}'),
        _browsing("Report.", '{"done": {"text": "Rain in Bern", "success" :true,"files_to_display":[]}}'),
    ),
    "Rain in Bern",
    ("Rain in Bern until noon.", "Scrolled down"),
)
