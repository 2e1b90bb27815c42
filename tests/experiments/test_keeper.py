"""Progress inside a task is found again by the run it belongs to, and by no other."""

import torch

from fscil.experiments.keeper import RunKeeper


def test_the_keeper_returns_what_it_kept_for_this_task_and_configuration_only(tmp_path):
    keeper = RunKeeper(tmp_path, "abc")
    assert keeper.load("adapters") is None
    keeper.save("adapters", {"w": torch.ones(2)})
    keeper.save("second stage/ä", {"w": torch.zeros(2)})
    assert torch.equal(keeper.load("adapters")["w"], torch.ones(2))
    assert torch.equal(keeper.load("second stage/ä")["w"], torch.zeros(2))
    assert RunKeeper(tmp_path, "other").load("adapters") is None
    keeper.task = 1
    assert keeper.load("adapters") is None
    keeper.save("adapters", {"w": torch.full((2,), 3.0)})
    keeper.task = 0
    keeper.clear()
    assert keeper.load("adapters") is None
    keeper.task = 1
    assert keeper.load("adapters") is not None
    RunKeeper(tmp_path / "none", writes=False).save("x", {"w": torch.ones(1)})
    assert not (tmp_path / "none").exists()
