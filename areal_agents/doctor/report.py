"""The doctor's report as data: the facts of one episode, the findings, and the verdict."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.doctor.surroundings import Host, Telemetry

Severity = Literal["error", "remark", "note"]
Verdict = Literal["ok", "remarks", "cannot"]
WORDS: dict[Verdict, str] = {
    "ok": "ok: it can be trained as it is",
    "remarks": "it works, with remarks",
    "cannot": "it cannot be trained like this",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the user should know. An error keeps the agent from being trained; a note asks for
    nothing. `fix` says what to do."""

    severity: Severity
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A turn that could not continue from recorded tokens.

    Attributes:
        turn: its number among the turns, from 1.
        is_normal: whether it needs no fix.
        diverged_at: index of the first message that is not shared.
    """

    turn: int
    reason: str
    explanation: str
    fix: str
    is_normal: bool
    diverged_at: int
    label: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Requests that were answered with an error, `count` alike."""

    endpoint: str
    status: int
    code: str
    message: str
    count: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen.

    Attributes:
        endpoints: model calls by endpoint.
        clients: User-Agents.
        reused_share: of the prompt tokens after the first turn, those that are recorded ids; None if there
            was one turn or none.
        trained_share: of the sampled tokens, those that training would use; None if there are none.
        episode: whether calls came with the episode's key or url ("given"), without ("implicit"), or both.
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
    prompt_tokens: int
    reused_share: float | None
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
    """The whole examination."""

    agent: str
    model: str
    engine: str
    agent_error: str | None
    facts: Facts
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """The worst finding decides."""
        severities = {finding.severity for finding in self.findings}
        return "cannot" if "error" in severities else "remarks" if "remark" in severities else "ok"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"verdict": self.verdict, **dataclasses.asdict(self)}
