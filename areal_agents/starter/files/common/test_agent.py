import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_the_agent_can_be_trained():
    task = (FOLDER / "tasks.jsonl").read_text().splitlines()[0]
    doctor = [sys.executable, "-m", "areal_agents", "doctor", "--task", task, DOCTOR]
    subprocess.run(doctor, cwd=FOLDER, check=True, timeout=120)
