"""What every method of the registry promises, on a tiny world: whatever the package can import is tested."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from fscil import registry
from fscil.backbones.lora import initial_lora
from fscil.backbones.vit import Backbone
from fscil.files import load_tensors, save_tensors
from fscil.maths.margins import cosine
from fscil.maths.prototypes import class_means
from fscil.methods.base import Method, NoOptions
from fscil.methods.sizes import TRAINING, Sizes
from fscil.runtime import Runtime
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
UNTRAINED = ("frozen", "simplecil")  # the backbone as it is
PERMUTED = [3, 9, 0, 7, 5, 8, 2, 6, 1, 4]

# Rates under which the random tiny ViT learns in a few steps; the defaults are for pretrained ones.
LEARNING = {
    "icarl": {"epochs": 40, "lr": 0.01},
    "icarl_linear": {"epochs": 40, "lr": 0.01},
    "foster": {"epochs": 40, "lr": 0.01},
    "foster_student": {"epochs": 40, "lr": 0.01},
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
    method = make_method(name, LEARNING.get(name, {"epochs": 8} if name not in UNTRAINED else {}))
    task = base_task(order)
    method.fit_base(task)
    assert method.seen == BASE
    with torch.no_grad():
        predicted = method.logits(task.images).argmax(1)
    assert (predicted == task.labels).double().mean() > 0.6  # chance is 1/6
    assert (method.trainable_parameters() > 0) == (name not in UNTRAINED)


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
    assert bool(differing(states[0], states[2])) == (name not in UNTRAINED)  # nothing random in those
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


# ---- what a run costs ----------------------------------------------------------------------------------------------


class Trained(Method):
    """A method of another package that says nothing of its cost: trained adapters, then class means."""

    @dataclass(frozen=True)
    class Options:
        epochs: int = 3

    def fit_base(self, task):
        lora = initial_lora(self.backbone.depth, self.backbone.dim, 2, 1, self.runtime.generator("lora"))
        for epoch in range(self.options.epochs):
            features = self.backbone(task.images.augmented(torch.arange(len(task.labels)), epoch), lora)[0]
            cosine(features, torch.eye(len(task.classes), features.shape[1])).sum().backward()
        self.learn(task)

    def learn(self, task):
        self.count_classes(task)
        features = self.extract(task.images, self.backbone)
        fresh = class_means(features, task.labels, self.seen)
        self.means = torch.cat([self.means, fresh[len(self.means) :]]) if task.index else fresh

    def logits(self, images):
        return cosine(self.extract(images, self.backbone), self.means)


class Untrained(Trained):
    """The same without training and without options, on features that stay."""

    Options = NoOptions
    features_fixed = True
    fit_base = Trained.learn
    logits = Method.logits

    def features(self, images):
        return self.extract(images, self.backbone)

    def logits_from(self, features):
        return cosine(features, self.means)


def count_passes(backbone: Backbone) -> list[float]:
    """A list that grows with every pass through the backbone or a copy of it: forward as 1, backward as TRAINING − 1.

    Counted block by block, as some methods mix images half way or share the first half.
    """
    counted: list[float] = []

    def forward(module, inputs, output):
        share = len(output) / backbone.depth
        counted.append(share)
        if output.requires_grad:
            output.register_hook(lambda gradient: counted.append((TRAINING - 1) * share))

    for block in backbone.vit.blocks:
        block.mlp.register_forward_hook(forward)
    return counted


def run_whole(method: Method) -> None:
    """A stream as `fscil run` goes through it, testing after every task on the classes known."""
    images, labels = make_images(seed=1)
    method.fit_base(base_task())
    if method.features_fixed:
        method.features(images)
    for task in [None, *few_shot_tasks()]:
        if task is not None:
            method.learn(task)
        if not method.features_fixed:
            method.logits(images.select((labels < method.seen).nonzero().squeeze(1)))


SIZES = Sizes(images=(6 * BASE, 9, 1), classes=(BASE, 3, 1), tests=(8 * BASE, 8 * 9, 8 * CLASSES))


def cost(name: str, **options) -> tuple[float, float]:
    """(passes that a method says a run takes, passes that it took)."""
    backbone = make_backbone()
    counted = count_passes(backbone)
    method = make_method(name, options, backbone.prepare(Runtime()))
    run_whole(method)
    return type(method).passes(method.options, SIZES), sum(counted)


@every_method
def test_every_method_says_what_a_run_of_it_costs(name):
    said, counted = cost(name)
    assert 0.5 < said / counted < 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smp", {"views": None}), ("smp", {"merge": "average"}), ("mpcc", {}), ("miam", {}),
        ("closed_form", {"closed_form_views": 5}), ("icarl", {"distillation": 0.0, "learn_epochs": 10}),
        ("icarl", {"memory": "total", "total": 12}), ("foster", {"boosting_epochs": 9}),
        ("foster_student", {"compression_epochs": 9}), ("cec", {"pseudo_classes": False}),
        ("cec", {"episode_epochs": 20}), ("dualprompt", {}), ("codap_plus", {}), ("clom", {}), ("asp", {}),
        ("fact", {"epochs": 10}), ("teen", {}), ("l2p", {"few_shot_epochs": 30}),
        ("asp", {"anchor_weight": 0.0}), ("adbs", {}), ("adbs", {"learn_views": "plain"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_method_says_follows_its_options(name, options):
    said, counted = cost(name, **options)
    assert said == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("cls", [Trained, Untrained])
def test_methods_of_other_packages_have_a_fair_default(cls):
    backbone = make_backbone()
    counted = count_passes(backbone)
    method = cls(backbone, cls.Options(), Runtime())
    run_whole(method)
    assert cls.passes(method.options, SIZES) == pytest.approx(sum(counted))
