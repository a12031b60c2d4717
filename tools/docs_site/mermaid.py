"""Fetches the program that draws the diagrams of the pages, and checks that it is the one that was chosen.

python tools/docs_site/mermaid.py FILE
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "12.3.0"
URL = f"https://registry.npmjs.org/mermaid/-/mermaid-{VERSION}.tgz"
SHA512 = "4113TdXeLAsMruJ79OpFL5O8+LTFXhQqZ260rF3tgUmiNAtRm4Uume04I+65PRN6yZ69J4f8rVYWW8zRk65UYw=="
TIMEOUT_S = 120


def main() -> None:
    """Write the file, unless it is there."""
    out = Path(sys.argv[1])
    if out.exists():
        return
    with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as answer:
        packed = answer.read()
    if base64.b64encode(hashlib.sha512(packed).digest()).decode() != SHA512:
        sys.exit(f"{URL} is not the file that was chosen: its checksum differs")
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        member = files.extractfile("package/dist/mermaid.min.js")
        if member is None:
            sys.exit(f"{URL} has no dist/mermaid.min.js")
        temporary = out.with_suffix(".tmp")
        temporary.write_bytes(member.read())
    temporary.replace(out)


if __name__ == "__main__":
    main()
