"""What every method of the registry promises, on a tiny world: whatever the package can import is tested."""

from __future__ import annotations

import functools

import pytest
import torch

from fscil import registry
from fscil.files import load_tensors, save_tensors
from tiny_world import (
    BASE,
    CLASSES,
    Interrupted,
    MemoryKeeper,
    base_task,
    copy_state,
    differing,
    few_shot_tasks,
    make_backbone,
    make_images,
    make_method,
)

torch.set_num_threads(1)

every_method = pytest.mark.parametrize("name", [name for name in registry.METHODS if name in registry.methods()])
PERMUTED = [3, 9, 0, 7, 5, 8, 2, 6, 1, 4]

# Rates under which the random tiny ViT learns in a few steps; the defaults are for pretrained ones.
LEARNING = {
    "icarl": {"epochs": 40, "lr": 0.01, "classifier": "linear"},
    "foster": {"epochs": 40, "lr": 0.01},
    "adbs": {"epochs": 8, "lr": 0.001},  # cosines of random features differ by less than its scales would move
    "l2p": {"epochs": 20, "lr": 0.1},
    "dualprompt": {"epochs": 20, "lr": 0.1},
    "coda": {"epochs": 20, "lr": 0.1},
}


@functools.cache
def after_base(name: str) -> dict[str, torch.Tensor]:
    method = make_method(name)
    method.fit_base(base_task())
    return copy_state(method)


def restored(name: str, **runtime):
    method = make_method(name, **runtime)
    method.load_state({key: tensor.clone() for key, tensor in after_base(name).items()})
    return method


@functools.cache
def after_all(name: str) -> dict[str, torch.Tensor]:
    method = restored(name)
    for task in few_shot_tasks():
        method.learn(task)
    return copy_state(method)


@every_method
@pytest.mark.parametrize("order", [None, PERMUTED], ids=["sorted", "permuted"])
def test_learns_the_base_task_whatever_the_order_of_classes(name, order):
    method = make_method(name, LEARNING.get(name, {"epochs": 8}))
    task = base_task(order)
    method.fit_base(task)
    assert method.seen == BASE
    with torch.no_grad():
        predicted = method.logits(task.images).argmax(1)
    assert (predicted == task.labels).double().mean() > 0.6  # chance is 1/6
    assert method.trainable_parameters() > 0


@every_method
def test_learns_few_shot_tasks_and_predicts_only_seen_classes(name):
    method = restored(name)
    images, _ = make_images()
    assert method.logits(images).shape == (len(images), BASE)
    for task, seen in zip(few_shot_tasks(), (9, CLASSES)):  # the second task: one class, one shot
        before = copy_state(method)
        method.learn(task)
        logits = method.logits(images)
        assert method.seen == seen and logits.shape == (len(images), seen)
        assert logits.isfinite().all() and logits.dtype == torch.float32
        assert differing(before, method.state()) - {"class_counts", "tasks_seen"}


@every_method
def test_frozen_weights_and_fixed_features_do_not_move(name):
    backbone = make_backbone()
    weights = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}
    method = make_method(name, backbone=backbone)
    method.fit_base(base_task())
    images, _ = make_images()
    features = method.features(images) if method.features_fixed else None
    for task in few_shot_tasks():
        method.learn(task)
    assert not differing(weights, backbone.state_dict())
    assert not any(key.startswith("backbone.") for key in method.state())
    if method.features_fixed:
        assert torch.equal(method.features(images), features)
        assert torch.equal(method.logits_from(features), method.logits(images))


@every_method
def test_state_round_trips_through_a_checkpoint(name, tmp_path):
    method = restored(name)
    first, second = few_shot_tasks()
    method.learn(first)
    save_tensors(tmp_path / "state.safetensors", method.state(), {})
    again = make_method(name)
    again.load_state(load_tensors(tmp_path / "state.safetensors")[0])
    images, _ = make_images()
    assert again.seen == method.seen and again.stored_images() == method.stored_images()
    assert torch.equal(again.logits(images), method.logits(images))
    for learner in (method, again):
        learner.learn(second)
    assert not differing(method.state(), again.state())


@every_method
def test_same_seed_same_result_and_another_seed_another(name):
    states = []
    for seed in (2023, 2023, 5):
        method = make_method(name, seed=seed)
        method.fit_base(base_task())
        for task in few_shot_tasks():
            method.learn(task)
        states.append(copy_state(method))
    assert not differing(states[0], states[1])
    assert differing(states[0], states[2])
    assert not differing(states[0], after_all(name))  # a run that was stopped between tasks ends the same


@every_method
def test_resuming_inside_a_task_equals_not_stopping(name):
    for number, task in enumerate([base_task(), *few_shot_tasks()[:1]]):
        make = make_method if number == 0 else restored

        def learn(keeper, make=make, number=number, task=task):
            method = make(name, keeper=keeper)
            (method.fit_base if number == 0 else method.learn)(task)
            return copy_state(method)

        keeper = MemoryKeeper()
        whole = learn(keeper)
        for stop in {1, keeper.saves // 2 + 1, keeper.saves} if keeper.saves else ():
            kept: dict = {}
            with pytest.raises(Interrupted):
                learn(MemoryKeeper(kept, stop_after=stop))
            assert not differing(whole, learn(MemoryKeeper(kept)))
