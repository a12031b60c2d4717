"""Structured answers with Instructor: one call for each question, answered by an object of a class.

python agent.py "Do I need an umbrella in Zürich?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import instructor
from pydantic import BaseModel


class Advice(BaseModel):
    """What the traveller is told."""

    umbrella: bool
    why: str


def run(questions: Sequence[str], *, mode: Literal["TOOLS", "JSON_SCHEMA", "MD_JSON"] = "TOOLS") -> str:
    """Ask each question by itself; the last answer."""
    client = instructor.from_provider("openai/policy", mode=instructor.Mode[mode])
    answer = ""
    for question in questions:
        messages = [{"role": "user", "content": question}]
        answer = str(client.chat.completions.create(response_model=Advice, messages=messages))
    return answer


if __name__ == "__main__":
    print(run(sys.argv[1:]))
