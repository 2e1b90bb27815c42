"""Adapter sets of several seeds in one pass, against trainings one after the other."""

import math
from dataclasses import replace

import pytest
import torch

from fscil.backbones.lora import initial_lora
from fscil.maths.margins import margin_loss, streams_loss
from fscil.methods.families import adapter_sets
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec, Base, train_for_seeds
from fscil.methods.training import Schedule
from fscil.runtime import Keeper, Runtime
from tiny_world import base_task, make_backbone, make_images

SEEDS = (2023, 2024, 7)
SPECS = (AdapterSpec(0.0), AdapterSpec(0.2), AdapterSpec(0.0, 1.0, learnable=True))
PLAN = AdapterPlan(SPECS, rank=2, init="sparse", schedule=Schedule(2, 8, 0.05, 5e-4))


def bases(dtype=torch.float64, **services):
    """The same images under every seed; the last batch of an epoch is a smaller one."""
    first = Base(base_task(), Runtime(dtype=dtype, seed=SEEDS[0], **services))
    first = replace(first, task=replace(first.task, images=first.task.images.reseeded(SEEDS[0])))
    return [first, *(first.reseeded(seed) for seed in SEEDS[1:])]


def backbone(dtype=torch.float64):
    return make_backbone().prepare(Runtime(dtype=dtype))


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_seeds_side_by_side_are_what_each_is_alone(micro_batch):
    together = train_for_seeds(backbone(), bases(micro_batch=micro_batch), PLAN)
    for base, sets in zip(bases(), together, strict=True):
        alone = PLAN.train(backbone(), base.task, base.runtime)
        for name in ("rows", "scales"):
            torch.testing.assert_close(getattr(sets, name), getattr(alone, name), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sets.lora.dense(), alone.lora.dense(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together[0].rows, together[1].rows, atol=1e-3)  # the seeds do differ


def test_groups_of_images_pass_through_their_own_sets():
    vit, lora = backbone(), initial_lora(2, 16, 3, 4, torch.Generator().manual_seed(0), dtype=torch.float64)
    lora.B.data.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    images = make_images()[0].plain(torch.arange(10)).double()
    features = vit(images, lora, groups=2)
    for stream in range(4):
        own = images[:5] if stream < 2 else images[5:]
        torch.testing.assert_close(features[stream], vit(own, lora.select(stream))[0], rtol=1e-12, atol=1e-12)


def test_every_stream_may_have_labels_of_its_own():
    draw = torch.Generator().manual_seed(0)
    features, rows = torch.randn(3, 5, 4, generator=draw), torch.randn(3, 6, 4, generator=draw)
    labels = torch.randint(6, (3, 5), generator=draw)
    scales, margins = torch.tensor([16.0, 1.0, 4.0]), torch.tensor([0.0, 0.2, -0.1])
    for number, loss in enumerate(streams_loss(features, rows, labels, scales, margins)):
        own = margin_loss(features[number], rows[number], labels[number], scales[number], margins[number])
        assert math.isclose(float(loss), float(own), rel_tol=1e-5)


def test_only_what_the_shelf_lacks_of_any_seed_is_trained(tmp_path, monkeypatch):
    from fscil.experiments.shelf import DiskShelf

    trained, original = [], adapter_sets._train

    def counted(backbone, bases, plan, *rest):
        trained.append(([base.runtime.seed for base in bases], len(plan.specs)))
        return original(backbone, bases, plan, *rest)

    monkeypatch.setattr(adapter_sets, "_train", counted)
    shelf, some = DiskShelf(tmp_path), replace(PLAN, specs=SPECS[:1])
    first = bases(shelf=shelf)
    alone = some.train(backbone(), first[1].task, first[1].runtime)
    sets = train_for_seeds(backbone(), first, some)
    assert trained == [([SEEDS[1]], 1), ([SEEDS[0], SEEDS[2]], 1)]
    assert torch.equal(sets[1].rows, alone.rows)
    train_for_seeds(backbone(), first, PLAN)
    assert trained[2:] == [(list(SEEDS), 2)]
    again = PLAN.train(backbone(), first[2].task, first[2].runtime)  # as a run that comes later does
    assert len(trained) == 3 and torch.equal(again.rows[0], sets[2].rows[0])


class KeepsAll(Keeper):
    """Progress of every stage, as a folder would keep it."""

    def __init__(self):
        self.stages = {}

    def load(self, stage):
        return self.stages.get(stage)

    def save(self, stage, tensors):
        self.stages[stage] = {name: tensor.clone() for name, tensor in tensors.items()}


def test_seeds_that_do_not_fit_into_memory_take_turns(monkeypatch):
    """Each pass keeps its progress under its own name, or the second would take the first's for its own."""
    original = adapter_sets._train

    def small(backbone, bases, *rest):
        if len(bases) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(backbone, bases, *rest)

    together = train_for_seeds(backbone(), bases(), PLAN)
    monkeypatch.setattr(adapter_sets, "_train", small)
    keeper = KeepsAll()
    apart = train_for_seeds(backbone(), bases(keeper=keeper), PLAN)
    assert len(keeper.stages) == len(SEEDS)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one.rows, other.rows, rtol=1e-12, atol=1e-12)


def test_a_pass_that_was_stopped_goes_on():
    constant = replace(PLAN, schedule=replace(PLAN.schedule, decay="constant"))  # or a shorter one has other rates
    keeper = KeepsAll()
    whole = train_for_seeds(backbone(), bases(), constant)
    train_for_seeds(backbone(), bases(keeper=keeper), replace(constant, schedule=replace(constant.schedule, epochs=1)))
    (kept,) = keeper.stages.values()
    assert int(kept["epoch"]) == 1
    rest = train_for_seeds(backbone(), bases(keeper=keeper), constant)
    for one, other in zip(whole, rest, strict=True):
        assert torch.equal(one.rows, other.rows)
