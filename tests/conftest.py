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


@pytest.fixture
def fscil(capsys, monkeypatch, tmp_path):
    """Run the command in an empty folder; returns (exit status, stdout, stderr)."""
    from fscil import cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A file of random weights for the backbone glyph_vit_a: tests do not depend on what the shipped ones can do."""
    from tiny_world import save_weights

    return save_weights(tmp_path_factory.mktemp("weights") / "random.safetensors")
