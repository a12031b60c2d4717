"""What the policy sees before it answers: the instructions and the problem.

agent.py and make_model.py share these texts and the description of the tool (python_tool.py), so the starting
policy is trained on exactly the conversations that the agent holds.
"""

from __future__ import annotations

INSTRUCTION = "Solve the problem. Compute with python, then put the answer into \\boxed{}."


def opening(question: str) -> list[dict]:
    """The messages that an episode starts with."""
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
