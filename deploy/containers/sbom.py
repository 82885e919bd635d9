"""Writes the bill of materials of an image, CycloneDX as JSON: ``python sbom.py PACKAGES AFL``.

Both are environments: of what was installed before, and of ``afl`` alone, into which the file goes, as
``share/afl/sbom.cdx.json``. What is in it is what each package says of itself.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path
from typing import Any


def component(package: Distribution) -> dict[str, Any]:
    """A package, by the name and version that an index has it under."""
    about = package.metadata
    name = re.sub(r"[-_.]+", "-", about["Name"]).lower()
    purl = f"pkg:pypi/{name}@{package.version.replace('+', '%2B')}"
    found = {"type": "library", "bom-ref": purl, "name": name, "version": package.version, "purl": purl}
    if expression := about.get("License-Expression"):
        return {**found, "licenses": [{"expression": expression}]}
    named = [
        line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if line.startswith("License")
    ]
    return {**found, "licenses": [{"license": {"name": each}} for each in named]} if named else found


def bill(packages: Path, afl: Path) -> dict[str, Any]:
    """The whole file; what ``afl`` needs is among the components."""
    (own,) = map(PathDistribution, afl.glob("lib/python*/site-packages/afl-*.dist-info"))
    others = distributions(path=[str(path) for path in packages.glob("lib/python*/site-packages")])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**component(own), "type": "application"}},
        "components": sorted(map(component, others), key=lambda each: each["purl"]),
    }


if __name__ == "__main__":
    packages, afl = map(Path, sys.argv[1:])
    file = afl / "share" / "afl" / "sbom.cdx.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bill(packages, afl), indent=1) + "\n", encoding="utf-8")
