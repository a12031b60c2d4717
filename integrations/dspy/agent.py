"""A weather agent on DSPy: the ReAct module with one tool, and a history of questions and answers.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import dspy


class Advice(dspy.Signature):
    """You are a weather assistant. Look the forecast up before you answer."""

    history: dspy.History = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def weather(city: str, days: float) -> str:
    """The forecast of a city."""
    return f"{city}, next {days:g} days: rain"


def run(questions: Sequence[str]) -> str:
    """Ask one question after the other in one conversation; the last answer."""
    dspy.configure(lm=dspy.LM("openai/policy", cache=False))
    agent = dspy.ReAct(Advice, tools=[weather])
    history = dspy.History(messages=[])
    answer = ""
    for question in questions:
        answer = agent(question=question, history=history).answer
        history.messages.append({"question": question, "answer": answer})
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
