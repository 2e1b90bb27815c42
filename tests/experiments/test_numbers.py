"""A run never writes what is no number: it stops in one line, and goes on from the last task that went well."""

import pytest
import torch

from fscil.errors import UserError
from fscil.files import check_finite, load_tensors
from probe_world import Probe, numbers, run

pytestmark = pytest.mark.usefixtures("probe")


@pytest.mark.parametrize(("value", "words"), [(torch.nan, "NaN"), (torch.inf, "NaN or infinity|NaN")])
def test_a_task_that_ends_in_no_numbers_is_not_kept(tmp_path, monkeypatch, value, words):
    plain = run(tmp_path / "plain")
    learn = Probe.learn

    def broken(self, task):
        learn(self, task)
        if task.index == 1:
            self.rows[-1] = value

    monkeypatch.setattr(Probe, "learn", broken)
    with pytest.raises(UserError, match=words) as caught:
        run(tmp_path / "run")
    assert "\n" not in str(caught.value)
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        check_finite(load_tensors(path)[0], path)
    monkeypatch.setattr(Probe, "learn", learn)
    assert numbers(run(tmp_path / "run", resume=True)) == numbers(plain)
