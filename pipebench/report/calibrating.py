"""Calibrates a report while telling how it gets on, prints what it comes to, and writes the constants if asked."""

import time
from collections.abc import Sequence

from rich.text import Text

from pipebench.formats import seconds
from pipebench.recipe.catalog import display
from pipebench.report.calibrate import calibrate
from pipebench.report.calibration_text import calibration_text
from pipebench.report.constants import write_value
from pipebench.report.definition import Report
from pipebench.report.recipes import Asked
from pipebench.show.terminal import is_terminal, standard_output

_ROUNDS = 6  # values of every constant that are tried, about; as many again without each cell
_EVERY_S = 10.0  # between plain lines


def print_calibration(report: Report, asked: Sequence[Asked], *, writes: bool) -> int:
    """Calibrate a report and print what it comes to; return the exit code.

    Args:
        report: the report.
        asked: its runs.
        writes: write the constants into the clusters' files.

    Raises:
        UserError: it has no constants, or they can't be fitted; or written.
    """
    progress = _Progress(report)
    calibrated = calibrate(report, asked, progress.run, progress.leave_out)
    progress.end()
    _say(calibration_text(calibrated))
    if writes:
        for place in calibrated.places:
            write_value(place, calibrated.fitted[place.constant.name], report.name)
        for path in dict.fromkeys(place.path for place in calibrated.places):
            _say(f"written: {display(path)}")
    return 0


class _Progress:
    """Tells of simulations, now and then, with a guess of what is left."""

    def __init__(self, report: Report) -> None:
        calibration = report.calibration
        cells = sum(len(constant.fitted_on) for constant in calibration.constants) if calibration else 0
        self._expected = 2 * cells * (_ROUNDS + _ROUNDS)  # two runs per cell; then again, without each
        self._done = 0
        self._phase = "fitting"
        self._start_s = self._told_s = time.monotonic()
        self._status = standard_output().status("fitting") if is_terminal() else None
        if self._status is not None:
            self._status.start()

    def run(self, asked: Asked) -> None:
        """Take note of a simulation that begins."""
        self._done += 1
        now_s = time.monotonic()
        left_s = max(0.0, (now_s - self._start_s) / self._done * (self._expected - self._done))
        line = f"{self._phase}: {self._done} simulations, {asked.row} {asked.run}, about {seconds(round(left_s))} left"
        if self._status is not None:
            self._status.update(Text(line))
        elif now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            _say(line)

    def leave_out(self) -> None:
        """Go over to fits without each cell."""
        self._phase = "leaving each cell out"

    def end(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()


def _say(text: str) -> None:
    standard_output().print(Text(text), soft_wrap=True)
