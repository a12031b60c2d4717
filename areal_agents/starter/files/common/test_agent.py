import subprocess
import sys
from pathlib import Path


def test_the_agent_can_be_trained():
    """Plays the first task of config.yaml's data with a scripted model."""
    doctor = [sys.executable, "-m", "areal_agents", "doctor", "--config", "config.yaml"]
    subprocess.run(doctor, cwd=Path(__file__).parent, check=True, timeout=120)
