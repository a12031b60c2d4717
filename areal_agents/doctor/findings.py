"""Finds what prevents or impairs training, each with its fix. The worst finding determines the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import yaml

from areal_agents.doctor.changing_text import rules_of
from areal_agents.doctor.constraints import lifting
from areal_agents.doctor.facts import is_trained
from areal_agents.doctor.observed import Observed
from areal_agents.doctor.report import Branch, ChangingText, Facts, Finding, Refusal, Severity
from areal_agents.errors import shown

_USE_COMMAND = (
    "Do not pass base_url and api_key to the client: it reads OPENAI_BASE_URL and OPENAI_API_KEY (or "
    "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, or GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY), which are set "
    "for the command. Or pass their values. Google's client prefers GOOGLE_API_KEY: unset it."
)
_USE_FUNCTION = (
    "Give the client the episode's URL and key: OpenAI(base_url=ep.base_url, api_key=ep.api_key). No "
    "environment variables are set for a function."
)
_VALUES_SHOWN = 3
_FIX_BY_CODE = {
    "unsupported_parameter": "Leave the parameter out, or set it to a supported value (docs/protocol.md).",
    "invalid_value": "Set the field to a value that the message allows.",
    "context_length_exceeded": "Send a shorter prompt, or serve the model with a longer context.",
    "client_closed_request": "Raise the client's timeout: it disconnected before the answer was complete.",
    "not_supported": "Name a server for the model under `proxy.models`.",
    "episode_limit": "Raise the episode's limits.",
    "queue_full": "Make fewer calls at the same time.",
    "invalid_json": "Send a JSON object as the body of the request.",
}


def findings_of(seen: Observed, facts: Facts) -> list[Finding]:
    """Return all findings, the worst first."""
    order: dict[Severity, int] = {"error": 0, "remark": 1, "note": 2}
    return sorted(_all(seen, facts), key=lambda finding: order[finding.severity])


def _all(seen: Observed, facts: Facts) -> Iterator[Finding]:
    if not seen.requests:  # why it failed explains best why it did not call
        yield from _ended(seen, facts)
    yield from _reached(seen, facts)
    yield from _constrained(seen, facts)
    yield from _refusals(seen, facts)
    if seen.requests:
        yield from _ended(seen, facts)
    yield from _episode(seen, facts)
    yield from _changing(facts)
    yield from _branches(facts)
    yield from _training(seen, facts)
    yield from _fields(facts)
    yield from _outside(seen, facts)


def _reached(seen: Observed, facts: Facts) -> Iterator[Finding]:
    if seen.requests:
        return
    where = [f"{host.host} ({host.where})" for host in facts.hosts]
    named = f" Its source or environment names {', '.join(where)}." if where else ""
    how = _USE_COMMAND if seen.is_command else _USE_FUNCTION
    yield Finding("error", f"The agent never called the proxy.{named}", how)


def _ended(seen: Observed, facts: Facts) -> Iterator[Finding]:
    if seen.overran:
        yield Finding(
            "remark" if facts.turns else "error",
            f"The agent did not end within {seen.timeout_s:g} s and was stopped.",
            "Raise --timeout, or give a --task that it can finish; in training, such an episode is "
            "truncated.",
        )
    elif seen.error is not None and not _made_no_call(seen.error):
        when = "" if facts.calls else " before any call"
        what = f"The agent failed{when}: {seen.error}"
        task = (
            ""
            if facts.calls
            else f" Its task was {shown(dict(seen.given.task.input))}; give another with --task."
        )
        yield Finding("error", what, f"Fix this error first.{task}")


def _refusals(seen: Observed, facts: Facts) -> Iterator[Finding]:
    is_fatal = not facts.turns or seen.error is not None
    for refusal in facts.refused:
        times = f" ({refusal.count} times)" if refusal.count > 1 else ""
        what = f"{refusal.endpoint} was refused with {refusal.status}{times}: {refusal.message}"
        yield Finding("error" if is_fatal else "remark", what, _fix_of(refusal, seen))


def _fix_of(refusal: Refusal, seen: Observed) -> str:
    if refusal.code == "no_such_endpoint":
        return _fix_of_path(refusal.endpoint)
    if refusal.status in (401, 403) and refusal.code != "episode_limit":
        return _USE_COMMAND if seen.is_command else _USE_FUNCTION
    if refusal.status >= 500 and refusal.code not in _FIX_BY_CODE:
        return "Check the engine and the proxy's log."
    return _FIX_BY_CODE.get(refusal.code, "Change the request as the message says.")


def _fix_of_path(path: str) -> str:
    if "/v1/v1/" in path:
        return (
            "The base_url ends with /v1 and the client adds /v1 again; Anthropic clients need it without /v1."
        )
    if "/v1/v1beta/" in path:
        return (
            "The base_url ends with /v1 and the client adds a version; Google's clients need it without /v1."
        )
    if f"/v1{path}" in ("/v1/chat/completions", "/v1/responses", "/v1/completions"):
        return "Add /v1 to the client's base_url."
    if path == "/messages":
        return "Anthropic clients add /v1/messages to the base_url themselves; check the base_url."
    return "The proxy has no such endpoint (docs/protocol.md); send the request elsewhere, or do not send it."


def _episode(seen: Observed, facts: Facts) -> Iterator[Finding]:
    how = _USE_COMMAND if seen.is_command else _USE_FUNCTION
    if facts.episode == "implicit":
        what = "The calls did not carry the episode's key, so the proxy opened another episode for them."
        yield Finding("error", what, how)
    elif facts.episode == "both":
        yield Finding("remark", "Some calls did not carry the episode's key; they are not trained.", how)
    elif facts.calls and not facts.turns and not facts.refused:
        yield Finding("error", "No call was answered by the policy.", how)


def _changing(facts: Facts) -> Iterator[Finding]:
    if texts := facts.changing_texts:
        shown_texts = "; ".join(_changing_text(text) for text in texts)
        turns = sorted({turn for text in texts for turn in text.turns})
        yield Finding(
            "remark",
            f"This text differs at every call: {shown_texts}. Therefore new branches begin at turn "
            f"{', '.join(map(str, turns))}.",
            "Keep earlier messages as they were. If the agent cannot, and the model does not need the new "
            "text, add this to the configuration; the model then reads the text as it was at first:",
            yaml.safe_dump(
                {"proxy": {"volatile": rules_of(texts)}}, sort_keys=False, allow_unicode=True, width=10_000
            ),
        )
    if facts.volatile_as_first_seen:
        yield Finding(
            "note",
            f"The agent changed {facts.volatile_as_first_seen} texts that rules of `proxy.volatile` name; "
            "the model read them as they were at first.",
            "Nothing to fix.",
        )


def _changing_text(text: ChangingText) -> str:
    values = ", ".join(shown(value) for value in text.values[:_VALUES_SHOWN])
    more = ", …" if len(text.values) > _VALUES_SHOWN else ""
    return f"{values}{more} (after {shown(text.before)} in message {text.message + 1}, role {text.role})"


def _branches(facts: Facts) -> Iterator[Finding]:
    alike: dict[tuple[str, str], list[Branch]] = {}
    explained = {turn for text in facts.changing_texts for turn in text.turns}
    for fork in facts.forks:
        if fork.turn in explained:
            continue
        alike.setdefault((fork.reason, fork.explanation), []).append(fork)
    for (reason, explanation), forks in alike.items():
        where = ", ".join(f"turn {fork.turn} from message {fork.diverged_at + 1} on" for fork in forks)
        severity: Severity = "note" if forks[0].is_normal else "remark"
        yield Finding(severity, f"A new branch begins at {where} ({reason}). {explanation}", forks[0].fix)


def _constrained(seen: Observed, facts: Facts) -> Iterator[Finding]:
    constrained = sum(turn.constrained for turn in seen.turns)
    if constrained:
        none_left = not any(is_trained(turn) for turn in seen.turns)
        how = lifting(facts.clients, seen.imported)
        yield Finding(
            "error" if none_left else "remark",
            f"{constrained} of {facts.turns} turns were sampled under a grammar (a JSON schema, or a "
            "tool_choice that forces a call). `algorithm.train_constrained` is off by default, so they are "
            "recorded and not trained.",
            f"{how}. Or set `algorithm.train_constrained: true`, whose gradient is biased "
            "(docs/algorithms.md, Constrained turns).",
        )


def _training(seen: Observed, facts: Facts) -> Iterator[Finding]:
    undelivered = sum(bool(turn.discarded) for turn in seen.turns)
    if undelivered:
        yield Finding(
            "remark",
            f"The client disconnected before it received {undelivered} turns; they are not trained.",
            "Raise the client's timeout, or wait for each answer.",
        )
    if facts.turns and seen.error is None and not seen.overran and not facts.rewarded:
        give = (
            "call Episode.from_environment().reward(value), or POST it to "
            "/episodes/$AREAL_AGENTS_EPISODE_ID/reward with the episode's key, or name a reward function "
            "(reward: file.py:function)"
            if seen.is_command
            else "return a number, call ep.reward(...), or name a function apart from the agent with --reward"
        )
        severity: Severity = "note" if seen.is_command else "error"  # a command's may be posted later
        yield Finding(severity, "The agent gave no reward.", f"Training needs one: {give}.")


def _fields(facts: Facts) -> Iterator[Finding]:
    if facts.ignored_fields:
        names = ", ".join(sorted(facts.ignored_fields))
        yield Finding(
            "note",
            f"These request fields have no effect: {names}.",
            "Nothing to fix, unless the agent relies on them.",
        )
    if facts.overridden:
        names = ", ".join(sorted(facts.overridden))
        yield Finding(
            "note",
            f"In training, the proxy sets these parameters: {names}.",
            "Nothing to fix. `proxy.lifted_pins` leaves one to the agent, whose turns are then not trained.",
        )
    if facts.retries:
        yield Finding(
            "remark",
            f"{facts.retries} calls were retries; {facts.repeated} of them got an earlier sample.",
            "Raise the client's timeout above the duration of a slow call, and check the refused calls.",
        )


def _outside(seen: Observed, facts: Facts) -> Iterator[Finding]:
    if seen.http_proxy is not None:
        yield Finding(
            "remark",
            f"{seen.http_proxy.where} sends HTTP through {seen.http_proxy.host}, also to this machine.",
            "Set NO_PROXY=localhost,127.0.0.1 (and the proxy's host).",
        )
    if seen.requests and facts.hosts:
        hosts = Counter(host.host for host in facts.hosts)
        where = ", ".join(f"{host.host} ({host.where})" for host in facts.hosts)
        yield Finding(
            "note",
            f"The agent names {len(hosts)} outside {'host' if len(hosts) == 1 else 'hosts'}: {where}.",
            "Nothing to fix, unless a model is called there: such calls are not recorded.",
        )
    for telemetry in facts.telemetry:
        yield Finding(
            "remark",
            f"{telemetry.framework} {telemetry.what}.",
            f"Set {telemetry.variable}={telemetry.value}.",
        )


def _made_no_call(error: str) -> bool:
    """Whether a rollout reports that the agent made no call; other findings say why."""
    return error.startswith("the agent made no model call")
