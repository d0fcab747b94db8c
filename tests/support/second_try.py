"""What failed beside other tests is tried once more, alone, and whatever passes then is counted and named.

A test that fails under load is a fault, of the test or of the product: the number to reach is zero.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

AT_MOST = 20  # that many have a common cause, and it is not the load
SECONDS = 300.0  # of a test that has to make all of its set-up for itself
ALONE = "passed alone"


class SecondTry:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = defaultdict(list)
        self._passed_alone: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid].append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or len(self._failed) > AT_MOST:
            return
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        for nodeid, reports in self._failed.items():
            reporter.write_line("")
            reporter.write_line(f"once more, alone: {nodeid}")
            if _passes_alone(nodeid, self._config.rootpath):
                self._passed_alone[nodeid] = reports
        retracted = [report for reports in self._passed_alone.values() for report in reports]
        for category in ("failed", "error"):
            left = [report for report in reporter.stats.get(category, []) if report not in retracted]
            reporter.stats[category] = left
        if self._passed_alone:
            reporter.stats[ALONE] = [reports[0] for reports in self._passed_alone.values()]
        if len(self._passed_alone) == len(self._failed):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._passed_alone:
            return
        terminalreporter.section(ALONE)
        for nodeid, reports in self._passed_alone.items():
            for report in reports:
                terminalreporter.write_sep("_", f"{report.when} of {nodeid}")
                terminalreporter.write_line(report.longreprtext)
        number = len(self._passed_alone)
        tests = "1 test" if number == 1 else f"{number} tests"
        terminalreporter.section(f"{tests} failed at first and passed alone: each is a fault to mend")
        for nodeid in self._passed_alone:
            terminalreporter.write_line(nodeid)


def _passes_alone(nodeid: str, root: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", nodeid]
    try:
        return subprocess.run(command, cwd=root, timeout=SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
