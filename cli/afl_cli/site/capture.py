"""``afl capture``: whether all that a worker has sent is masked, and what is not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from rich.console import RenderableType

from afl.config.quantities import shown_bytes
from afl.core.messages import Role
from afl.errors import DataError, ExitCode
from afl.paths import expanded
from afl.terminal.view import facts, make_console, table

if TYPE_CHECKING:
    from afl_cli.site.sent import Sent, Told

HELP = "check that all that a worker has sent is masked"

_WIDEST: Final = 60
"""Characters of a field's values."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "The exit code is 7 if something has left that is not masked, or does not look so."
    file = "what afl-worker --capture FILE has written"
    parser.add_argument("file", type=expanded, metavar="FILE", help=file)
    against = "also see whether OTHER, of the same run with other data, could be told from FILE"
    parser.add_argument("--against", type=expanded, metavar="OTHER", help=against)
    losses = "hidden: losses and metrics must not be told (default: as the messages are)"
    parser.add_argument("--losses", choices=["shown", "hidden"], help=losses)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> ExitCode:
    """Check a capture, and show it."""
    # PyTorch takes seconds to import.
    from afl_cli.site.sent import Sent  # noqa: PLC0415

    sent = Sent.of_file(options.file)
    other = None if options.against is None else Sent.of_file(options.against)
    tests = list(_tests(sent, other))
    wrong = [*sent.wrong, *_of_losses(sent, options.losses), *_of_tests(sent, tests)]
    if options.json:
        print(json.dumps(_as_json(sent, tests, wrong), indent=2))
    else:
        console = make_console()
        for part in _shown(sent, tests, str(options.file)):
            console.print(part)
    if wrong:
        raise DataError("; ".join([f"{options.file}: {wrong[0]}", *wrong[1:]]))
    if not options.json:
        losses = "; losses are told" if sent.told_of_losses else ", and no loss is told"
        console.print(f"All updates that left are masked and look random{losses}.")
    return ExitCode.OK


Test = tuple[str, str, int, float]
"""The payloads, what is tested, of how many residues, and the probability."""


def _tests(sent: Sent, other: Sent | None) -> Iterator[Test]:
    for (role, bits), masked in sent.masked.items():
        what = f"{role.name} of {bits} bits"
        for name, probability in masked.uniformity.probabilities().items():
            yield what, name, masked.uniformity.count, probability
        if other is not None and (role, bits) in other.masked:
            theirs = other.masked[role, bits].uniformity
            for name, probability in masked.uniformity.compared(theirs).items():
                yield what, f"{name}, against the other", masked.uniformity.count, probability


def _of_tests(sent: Sent, tests: list[Test]) -> Iterator[str]:
    from afl.core.secrecy.uniformity import FALSE_ALARM  # noqa: PLC0415  # with PyTorch

    if not any(role is Role.UPDATE for role, _ in sent.masked):
        yield "no masked update is in it; capture some rounds of training"
    elif not tests:
        yield "too few values to test; capture more rounds"
    for what, name, count, probability in tests:
        if probability < FALSE_ALARM / len(tests):
            yield (
                f"{what} are not as random as masks make them: {name} (of {count:,} residues, uniform ones "
                f"would be as uneven with a probability of {probability:.1e})"
            )


def _of_losses(sent: Sent, losses: str | None) -> Iterator[str]:
    must_hide = sent.hides_losses if losses is None else losses == "hidden"
    if must_hide and sent.told_of_losses:
        yield f"losses are hidden, and these fields tell of them: {', '.join(sent.told_of_losses)}"


def _shown(sent: Sent, tests: list[Test], name: str) -> Iterator[RenderableType]:
    masked = sum(each.bytes for each in sent.masked.values())
    rows: dict[str, RenderableType] = {
        "sent": f"{shown_bytes(sent.bytes)} in {sent.frames:,} messages",
        "masked values": shown_bytes(masked),
        "everything else": shown_bytes(sent.bytes - masked),
        "losses": f"told in {', '.join(sent.told_of_losses)}" if sent.told_of_losses else "none is told",
    }
    for (role, bits), each in sent.masked.items():
        rows[f"{role.name}, {bits} bits"] = f"{each.messages:,} payloads, {shown_bytes(each.bytes)}"
    yield facts(rows, title=f"What left, by {name}")
    found = table("payloads", "test", "residues>", "probability>", title="Do the values look random?")
    for what, test, count, probability in tests:
        found.add_row(what, test, f"{count:,}", f"{probability:.2g}")
    yield found
    clear = table("field of WorkerFrame", "times>", "values", title="What is in clear")
    for path, told in sorted(sent.told.items()):
        clear.add_row(path, f"{told.times:,}", _values(told))
    yield clear


def _values(told: Told) -> str:
    text = ", ".join(told.values[:3]) + ", ..." * (len(told.values) > 3)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _as_json(sent: Sent, tests: list[Test], wrong: list[str]) -> dict[str, Any]:
    return {
        "wrong": wrong,
        "messages": sent.frames,
        "bytes": sent.bytes,
        "masked": [
            {"role": role.name, "bits": bits, "payloads": each.messages, "bytes": each.bytes}
            for (role, bits), each in sent.masked.items()
        ],
        "tests": [
            dict(zip(("payloads", "test", "residues", "probability"), test, strict=True)) for test in tests
        ],
        "in_clear": {path: {"times": told.times, "values": told.values} for path, told in sent.told.items()},
    }
