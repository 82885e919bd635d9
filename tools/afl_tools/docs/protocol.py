"""The messages of the protocol, for the reference: read from proto/ with its comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[3]
PROTO = ROOT / "proto"
PACKAGE = "afl.v1"

_Field = descriptor_pb2.FieldDescriptorProto

# Numbers of descriptor.proto, which make a source location's path.
_MESSAGES, _ENUMS, _FIELDS, _NESTED_ENUMS, _VALUES = 4, 5, 2, 4, 2


def messages_sections() -> str:
    """A section for each message and enumeration, with a table of what is in it.

    Raises:
        RuntimeError: if protoc refuses the sources.
    """
    file = _described()
    comments = {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
    }
    sections = []
    for index, message in enumerate(file.message_type):
        assert not message.nested_type, f"{message.name}: nested messages have no place in the reference yet"
        path = (_MESSAGES, index)
        sections.append(_message(message, comments, path))
        for nested, enum in enumerate(message.enum_type):
            sections.append(
                _enum(f"{message.name}.{enum.name}", enum, comments, (*path, _NESTED_ENUMS, nested))
            )
    for index, enum in enumerate(file.enum_type):
        sections.append(_enum(enum.name, enum, comments, (_ENUMS, index)))
    return "\n".join(sections)


def _described() -> descriptor_pb2.FileDescriptorProto:
    # Only developers have it.
    from grpc_tools import protoc  # noqa: PLC0415

    (source,) = PROTO.rglob("*.proto")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "described"
        code = protoc.main(
            ["protoc", f"-I{PROTO}", "--include_source_info", f"--descriptor_set_out={out}", str(source)]
        )
        if code != 0:
            raise RuntimeError(f"protoc refused {source} (exit code {code})")
        (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def _message(
    message: descriptor_pb2.DescriptorProto, comments: Mapping[tuple[int, ...], str], path: tuple[int, ...]
) -> str:
    rows = []
    for index, field in enumerate(message.field):
        meaning = comments.get((*path, _FIELDS, index), "")
        rows.append(f"| {field.number} | `{field.name}` | {_type(field)} | {meaning} |")
    table = ["| number | field | type | meaning |", "|---|---|---|---|", *rows, ""] if rows else []
    return "\n".join(_head(message.name, comments.get(path, ""), table))


def _enum(
    name: str,
    enum: descriptor_pb2.EnumDescriptorProto,
    comments: Mapping[tuple[int, ...], str],
    path: tuple[int, ...],
) -> str:
    rows = [
        f"| {value.number} | `{value.name}` | {comments.get((*path, _VALUES, index), '')} |"
        for index, value in enumerate(enum.value)
    ]
    table = ["| number | value | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(_head(name, comments.get(path, ""), table))


def _head(name: str, comment: str, table: list[str]) -> Iterator[str]:
    yield f"## {name}\n"
    if comment:
        yield f"{comment}\n"
    yield from table


def _type(field: _Field) -> str:
    repeated = "repeated " if field.label == _Field.LABEL_REPEATED else ""
    if field.type_name:
        name = field.type_name.removeprefix(f".{PACKAGE}.")
        return f"{repeated}[{name}](#{name.lower().replace('.', '')})"
    return f"{repeated}`{_Field.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
