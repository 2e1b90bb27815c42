"""Doctests of modules that need an extra are skipped where it is not installed, each with a line that says so."""

import os

import pytest

EXTRAS = {"fscil.serving.api": "serve", "fscil.serving.schemas": "serve"}


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    outcome = yield
    report = outcome.get_result()
    missing = report.failed and "ModuleNotFoundError" in str(report.longrepr)
    module = ".".join(collector.path.with_suffix("").parts[-3:]) if missing else None
    if module in EXTRAS and os.environ.get("FSCIL_REQUIRE_ALL") != "1":
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f'{module} needs pip install "fscil[{EXTRAS[module]}]"')
