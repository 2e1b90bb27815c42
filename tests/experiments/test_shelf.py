"""The shelf: what is shared is trained once, also by several processes, and gives what separate training gives."""

import multiprocessing
import time

import pytest
import torch

from fscil.experiments.shelf import DiskShelf
from fscil.methods.families import adapter_sets as adapters
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec, fisher_norms
from fscil.methods.training import Schedule
from fscil.runtime import Runtime
from tiny_world import base_task, make_backbone

KEY = {"part": "adapter", "seed": 1, "schedule": {"milestones": (1, 2), "lr": 0.1}}


@pytest.fixture
def shelf(tmp_path):
    return DiskShelf(tmp_path / "shelf")


def test_a_part_comes_back_bit_for_bit_and_under_its_own_key_alone(shelf):
    part = {"A": torch.randn(3, 4), "n": torch.arange(3)}
    shelf.put(KEY, part)
    again = DiskShelf(shelf.folder)
    found = again.get(dict(reversed(KEY.items())))
    assert set(found) == {"A", "n"} and all(torch.equal(found[name], part[name]) for name in part)
    assert again.hits == 1
    assert again.get({**KEY, "seed": 2}) is None
    assert again.hits == 1


def test_a_part_that_other_code_made_is_made_again(shelf, monkeypatch):
    shelf.put(KEY, {"A": torch.ones(2)})
    monkeypatch.setattr("fscil.experiments.shelf.code_of_rooms", lambda: "changed since")
    assert shelf.get(KEY) is None and shelf.hits == 0


def test_a_damaged_part_is_made_again(shelf):
    shelf.put(KEY, {"A": torch.ones(2)})
    path = shelf.path(KEY)
    path.write_bytes(path.read_bytes()[:20])
    assert shelf.get(KEY) is None
    shelf.put(KEY, {"A": torch.zeros(2)})
    assert torch.equal(shelf.get(KEY)["A"], torch.zeros(2))


def _make_parts(folder, names, made, start):
    """Wants parts in its own order; writes down which of them it had to make."""
    shelf = DiskShelf(folder)
    keys = [{"part": name} for name in names]
    start.wait()
    with shelf.reserve(keys):
        for key in keys:
            if shelf.get(key) is None:
                time.sleep(0.2)
                shelf.put(key, {"x": torch.ones(1)})
                made.put(key["part"])


def test_processes_make_each_part_once_and_do_not_wait_for_each_other_in_a_circle(tmp_path):
    context = multiprocessing.get_context("spawn")
    made, start = context.Queue(), context.Event()
    orders = (["a", "b"], ["b", "a"], ["b"])
    workers = [context.Process(target=_make_parts, args=(tmp_path, order, made, start)) for order in orders]
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sorted(made.get(timeout=5) for _ in range(2)) == ["a", "b"]
    assert made.empty()


def plan(*specs):
    return AdapterPlan(specs, rank=2, init="sparse", schedule=Schedule(2, 8, 0.05, 5e-4))


def test_a_set_is_the_same_whoever_it_was_trained_with(shelf):
    """Sets share no parameter and see the same batches, so company changes rounding alone (float64: 1e-12)."""
    place = dict(dtype=torch.float64)
    backbone, task = make_backbone().prepare(Runtime(**place)), base_task()
    margins = [AdapterSpec(0.0), AdapterSpec(0.1), AdapterSpec(0.2), AdapterSpec(0.0, 1.0, learnable=True)]
    together = plan(*margins).train(backbone, task, Runtime(**place))
    for number, spec in enumerate(margins):
        alone = plan(spec).train(backbone, task, Runtime(**place))
        torch.testing.assert_close(together.lora.A[:, number], alone.lora.A[:, 0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together.rows[number], alone.rows[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together.scales[number], alone.scales[0], rtol=1e-12, atol=1e-12)


def test_only_what_the_shelf_lacks_is_trained(shelf, monkeypatch):
    trained = []
    original = adapters._train

    def counted(backbone, task, plan, runtime):
        trained.append(list(plan.specs))
        return original(backbone, task, plan, runtime)

    monkeypatch.setattr(adapters, "_train", counted)
    backbone, task = make_backbone().prepare(Runtime()), base_task()
    g, low, high = AdapterSpec(0.0), AdapterSpec(0.1), AdapterSpec(0.2)
    first = plan(g, high).train(backbone, task, Runtime(shelf=shelf))
    second = plan(g, low).train(backbone, task, Runtime(shelf=shelf))
    assert trained == [[g, high], [low]]
    assert torch.equal(first.lora.A[:, 0], second.lora.A[:, 0])
    plan(g, low).train(backbone, task, Runtime(shelf=shelf, seed=7))  # another seed is another part
    assert trained[-1] == [g, low]


def test_fisher_norms_from_the_shelf_are_those_of_a_whole_pass(shelf, monkeypatch):
    backbone, task = make_backbone().prepare(Runtime()), base_task()
    streams = plan(AdapterSpec(0.0), AdapterSpec(0.2)).train(backbone, task, Runtime())
    expected = fisher_norms(backbone, streams, task, 8, "batch", Runtime())
    fisher_norms(backbone, streams.select(0), task, 8, "batch", Runtime(shelf=shelf))
    sizes = []
    original = adapters.fisher_information
    monkeypatch.setattr(
        adapters, "fisher_information", lambda b, s, *rest: sizes.append(s.lora.sets) or original(b, s, *rest)
    )
    found = fisher_norms(backbone, streams, task, 8, "batch", Runtime(shelf=shelf))
    assert sizes == [1]  # set d alone: set g was there
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
