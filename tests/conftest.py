"""Shared by all tests: where something is missing, `make test` skips with a line that says so, and CI fails."""

import os

import pytest

REQUIRE_ALL = os.environ.get("FSCIL_REQUIRE_ALL") == "1"  # set by .ci/run, which installs everything


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: nothing may be missing here, yet it was skipped. {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if item.get_closest_marker("gpu") is None:  # a GPU cannot be installed
        _fail_if_skipped(report)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    _fail_if_skipped((yield).get_result())
