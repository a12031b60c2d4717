"""Prints a report: the facts in a table, then the findings with their fixes, and the verdict last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from areal_agents.doctor.report import WORDS, Facts, Finding, Report, Severity, Verdict

_STYLES: Mapping[Severity, str] = {"error": "bold red", "remark": "yellow", "note": "dim"}
_VERDICT_STYLES = {"ok": "bold green", "remarks": "bold yellow", "cannot": "bold red"}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(report):
        table.add_row(name, escape(value))
    console.print(table)
    show_findings(report.findings, report.verdict, WORDS, console)


def show_findings(
    findings: Sequence[Finding], verdict: Verdict, words: Mapping[Verdict, str], console: Console
) -> None:
    """Print findings with their fixes, and the verdict in these words."""
    for finding in findings:
        style = _STYLES[finding.severity]
        console.print(f"\n[{style}]{finding.severity}[/]  {escape(finding.what)}", highlight=False)
        console.print(f"        → {escape(finding.fix)}", highlight=False)
        if finding.yaml:
            console.print(finding.yaml.rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nverdict: [{_VERDICT_STYLES[verdict]}]{words[verdict]}[/]", highlight=False)


def _rows(report: Report) -> list[tuple[str, str]]:
    facts = report.facts
    return [
        ("agent", report.agent),
        ("model", f"{report.model}, with answers from {_engine(report)}"),
        ("episode", _EPISODES[facts.episode]),
        ("calls", _calls(facts)),
        ("clients", ", ".join(facts.clients) or "none"),
        ("turns", f"{facts.turns} in {_count(facts.branches, 'branch', 'branches')}{_forks(facts)}"),
        (
            "reused",
            f"{_share(facts.reused_share)} of the prompt tokens after the first turn are recorded tokens",
        ),
        ("trained", f"{_share(facts.trained_share)} of {facts.sampled_tokens} sampled tokens"),
        ("ignored", _counted(facts.ignored_fields)),
        ("overridden", _counted(facts.overridden)),
        ("refused", f"{sum(refusal.count for refusal in facts.refused)}, retries {facts.retries}"),
        ("outside", ", ".join(f"{host.host} ({host.where})" for host in facts.hosts) or "none found"),
    ]


_EPISODES = {
    "given": "all calls carried its key",
    "implicit": "no call carried its key",
    "both": "only some calls carried its key",
    "none": "no call reached an episode",
}


def _engine(report: Report) -> str:
    return "a script" if report.engine == "scripted" else report.engine


def _calls(facts: Facts) -> str:
    if not facts.calls:
        return "0"
    each = ", ".join(f"{count} × {endpoint}" for endpoint, count in facts.endpoints.items())
    return f"{each}, {facts.streamed} streamed"


def _forks(facts: Facts) -> str:
    if not facts.forks:
        return ""
    return "; forked: " + ", ".join(f"turn {fork.turn} ({fork.reason})" for fork in facts.forks)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count}×)" for name, count in sorted(names.items())) or "none"
