"""The recorded turns with which a forked episode begins.

A forked episode repeats the calls of another one: a request that a turn before the fork answered gets the
recorded reply, and the request of the fork itself is sampled from the recorded prompt, token for token. Until
then every other request is refused, because it is not the recorded agent in the recorded environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, first_difference
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.prompts import Prompts
from areal_agents.proxy.calls.request import ModelRequest

_SHOWN = 120  # characters of a message that differs
_REMEDY = "; an agent whose tools give other results takes the recorded ones from ep.recorded_result(call.id)"


class RecordedStart:
    """What one forked episode repeats. It is used on the event loop only.

    Attributes:
        resampled: the turn that is sampled again; the store of the fork does not have it.
        has_resumed: whether its call has begun.
        repeated: number of recorded replies that were given again.
        difference: how the first refused request differs from the recorded one; "" if none was refused.
    """

    def __init__(self, turns: Mapping[int, Turn]) -> None:
        """Create a start from turns by their number in the recorded episode; the last is sampled again.

        The other ones must be in the store of the fork, under the ids that they have here.
        """
        *before, self.resampled = turns.values()
        self.has_resumed = False
        self.repeated = 0
        self.difference = ""
        self._numbers = {turn.id: number for number, turn in turns.items()}
        self._forest = Forest(turns.values())
        self._left = [turn.id for turn in before if not turn.discarded]

    def take(self, prompts: Prompts, request: ModelRequest) -> tuple[Turn, ...]:
        """Return the recorded turns that answer a request, one for each choice, and give each only once.

        They are in the order of recording; () if there are too few.
        """
        answers = (turn for turn in prompts.answers(self._forest, request) if turn.id in self._left)
        found = tuple(answers)[: request.choices]
        if len(found) < request.choices:
            return ()
        for turn in found:
            self._left.remove(turn.id)
        self.repeated += len(found)
        return found

    def resume(self, prompts: Prompts, request: ModelRequest) -> Turn:
        """Return the turn that is sampled again, if it answered this request.

        Raise RequestError 409 if not, with what differs from the next recorded request.
        """
        if self.resampled in prompts.answers(self._forest, request):
            self.has_resumed = True
            return self.resampled
        self._refuse(request)

    def ended(self, *, failed: bool) -> None:
        """Note how the call of the fork ended; one that failed is repeated from the same prompt."""
        self.has_resumed = not failed

    def _refuse(self, request: ModelRequest) -> NoReturn:
        awaited = self._forest[self._left[0]] if self._left else self.resampled
        number, last = self._numbers[awaited.id], self._numbers[self.resampled.id]
        what = _how(
            self._forest.history(awaited.id), request, same_tools=awaited.tools_id == request.tools_id
        )
        text = f"the request of turn {number} differs from the recorded one: {what}"
        self.difference = self.difference or text
        raise RequestError(
            f"this episode is forked at turn {last} of another one, but {text}",
            status=409,
            code="fork_differs",
        )


def _how(recorded: tuple[Message, ...], request: ModelRequest, *, same_tools: bool) -> str:
    index = first_difference(recorded, request.messages)
    if index is None:
        return "the number of choices (n)" if same_tools else "the tools that it offers"
    then, now = (_shown(messages, index) for messages in (recorded, request.messages))
    is_result = index < len(recorded) and recorded[index].role == "tool"
    return f"message {index + 1} was {then}, and is {now}" + (_REMEDY if is_result else "")


def _shown(messages: tuple[Message, ...], index: int) -> str:
    if index >= len(messages):
        return "not there"
    message = messages[index]
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    text = " ".join([message.content, *calls]).strip()
    return f"{message.role} {text[:_SHOWN] + (' …' if len(text) > _SHOWN else '')!r}"
