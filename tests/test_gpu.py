"""What only runs on a CUDA device: padded ranks, fused operators, graphs, compilation and bf16, against the CPU.

Compiling a block takes seconds for every shape it is called with, so only the tests that are about it do: adapters in
training, Fisher passes, and two whole methods, sixteen graphs in all. The others run the same code uncompiled.
"""

import dataclasses
import functools

import pytest
import torch

from fscil import registry
from fscil.backbones.lora import initial_lora
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.heads import mpcc
from fscil.heads.base import Lesson
from fscil.maths.fisher import batch_square, sample_square
from fscil.methods.base import Method
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec, fisher_information
from fscil.methods.training import Schedule
from fscil.runtime import Runtime
from head_world import BASE, DIM, base_lesson, lesson
from tiny_world import base_task, few_shot_tasks, make_backbone, make_images, make_method

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
RATE = 0.1  # at 0.5 a change of the weights by one part in a million changes the result by more than is allowed here
SPECS = [AdapterSpec(0.0), AdapterSpec(0.2), AdapterSpec(0.0, 1.0, learnable=True)]


def on_gpu(task: Task) -> Task:
    images = task.images
    pixels = Pixels(images.store.to(DEVICE), images.transform, images.seed, images.indices, device=DEVICE)
    return dataclasses.replace(task, images=pixels)


def trained(device: str, task: Task, batch_size: int = 8, compile: str = "off"):
    place = Runtime.make(device, precision="fp32", seed=1, compile=compile)
    backbone = make_backbone().prepare(place)
    plan = AdapterPlan(tuple(SPECS), 3, "sparse", Schedule(3, batch_size, RATE, 5e-4))
    streams = plan.train(backbone, task, place)
    return place, backbone, streams


@functools.cache
def trained_on_cpu(batch_size: int):
    return trained("cpu", base_task(), batch_size)


def learn(method: Method, tasks: list[Task]) -> None:
    for number, task in enumerate(tasks):
        (method.learn if number else method.fit_base)(on_gpu(task))
    logits = method.logits(on_gpu(base_task()).images)
    classes = sum(len(task.classes) for task in tasks)
    assert logits.shape == (len(base_task().labels), classes) and bool(torch.isfinite(logits).all())


def everything() -> list[Task]:
    return [base_task(), *few_shot_tasks()]


def test_images_are_cropped_and_resized_as_on_the_cpu():
    task = base_task()
    positions = torch.arange(8)
    for ours, theirs in (
        (on_gpu(task).images.plain(positions), task.images.plain(positions)),
        (on_gpu(task).images.augmented(positions, 2), task.images.augmented(positions, 2)),
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


def test_features_through_fused_adapters_are_those_of_the_cpu():
    backbone, lora = make_backbone(), initial_lora(2, 16, 3, 2, torch.Generator().manual_seed(0))
    lora.B.data.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    images = make_images()[0].plain(torch.arange(6))
    expected = backbone(images, lora)
    torch.testing.assert_close(
        make_backbone().to(DEVICE)(images.to(DEVICE), lora.to(DEVICE)).cpu(), expected, rtol=1e-4, atol=1e-4
    )


# Of the 36 images batches of 8 leave a last one that no captured graph fits; batches of 9 are one shape to compile.
@pytest.mark.parametrize(("compile", "batch_size"), [("off", 8), ("on", 9)])
def test_captured_training_gives_what_the_cpu_gives(compile, batch_size):
    _, _, expected = trained_on_cpu(batch_size)
    _, _, found = trained(DEVICE, on_gpu(base_task()), batch_size, compile)
    for name in ("rows", "scales"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found.lora.dense().cpu(), expected.lora.dense(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("form", "compile"), [("batch", "off"), ("sample", "off"), ("sample", "on")])
def test_fisher_passes_give_what_the_cpu_gives(form, compile):
    place, backbone, streams = trained_on_cpu(8)
    expected = fisher_information(backbone, streams, base_task(), 8, form, place)
    gpu = Runtime.make(DEVICE, precision="fp32", seed=1, compile=compile)
    there = dataclasses.replace(streams, rows=streams.rows.to(DEVICE), scales=streams.scales.to(DEVICE))
    there.lora = streams.lora.select(0, 1, 2).to(DEVICE)
    found = fisher_information(make_backbone().prepare(gpu), there, on_gpu(base_task()), 8, form, gpu)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("square", [batch_square, sample_square])
def test_products_of_bf16_values_are_summed_in_float32(square):
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 5, 7, width, generator=draw).bfloat16() for width in (16, 32))
    found = square(x.to(DEVICE), g.to(DEVICE))
    assert found.dtype == torch.float32
    per_sample = torch.einsum("sbte,sbtd->sbed", g.double(), x.double())
    expected = per_sample.sum(1) ** 2 if square is batch_square else (per_sample**2).sum(1)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def taught_mpcc(device: str) -> mpcc.MPCC:
    head = mpcc.MPCC(DIM, mpcc.MPCCOptions(lr=RATE), Runtime.make(device, precision="fp32", seed=1))

    def there(given: Lesson) -> Lesson:
        features, labels = given.features.to(device), given.labels.to(device)
        return dataclasses.replace(
            given, features=features, labels=labels, views=lambda *asked: given.views(*asked).to(device)
        )

    head.fit(there(base_lesson()))
    head.teach(there(lesson([BASE, BASE + 1], 5, number=1)))
    return head


# An epoch is eight batches, of which the last is larger: replayed steps and eager ones take turns.
def test_mpcc_calibrates_by_replayed_steps_as_on_the_cpu(monkeypatch):
    epochs, draw = [], mpcc.embedding_batches

    def drawn(*inputs):
        epochs.append(list(draw(*inputs)))
        return epochs[-1]

    monkeypatch.setattr(mpcc, "embedding_batches", drawn)
    expected = taught_mpcc("cpu")
    assert len({len(x) for x, _ in epochs[0]}) == 2
    same = iter(epochs)  # draws of a GPU are its own
    monkeypatch.setattr(mpcc, "embedding_batches", lambda *_: [(x.to(DEVICE), y.to(DEVICE)) for x, y in next(same)])
    found = taught_mpcc(DEVICE)
    assert expected.diagnostics["row_rotation_degrees"] > 1
    torch.testing.assert_close(found.rows.cpu(), expected.rows, rtol=1e-3, atol=1e-4)


KINDS = {registry.method_class(name): name for name in sorted(registry.METHODS)}  # one of each: others change options


@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_a_method_of_every_kind_learns_in_bf16_with_graphs(name):
    place = Runtime.make(DEVICE, precision="bf16", seed=1, compile="off")
    plain = make_backbone().prepare(place)
    place.compile = True  # the method fills its batches up as for compiled blocks
    learn(make_method(name, backbone=plain, **vars(place)), everything())


# Adapters and Fisher passes; prefixes and a plain query. Of tasks, those whose images fill batches of nine: every other
# number of images is two more graphs to compile.
@pytest.mark.parametrize(("name", "tasks"), [("smp", 2), ("dualprompt", 1)])
def test_methods_learn_in_bf16_through_compiled_blocks(name, tasks):
    place = Runtime.make(DEVICE, precision="bf16", seed=1, batch_size_eval=9)  # as few shapes as there can be
    assert place.compile and place.cuda_graphs
    learn(
        make_method(name, {"batch_size": 9}, backbone=make_backbone().prepare(place), **vars(place)),
        everything()[:tasks],
    )
