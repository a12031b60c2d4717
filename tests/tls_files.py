"""A certificate authority and a certificate for tests, made with the commands of docs/security.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from areal_agents.tls import TlsConfig

PAGE = Path(__file__).parents[1] / "docs/security.md"


def made_tls_files(folder: Path, *, names: str = "IP:127.0.0.1") -> TlsConfig:
    """Make a certificate authority and a certificate for `names` in a new folder."""
    folder.mkdir()
    recipe = re.search(r"```bash\n(openssl req -x509.*?)```", PAGE.read_text(), re.DOTALL)
    assert recipe is not None
    script, count = re.subn(r"IP:[\w.:,]+", names, recipe[1])
    assert count == 1
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True, capture_output=True, timeout=60)
    return TlsConfig(
        certificate=str(folder / "host.pem"),
        key=str(folder / "host.key"),
        authority=str(folder / "authority.pem"),
    )
