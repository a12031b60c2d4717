"""Agents that answer a problem of mathematics in one call.

`python agent.py "What is 7 times 8?"` asks the model behind OPENAI_BASE_URL; `areal-agents train config.yaml`
trains that model.
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from areal_agents import Episode, episode
from areal_agents.rewards import MathChecks

HTTP = DefaultAsyncHttpxClient(timeout=3600)  # one for all episodes; a long answer takes minutes
CHECKS = MathChecks(processes=2, time_s=5.0)

INSTRUCTION = "Solve the problem. Show the steps, and put the answer into \\boxed{}."
FORMAT_REWARD = 0.1

# The template of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), for a base model, which knows no chat format.
ZERO_TEMPLATE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with the "
    "answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> "
    "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
    "User: {question}\nAssistant: <think>"
)


@episode
async def solver(task: dict, ep: Episode) -> float:
    """1.0 if the answer in the box is right, and worked out if it is a whole number, else 0.0."""
    reply = await solve(_client(ep), task["question"])
    return await is_right(reply, task["answer"], worked_out=True)


@episode
async def solver_top_p(task: dict, ep: Episode) -> float:
    """The same agent for evaluation: at top_p 0.95, and with answers compared as published ones are.

    In training top_p is pinned to 1, and a calculation such as 48/2+48 earns nothing.
    """
    reply = await solve(_client(ep), task["question"], top_p=0.95)
    return await is_right(reply, task["answer"])


@episode
async def zero(task: dict, ep: Episode) -> dict[str, float]:
    """A base model continues a text. The form of the template earns FORMAT_REWARD, a right answer 1.0."""
    response = await _client(ep).completions.create(
        model="policy", prompt=ZERO_TEMPLATE.format(question=task["question"])
    )
    text = response.choices[0].text
    answer = answer_of(text)
    return {
        "format": FORMAT_REWARD * has_form(text),
        "correct": 0.0 if answer is None else await is_right(answer, task["answer"], worked_out=True),
    }


async def solve(client: AsyncOpenAI, question: str, *, top_p: float = 1.0) -> str:
    """The reply of the model to a problem."""
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    response = await client.chat.completions.create(model="policy", messages=messages, top_p=top_p)
    return response.choices[0].message.content or ""


def answer_of(text: str) -> str | None:
    """What stands in the first pair of answer tags; None if there is none."""
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    return answer if closed else None


def has_form(text: str) -> bool:
    """Whether a text is "reasoning</think> <answer>answer</answer>", and ends there."""
    reasoning, _, rest = text.partition("</think>")
    between, opened, rest = rest.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    has_tags = bool(opened and closed) and not any(tag in reasoning + answer for tag in tags)
    return has_tags and not between.strip() and not after.strip()


async def is_right(reply: str, answer: str, *, worked_out: bool = False) -> float:
    """1.0 if the reply has the answer, else 0.0; compared in a process that is killed if it hangs."""
    return float(await asyncio.to_thread(CHECKS.equal, reply, str(answer), worked_out=worked_out))


def _client(ep: Episode) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)


if __name__ == "__main__":
    print(asyncio.run(solve(AsyncOpenAI(), " ".join(sys.argv[1:]))))
