"""Reading a run: ``diagnose(run_folder)`` gives one verdict, the findings behind it, and what could not be judged.

HEALTHY, LOOK or STOP is the worst severity found; notes (warm-up, bucket mix, static composition) explain movement and leave a run
healthy. With fewer than 30 steps a run in which nothing is wrong is TOO EARLY to be called healthy.
False alarms cost more than late ones here, since a person is called: every check needs an effect that is both several
standard errors sure and large enough to matter. How often it is right is measured by ``benchmarks/diagnosis.py``. A log of 500,000 steps
(448 MB) is read and judged in 5.7 s of one core and 0.56 GiB; 1,000 steps more are read in 0.01 s.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from dflash_nb.analysis.csvlog import read_log
from dflash_nb.analysis.findings import CHECKS
from dflash_nb.analysis.findings.finding import WORDS, Check, Finding, Log, Severity, listed, plural
from dflash_nb.pipeline.run import Run

VERDICTS = {Severity.NOTE: "HEALTHY", Severity.LOOK: "LOOK", Severity.STOP: "STOP"}
EARLY = 30  # steps below which a curve says little, and most checks do not answer
EXPLAIN = ("warm-up", "static composition", "bucket mix")  # notes that belong into a healthy verdict


@dataclass(frozen=True)
class Unjudged:
    """A question that this log cannot answer, and why."""

    check: Check
    why: str


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result: ``findings`` with the worst first, ``unjudged`` checks, and the log itself with its loss in parts."""

    log: Log
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]

    @property
    def verdict(self) -> str:
        """HEALTHY, LOOK or STOP, or TOO EARLY where nothing is wrong in fewer than 30 steps. A log without any loss is at best LOOK."""
        if not self.findings and not self.log.has("loss"):
            return "LOOK"
        worst = VERDICTS[max((finding.severity for finding in self.findings), default=Severity.NOTE)]
        return "TOO EARLY" if worst == "HEALTHY" and len(self.log) < EARLY else worst

    @property
    def alarm(self) -> bool:
        """Whether a person is called: LOOK or STOP."""
        return self.verdict in ("LOOK", "STOP")

    @property
    def main(self) -> Finding | None:
        """The finding that the verdict rests on."""
        return self.findings[0] if self.findings else None

    def of(self, kind: str) -> Finding | None:
        """The finding of this kind, if there is one."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def refreshed(self) -> "Diagnosis":
        """The diagnosis with what was added to the log since; only that is read."""
        self.log.run.refresh()
        return diagnose(self.log.run)

    def text(self) -> str:
        """The verdict in two sentences."""
        return f"{self.verdict}: {' '.join(sentences(self))}"

    def report(self, width: int = 120) -> str:
        """Verdict, findings with evidence and advice, and what was not judged, as plain text."""
        lines = textwrap.wrap(self.text(), width)
        for finding in self.findings:
            mark = {Severity.NOTE: "note", Severity.LOOK: "LOOK", Severity.STOP: "STOP"}[finding.severity]
            lines += ["", *textwrap.wrap(f"{mark}  {finding.text}", width, subsequent_indent=" " * 6)]
            for text in (*finding.evidence, f"rests on {finding.where()}, confidence {finding.confidence:.0%}", f"→ {finding.advice}"):
                lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 8)
        if self.unjudged:
            lines += ["", "Not judged:"]
            for each in self.unjudged:
                lines += textwrap.wrap(f"{each.check.asks} {each.why}", width, initial_indent=" " * 6, subsequent_indent=" " * 8)
        return "\n".join(lines)


def diagnose(source: str | Path | Run, columns: str = "") -> Diagnosis:
    """Read and judge a run folder, a tracker's CSV export, or a run that was read already (``refresh`` it first to see what was added).

    Raises RunError when there is nothing to read; a log that is short, narrow or half-written is judged as far as it goes.
    """
    log = Log(source if isinstance(source, Run) else read_log(source, columns))
    findings, unjudged = [], []
    for check in CHECKS:
        missing = [name for name in check.needs if not log.has(name)]
        if missing and check.kind != "not finite":
            why = f"the log holds no {listed([WORDS.get(name, name) for name in missing])}"
            unjudged.append(Unjudged(check, why))
        elif len(log) < check.least_steps:
            unjudged.append(Unjudged(check, f"needs {plural(check.least_steps, 'step')}, there are {len(log)}"))
        elif (made := len(log.evaluations())) < check.least_evaluations:
            why = f"needs {plural(check.least_evaluations, 'held-out evaluation')} after the start, there are {made}: set eval_every"
            unjudged.append(Unjudged(check, why))
        elif (finding := check.find(log)) is not None:
            findings.append(finding)
    findings.sort(key=lambda finding: -finding.severity)
    return Diagnosis(log, tuple(findings), tuple(unjudged))


def sentences(diagnosis: Diagnosis) -> tuple[str, str]:
    """What it is, and what to do: for a tired person."""
    log, main = diagnosis.log, diagnosis.main
    if not len(log) and log.run.bad_lines:
        unreadable = plural(log.run.bad_lines, "line")
        return f"there is no step to judge: {unreadable} of {log.run.folder} cannot be read.", "Copy or export the log again."
    if not len(log):
        return f"there is no step to judge, the run is {log.run.status}.", "Read it again once steps are written."
    if main is None and not log.has("loss"):
        return f"none of the {plural(len(log), 'step')} has a loss.", "Look at what the program writes as loss."
    if diagnosis.verdict == "TOO EARLY":
        again = "start a longer run" if log.run.status == "finished" else f"read it again after {EARLY} steps"
        nothing = f"nothing is wrong in {plural(len(log), 'step')}, which says little: a verdict needs {EARLY} steps."
        return nothing, f"{again[0].upper()}{again[1:]}."
    if main is not None and diagnosis.alarm:
        return f"{_lower(main.text)}.", f"{main.advice}."
    found = (diagnosis.of(kind) for kind in EXPLAIN)
    notes = [_lower(finding.text) for finding in found if finding is not None]
    going = log.run.status in ("running", "unfinished", "interrupted")
    return f"{'; '.join(notes) or 'the loss behaves as it should'}.", "Let it run." if going else "Nothing needs to be done."


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
