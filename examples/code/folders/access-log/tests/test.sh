# The reward is 1 if report.txt is exactly what check.py computes from the log as it was.
if python3 /tests/check.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
