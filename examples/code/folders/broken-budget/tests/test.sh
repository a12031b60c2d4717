# The reward is the share of the files for which budget.py prints the right lines.
python3 /tests/check.py > /logs/verifier/reward.txt
