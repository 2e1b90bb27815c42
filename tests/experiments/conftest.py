"""Fixtures of the experiments' tests."""

import pytest

from fscil import registry


@pytest.fixture
def probe(monkeypatch):
    """The methods `probe` and `thawed` of probe_world.py, by name."""
    import probe_world

    for name, cls in (("probe", "Probe"), ("thawed", "Thawed")):
        monkeypatch.setitem(registry.METHODS, name, registry.MethodEntry(f"probe_world:{cls}", name, "for tests"))
    monkeypatch.setattr(probe_world.Probe, "stop_at", None)
    monkeypatch.setattr(probe_world.Probe, "feature_calls", [])
