"""What is not installed: `make test` skips what needs it with a line that says so; CI, which has everything, fails.

A test of an optional part carries the mark `extra` with the name of that extra in pyproject.toml. A module that cannot
be imported without one, so that its examples cannot be read, is found out by importing it.
"""

import os
import signal
from functools import cache
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIRE_ALL = os.environ.get("FSCIL_REQUIRE_ALL") == "1"  # set by .ci/run once everything is installed


# Background shells pass Ctrl-C on as ignored, and so would every process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def extras() -> dict[str, set[str]]:
    """The distributions that each extra adds, by the metadata of the installed package."""
    package = metadata.distribution("fscil")
    asked = [r for r in map(Requirement, package.requires or []) if r.marker and not r.marker.evaluate({"extra": ""})]
    return {
        extra: {canonicalize_name(r.name) for r in asked if r.marker.evaluate({"extra": extra})}
        for extra in package.metadata.get_all("Provides-Extra") or []
    }


def extra_that_brings(module: str) -> str | None:
    """The smallest extra with a distribution named like this module; None if it is not one of ours.

    A distribution that is not installed does not tell which modules it would bring, but ours are called as they are.
    """
    name = canonicalize_name(module.partition(".")[0])
    bringing = [extra for extra, names in extras().items() if name in names]
    return min(bringing, key=lambda extra: len(extras()[extra]), default=None)


def is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: nothing may be missing here, yet it was skipped. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    call = getattr(report, "call", None)  # --last-failed passes over files without a call
    raised = call and call.excinfo and call.excinfo.value
    problem = getattr(raised, "__cause__", None) or raised  # pytest wraps what an import raised
    if isinstance(problem, ModuleNotFoundError) and (extra := extra_that_brings(problem.name)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), None, f"Skipped: needs fscil[{extra}]")
    fail_if_skipped(report)
    return report


def pytest_collection_modifyitems(config, items):
    """Hours of faults are for those who ask for them."""
    if "faults" not in config.option.markexpr:
        asked = [item for item in items if item.get_closest_marker("faults") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in asked])
        items[:] = asked


def pytest_runtest_setup(item):
    for mark in item.iter_markers("extra"):
        if missing := sorted(name for extra in mark.args for name in extras()[extra] if not is_installed(name)):
            pytest.skip(f"needs fscil[{','.join(mark.args)}]: without {', '.join(missing)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # a GPU cannot be installed, and an example is skipped only where it says so itself
    if item.get_closest_marker("gpu") is None and not isinstance(item, pytest.DoctestItem):
        fail_if_skipped(report)
    return report
