"""Prints the share of the cases for which budget.py, run as a program of its own, prints the right lines."""

import subprocess
import tempfile

CASES = [
    (
        "2026-01-01,rent,95000\n2026-01-02,food,2310\n2026-01-05,food,1795\n",
        "rent 950.00\nfood 41.05\ntotal 991.05\n",
    ),
    (
        "2026-02-01,food,305\n2026-02-02,bus,305\n2026-02-02,art,305\n",
        "art 3.05\nbus 3.05\nfood 3.05\ntotal 9.15\n",
    ),
    (
        "2026-03-01,books,1200\n2026-03-02,books,-150\n2026-03-02,bus,1100\n",
        "bus 11.00\nbooks 10.50\ntotal 21.50\n",
    ),
    ("2026-04-01,shop,-205\n2026-04-01,gift,100\n", "gift 1.00\nshop -2.05\ntotal -1.05\n"),
    ('2026-05-01,"food, drinks",7\n', "food, drinks 0.07\ntotal 0.07\n"),
]

passed = 0
for text, wanted in CASES:
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        try:
            done = subprocess.run(
                ["python3", "budget.py", file.name],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=10,
            )
        except subprocess.TimeoutExpired:
            continue
        passed += done.returncode == 0 and done.stdout.split("\n") == wanted.split("\n")
print(passed / len(CASES))
