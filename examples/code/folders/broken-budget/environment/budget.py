"""Prints what was spent, by category: python3 budget.py FILE"""

import csv
import sys


def main() -> None:
    sums = {}
    with open(sys.argv[1], newline="") as file:
        for row in csv.reader(file):
            category, cents = row[1:]
            sums[category] = sums.get(category, 0) + abs(int(cents))
    for category, cents in sorted(sums.items(), key=lambda item: item[1], reverse=True):
        print(f"{category} {euros(cents)}")
    print(f"total {euros(sum(sums.values()))}")


def euros(cents: int) -> str:
    return f"{cents // 100}.{cents % 100}"


main()
