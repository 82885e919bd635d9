"""What a check found: of each finding what is wrong, where, and what to do; and whose line raised."""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from afl.errors import STOPS, AflError, ExitCode, TaskCodeError
from afl.names import Names, with_names
from afl.user_code import as_failure, text_of, users_line


class Level(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # a run would fail, or train on what is not meant
    WARNING = "warning"  # a run would go, and is probably not what is meant
    NOTE = "note"  # worth knowing, and nothing is wrong


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        where: a worker, a parameter, or a line of the user's code.
        advice: what to do; empty where there is nothing to do.
        code: the exit code of a check that found this error first.
    """

    level: Level
    where: str
    what: str
    advice: str = ""
    code: ExitCode = ExitCode.CONFIG

    def __str__(self) -> str:
        advice = f"\n    -> {self.advice}" if self.advice else ""
        return f"{self.level}: {self.where}: {self.what}{advice}"


@dataclass
class Report:
    """All of a check.

    Attributes:
        task: as it was named.
        facts: what a person wants to see of task, data and costs, by title and name.
        values: the same and more, for programs.
        limit_s: how long the check may take; what is not essential is left out where it would take longer.
        watch: is told what is being tried.
    """

    task: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    limit_s: float = math.inf
    watch: Callable[[str], None] = lambda _: None
    left_out: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def has_time(self, what: str, *, share: float = 1.0, seconds: float = 0.0) -> bool:
        """Whether ``seconds`` from now end within a ``share`` of the limit; if not, ``what`` is left out."""
        if time.monotonic() - self._began + seconds <= share * self.limit_s:
            return True
        self.left_out.append(what)
        return False

    def tell_left_out(self) -> None:
        """Add a note on what was left out, if anything was."""
        if self.left_out:
            what = f"to end within {self.limit_s:.0f} s it leaves out: {'; '.join(self.left_out)}"
            self.note("this check", what, "afl check --full tries everything")

    def name_sites(self, names: Names) -> None:
        """Put the sites' names beside the workers that are spoken of."""
        self.findings = [
            replace(finding, where=with_names(finding.where, names), what=with_names(finding.what, names))
            for finding in self.findings
        ]
        self.facts = {
            title: {with_names(name, names): value for name, value in facts.items()}
            for title, facts in self.facts.items()
        }

    def error(self, where: str, what: str, advice: str = "", code: ExitCode = ExitCode.CONFIG) -> None:
        """Note that a run would fail."""
        self.findings.append(Finding(Level.ERROR, where, what, advice, code))

    def fail(self, where: str, what: str, advice: str = "", code: ExitCode = ExitCode.CONFIG) -> NoReturn:
        """Note that a run would fail, where the check cannot go on either."""
        self.error(where, what, advice, code)
        raise StoppedError

    def stop_on_errors(self) -> None:
        """Raise ``StoppedError`` if there are any."""
        if self.errors:
            raise StoppedError

    def warn(self, where: str, what: str, advice: str = "") -> None:
        """Note what is probably a mistake, though a run would start."""
        self.findings.append(Finding(Level.WARNING, where, what, advice))

    def note(self, where: str, what: str, advice: str = "") -> None:
        """Note what is worth knowing."""
        self.findings.append(Finding(Level.NOTE, where, what, advice))

    def of_level(self, level: str) -> list[Finding]:
        """The findings of one :class:`Level`."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def errors(self) -> list[Finding]:
        """The findings that must be fixed before a run."""
        return self.of_level(Level.ERROR)

    @property
    def exit_code(self) -> ExitCode:
        """That of the first error; warnings are no failure."""
        return self.errors[0].code if self.errors else ExitCode.OK

    @property
    def verdict(self) -> str:
        """The result in one line: whether the task is ready, and how many findings it has."""
        counts = {level: len(self.of_level(level)) for level in Level}
        parts = [f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count]
        if not parts:
            return f"{self.task}: nothing is wrong"
        state = "not ready for a run" if counts[Level.ERROR] else "ready for a run"
        return f"{self.task}: {state}; {', '.join(parts)}"

    def as_json(self) -> Mapping[str, Any]:
        """The report as ``afl check --json`` prints it."""
        findings = [asdict(finding) for finding in self.findings]
        about = {"task": self.task, "ready": not self.errors, "exit_code": self.exit_code}
        return {**about, "findings": findings, **self.values}

    def __str__(self) -> str:
        lines: list[str] = []
        for title, facts in self.facts.items():
            width = max(map(len, facts))
            lines += [title, *(f"  {name.ljust(width)}  {value}" for name, value in facts.items()), ""]
        for level in Level:
            lines += map(str, self.of_level(level))
        return "\n".join([*lines, self.verdict])


class StoppedError(Exception):
    """A check cannot go on; why is in the report."""


@contextlib.contextmanager
def blaming(report: Report, where: str) -> Iterator[None]:
    """Turn what a task's code raises into an error of the report, and raise ``StoppedError``."""
    try:
        yield
    except (StoppedError, *STOPS):
        raise
    except BaseException as caught:  # noqa: BLE001  # a task's own code may raise anything
        failure = as_failure(caught, where)
        error = failure.__cause__ if isinstance(failure, TaskCodeError) else failure
        assert error is not None
        if isinstance(error, AflError):
            report.fail(where, str(error), code=error.exit_code)
        text = text_of(error)
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if line := users_line(error):
            report.fail(f"{line[0]}, {where}", what, f"{line[1]!r} raised it")
        report.fail(where, what)
