"""Check what is about to be released: python tests/check_release.py WHEEL.

The changelog must have the version and its date on top, with nothing unreleased above it. The wheel must have the
license and the list of crates that it was built from (PEP 770).
"""

from __future__ import annotations

import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parent.parent


def faults(wheel: Path, changelog: str) -> list[str]:
    """Return what is missing from a release, a sentence each."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        version = message_from_bytes(files.read(metadata))["Version"]
    kept = metadata.removesuffix("METADATA")
    found = [
        f"{wheel.name} has no {part}"
        for part in ("licenses/LICENSE", "sboms/hpgo.cyclonedx.json")
        if kept + part not in names
    ]
    top, _, rest = changelog.removeprefix("# Changelog\n\n## Unreleased\n").partition("\n## ")
    if top.strip():
        found.append(f"CHANGELOG.md has unreleased changes: move them below `## {version}, DATE`")
    if not re.match(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d\n", rest):
        found.append(f"the newest release in CHANGELOG.md is not {version}")
    return found


if __name__ == "__main__":
    missing = faults(Path(sys.argv[1]), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    sys.exit("".join(f"error: {fault}\n" for fault in missing) or 0)
