"""Training that diverges stops in one line with step, rate and advice; no NaN is ever kept, and what was kept stays."""

import pytest
import torch

from fscil.errors import UserError
from fscil.files import check_finite
from fscil.methods.training import Schedule, train
from tiny_world import MemoryKeeper, base_task, make_method


def test_a_rate_that_is_far_too_high():
    keeper = MemoryKeeper()
    method = make_method("smp", {"lr": 1e30, "epochs": 3}, keeper=keeper)
    with pytest.raises(
        UserError, match=r"diverged: by step \d+ of epoch 1, at the learning rate 1e\+30.*options.lr=1e\+29"
    ):
        method.fit_base(base_task())
    for stage, tensors in keeper.kept.items():
        check_finite(tensors, stage)


@pytest.mark.parametrize("poison", ["loss", "weights"])
def test_the_state_before_is_kept(poison):
    """A loss that is finite may still leave weights that are not."""
    keeper, task = MemoryKeeper(), base_task()
    runtime = make_method("frozen", keeper=keeper).runtime
    weight, epoch = torch.nn.Parameter(torch.ones(3)), 0

    def loss(batch):
        if epoch < 2:
            return weight.sum()
        return weight.sum() * (torch.inf if poison == "loss" else 1e38) * (1 if poison == "loss" else 1e10)

    def begin(number):
        nonlocal epoch
        epoch = number

    schedule = Schedule(epochs=4, batch_size=8, lr=0.01, decay="constant", momentum=0.0)
    with pytest.raises(UserError, match="of epoch 3, at the learning rate 0.01.*state after epoch 2"):
        train("stage", task.images, task.labels, [weight], loss, schedule, runtime, begin)
    kept = keeper.kept["stage"]
    assert int(kept["epoch"]) == 2 and bool(torch.isfinite(kept["weight.0"]).all())
    steps = 2 * -(-len(task.images) // 8)
    assert torch.allclose(kept["weight.0"], torch.full((3,), 1 - 0.01 * steps))
