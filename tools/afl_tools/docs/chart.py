"""The values of the Helm chart as a table, from the comments of its values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "afl"


@dataclass(frozen=True)
class Value:
    """One key that a user may set.

    Attributes:
        name: with its sections, as ``--set`` takes it.
        default: as YAML on one line.
        meaning: the comment above the key, or after it; empty where Kubernetes' own documentation has it.
    """

    name: str
    default: str
    meaning: str


def values() -> list[Value]:
    """Every key of values.yaml that is no section; what is a section, values.schema.json says."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_values(root, schema, text.splitlines(), ""))


def _values(node: yaml.MappingNode, schema: dict[str, Any], lines: list[str], above: str) -> Iterator[Value]:
    for key, value in node.value:
        name, line = above + key.value, key.start_mark.line
        section = schema["properties"][key.value]
        if "properties" in section and not value.flow_style:
            yield from _values(value, section, lines, f"{name}.")
            continue
        after = re.search(r"(?:^|\s)# (.*)$", lines[line])
        first = line
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        before = [each.strip().removeprefix("# ") for each in lines[first:line]]
        yield Value(name, _one_line(value), after[1] if after else " ".join(before))


def _one_line(node: yaml.Node) -> str:
    found = yaml.serialize(node, Dumper=yaml.SafeDumper)
    return json.dumps(yaml.safe_load(found), ensure_ascii=False)


def values_table() -> str:
    """A row for each value."""
    rows = ["| value | default | what it is |", "|---|---|---|"]
    for value in values():
        default = "see the file" if len(value.default) > 60 else f"`{value.default}`"
        rows.append(f"| `{value.name}` | {default} | {value.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"
