"""The doctor's report as data: the facts of one episode, the findings, and the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.doctor.surroundings import Host, Telemetry

Severity = Literal["error", "remark", "note"]
Verdict = Literal["ok", "remarks", "cannot"]
WORDS: dict[Verdict, str] = {
    "ok": "ok: the agent can be trained as it is",
    "remarks": "the agent can be trained, with remarks",
    "cannot": "the agent cannot be trained like this",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the user should know, with its fix.

    An error prevents training, a remark impairs it, and a note needs no action. `yaml` is for the
    configuration, if that is the fix.
    """

    severity: Severity
    what: str
    fix: str
    yaml: str = ""


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict, which the worst finding determines."""
    severities = {finding.severity for finding in findings}
    return "cannot" if "error" in severities else "remarks" if "remark" in severities else "ok"


@dataclass(frozen=True, slots=True)
class Branch:
    """A turn that could not continue recorded tokens.

    Attributes:
        turn: the number of the turn, from 1.
        is_normal: whether there is nothing to fix.
        diverged_at: the index of the first message that is not shared.
    """

    turn: int
    reason: str
    explanation: str
    fix: str
    is_normal: bool
    diverged_at: int
    label: str


@dataclass(frozen=True, slots=True)
class ChangingText:
    """Text that the agent changed in earlier messages, so that turns began new branches.

    Attributes:
        role: the role of the message.
        message: the index of the message.
        before: the text before it, on the same line.
        values: the different values, in the order of the calls.
        turns: the numbers of the turns, from 1.
        name: a name for the rule.
        pattern: the pattern of a rule of `proxy.volatile` that names it.
    """

    role: str
    message: int
    before: str
    values: list[str]
    turns: list[int]
    name: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """`count` requests that were answered with the same error."""

    endpoint: str
    status: int
    code: str
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one episode.

    Attributes:
        endpoints: the number of model calls by endpoint.
        clients: the User-Agents of the requests.
        reused_share: the share of the prompt tokens after the first turn that are recorded ids; None if there
            is at most one turn.
        exact_share: the share of the tokens that calls repeat from earlier turns that are recorded ids; 1 if
            every call continues a turn or begins a conversation. None if no call repeats an earlier turn.
        trained_share: the share of the sampled tokens that training would use; None if there are none.
        changing_texts: texts that the agent changed in earlier messages, which rules can name.
        volatile_as_first_seen: the number of such texts that rules named, so that no branch began.
        episode: whether calls carried the episode's key or URL ("given"), did not ("implicit"), or both.
    """

    endpoints: dict[str, int]
    dialects: list[str]
    clients: list[str]
    calls: int
    streamed: int
    turns: int
    roots: int
    branches: int
    forks: list[Branch]
    changing_texts: list[ChangingText]
    volatile_as_first_seen: int
    prompt_tokens: int
    reused_share: float | None
    exact_share: float | None
    sampled_tokens: int
    trained_share: float | None
    retries: int
    repeated: int
    ignored_fields: dict[str, int]
    overridden: dict[str, int]
    labels: dict[str, int]
    refused: list[Refusal]
    hosts: list[Host]
    telemetry: list[Telemetry]
    episode: Literal["given", "implicit", "both", "none"]
    rewarded: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The complete report."""

    agent: str
    model: str
    engine: str
    agent_error: str | None
    facts: Facts
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """See `verdict_of`."""
        return verdict_of(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {"verdict": self.verdict, **dataclasses.asdict(self)}
