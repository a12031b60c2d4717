"""What the policy sees: the instructions, the problem, and what a wrong answer is answered with.

agent.py and make_model.py share these texts, so the starting policy is trained on exactly the conversations
that the agent holds.
"""

from __future__ import annotations

SYSTEM_PROMPT = "Solve the problem. Show the steps, and put the answer into \\boxed{}."
SECOND_CHANCE = "That is wrong. Find the mistake and answer again."


def opening(question: str) -> list[dict[str, str]]:
    """The messages that an episode starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
