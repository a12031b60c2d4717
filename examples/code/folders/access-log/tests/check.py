"""Exits with 0 if /app/report.txt is right. The log beside this file is a copy that the agent never sees."""

from collections import Counter
from pathlib import Path

errors: Counter[str] = Counter()
sent: Counter[str] = Counter()
for line in (Path(__file__).parent / "access.log").read_text().splitlines():
    _, client, _, status, size = line.split(" ")
    errors[client] += int(status) >= 500
    sent[client] += int(size)
wanted = [
    f"{client} {errors[client]} {sent[client]}"
    for client in sorted(errors, key=lambda client: (-errors[client], client))
    if errors[client]
]
try:
    given = Path("report.txt").read_text().strip().splitlines()
except (OSError, UnicodeDecodeError):
    given = []
raise SystemExit([line.rstrip() for line in given] != wanted)
