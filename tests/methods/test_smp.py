"""SMP against the literal reference (tests/reference_smp.py), and its invariants."""

import copy
import hashlib
from dataclasses import replace

import pytest
import torch

import reference_smp as reference
from fscil.backbones.lora import initial_lora
from fscil.backbones.vit import Backbone
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform
from fscil.heads import embeddings
from fscil.methods.families.adapter_sets import (
    PLAIN_STAGE,
    AdapterPlan,
    AdapterSpec,
    fisher_information,
    initial_rows,
)
from fscil.methods.represented import view_key
from fscil.methods.smp.method import SMP, SMPOptions
from fscil.methods.training import Schedule
from fscil.runtime import Runtime
from tiny_world import make_vit

DIM, DEPTH, RANK, BASE = 16, 2, 3, 4
RUNTIME = Runtime(dtype=torch.float64)


@pytest.fixture(scope="module")
def vit():
    return make_vit(embed_dim=DIM, depth=DEPTH).double()


@pytest.fixture(scope="module")
def tasks():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (60, 20, 20, 3), dtype=torch.uint8, generator=generator)
    pixels = Pixels(ImageStore.from_array(images), Transform(size=16, resize=18), seed=3)
    base = Task(0, tuple(range(BASE)), pixels.select(range(40)), torch.arange(40) % BASE)
    first = Task(1, (4, 5), pixels.select(range(40, 46)), torch.tensor([4, 4, 4, 5, 5, 5]))
    second = Task(2, (6, 7), pixels.select(range(46, 52)), torch.tensor([6, 6, 6, 7, 7, 7]))
    return [base, first, second]


def options(**changes):
    return SMPOptions(**{"rank": RANK, "epochs": 2, "batch_size": 8, "lr": 0.5, "covariance_form": "full", **changes})


def learner(vit, chosen, runtime=RUNTIME):
    return SMP(Backbone(copy.deepcopy(vit), "tiny"), chosen, runtime)


def run(vit, tasks, chosen, runtime=RUNTIME):
    method = learner(vit, chosen, runtime)
    method.fit_base(tasks[0])
    for task in tasks[1:]:
        method.learn(task)
    return method


def run_reference(vit, tasks, fisher):
    """Drives the reference with the package's initial values, batches, views, draws and shuffles."""
    base = tasks[0]
    start = initial_lora(DEPTH, DIM, RANK, 1, RUNTIME.generator("lora"), dtype=torch.float64)
    lora = [
        {f"{m}_{p}": getattr(start, m)[layer, 0, i].detach() for m in "AB" for i, p in enumerate("kv")}
        for layer in range(DEPTH)
    ]
    orders = [torch.randperm(40, generator=RUNTIME.generator(PLAIN_STAGE, "order", e)) for e in range(2)]
    epochs = [
        [(base.images.augmented(p, e).double(), base.labels[p]) for p in order.split(8)]
        for e, order in enumerate(orders)
    ]
    grouped = torch.argsort(base.labels, stable=True)
    base_task = reference.BaseTask(epochs, base.images.plain(grouped).double(), base.labels[grouped])

    def few_shot(task):
        def view(epoch, number):
            return task.images.augmented(torch.arange(6), view_key(task.index, number + 1000 * epoch)).double()

        return reference.FewShotTask(task.images.plain().double(), task.labels, view)

    def draws(session, epoch, label, group, count):
        known = BASE + 2 * (session - 1)
        z = RUNTIME.randn((known, 512, DIM), "mpcc", "z", session, epoch, dtype=torch.float64)[label]
        return z[256:] if label < BASE and group == "classifier" else z[:count]

    def shuffle(session, epoch, count):
        return torch.randperm(count, generator=RUNTIME.generator("mpcc", "order", session, epoch))

    hyper = reference.Hyper(base_lr=0.5, fisher=fisher, fisher_batch=8)
    head = initial_rows(BASE, DIM, RUNTIME)
    return reference.reference_smp(vit, base_task, lora, head, [few_shot(t) for t in tasks[1:]], draws, shuffle, hyper)


@pytest.mark.parametrize("fisher", ["batch", "sample"])
def test_package_equals_the_literal_reference(vit, tasks, fisher):
    base, sessions = run_reference(vit, tasks, fisher)
    method = learner(vit, options(fisher=fisher))
    streams = AdapterPlan((AdapterSpec(0.0), AdapterSpec(0.2)), RANK, "sparse", Schedule(2, 8, 0.5, 5e-4)).train(
        method.backbone, tasks[0], RUNTIME
    )
    for place, name in enumerate("gd"):
        for layer in range(DEPTH):
            for part, letter in enumerate("kv"):
                for matrix in "AB":
                    ours = getattr(streams.lora, matrix)[layer, place, part]
                    torch.testing.assert_close(ours, base.lora[name][layer][f"{matrix}_{letter}"], rtol=0, atol=1e-6)
        torch.testing.assert_close(streams.rows[place], base.heads[name], rtol=0, atol=1e-6)
    method.fit_base(tasks[0])
    norms, weights = (torch.tensor(method.diagnostics()[k]) for k in ("fisher_norms", "merge_weights"))
    for layer in range(DEPTH):
        for part, letter in enumerate("kv"):
            for place, name in enumerate("gd"):
                slot = (layer, letter)
                assert float(norms[layer, place, part]) == pytest.approx(base.fisher[name][slot], rel=1e-6)
                assert float(weights[layer, place, part]) == pytest.approx(base.weights[name][slot], abs=1e-6)
            torch.testing.assert_close(
                method.lora.dense()[layer, 0, part], base.deltas[(layer, letter)], rtol=0, atol=1e-6
            )
    torch.testing.assert_close(method.head.prototypes, base.prototypes, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        method.head.roots.covariance(torch.arange(BASE)), torch.stack(list(base.covariances)), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(method.head.rows, sessions[0].rows, rtol=0, atol=1e-6)
    for task, expected in zip(tasks[1:], sessions[1:], strict=True):
        method.learn(task)
        torch.testing.assert_close(method.head.rows, expected.rows, rtol=0, atol=1e-6)
        assert method.head.donor.tolist() == list(expected.covariance_of)


def test_closed_form_equals_the_naive_loops(vit, tasks):
    method = run(vit, tasks, options(calibration="closed_form"))
    features = {int(label): [] for task in tasks for label in task.labels}
    for task in tasks:
        for feature, label in zip(method.features(task.images), task.labels, strict=True):
            features[int(label)].append(feature)
    grouped = [torch.stack(features[label]) for label in range(8)]
    queries = torch.cat(grouped)
    expected = reference.reference_closed_form(grouped[:BASE], grouped[BASE:], queries)
    torch.testing.assert_close(method.logits_from(queries), expected, rtol=1e-8, atol=1e-8)


def test_only_the_classifier_changes_in_few_shot_tasks(vit, tasks):
    method = learner(vit, options())
    method.fit_base(tasks[0])

    def fingerprint():
        tensors = [
            *method.backbone.state_dict().values(),
            method.lora.A,
            method.lora.B,
            method.head.roots_packed,
            method.trained_rows,
        ]
        return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()

    before = fingerprint()
    prototypes = method.head.prototypes.clone()
    method.learn(tasks[1])
    assert fingerprint() == before
    assert torch.equal(method.head.prototypes[:BASE], prototypes)
    assert method.diagnostics()["row_rotation_degrees"] > 0.1


def test_joint_training_equals_separate_trainings(vit, tasks):
    specs = [AdapterSpec(0.0), AdapterSpec(0.2), AdapterSpec(0.0, 1.0, True)]
    schedule = Schedule(2, 8, 0.5, 5e-4)
    backbone = Backbone(copy.deepcopy(vit), "tiny")

    joint = AdapterPlan(tuple(specs), RANK, "sparse", schedule).train(backbone, tasks[0], RUNTIME)
    apart = AdapterPlan(tuple(specs), RANK, "sparse", schedule).train(backbone, tasks[0], RUNTIME, joint=False)
    torch.testing.assert_close(joint.lora.A, apart.lora.A, rtol=0, atol=1e-10)
    torch.testing.assert_close(joint.lora.B, apart.lora.B, rtol=0, atol=1e-10)
    torch.testing.assert_close(joint.rows, apart.rows, rtol=0, atol=1e-10)
    torch.testing.assert_close(joint.scales, apart.scales, rtol=0, atol=1e-10)
    assert joint.scales[2] != 1.0
    assert joint.scales[:2].tolist() == [16.0, 16.0]


def test_sequential_option_gives_the_joint_result(vit, tasks):
    joint, apart = (run(vit, tasks[:1], options(training=t)) for t in ("joint", "sequential"))
    torch.testing.assert_close(joint.head.prototypes, apart.head.prototypes, rtol=0, atol=1e-10)
    torch.testing.assert_close(joint.lora.A, apart.lora.A, rtol=0, atol=1e-10)


def test_two_identical_sets_merge_to_themselves(vit, tasks):
    method = learner(vit, options(margin=0.0))
    method.fit_base(tasks[0])
    weights = torch.tensor(method.diagnostics()["merge_weights"])
    torch.testing.assert_close(weights, torch.full_like(weights, 0.5), rtol=0, atol=1e-12)
    single = run(vit, tasks[:1], options(margin=0.0, adapters="one"))
    assert method.lora.rank == 2 * RANK
    torch.testing.assert_close(method.lora.dense(), single.lora.dense(), rtol=0, atol=1e-12)


def test_merge_weights_sum_to_one_in_every_slot(vit, tasks):
    method = run(vit, tasks[:1], options())
    weights = torch.tensor(method.diagnostics()["merge_weights"])
    assert weights.shape == (DEPTH, 2, 2)
    torch.testing.assert_close(weights.sum(1), torch.ones(DEPTH, 2))
    assert ((weights > 0) & (weights < 1)).all()


def test_fisher_pass_leaves_the_model_as_it_was(vit, tasks):
    backbone = Backbone(copy.deepcopy(vit), "tiny")
    streams = AdapterPlan((AdapterSpec(0.0), AdapterSpec(0.2)), RANK, "sparse", Schedule(1, 8, 0.5)).train(
        backbone, tasks[0], RUNTIME
    )
    before = [streams.lora.A.clone(), streams.lora.B.clone(), streams.rows.clone()]
    fisher = fisher_information(backbone, streams, tasks[0], 8, "sample", RUNTIME)
    assert (fisher >= 0).all()
    for old, new in zip(before, [streams.lora.A, streams.lora.B, streams.rows], strict=True):
        assert torch.equal(old, new)
    assert not any(p.requires_grad for p in [*backbone.parameters(), streams.lora.A, streams.lora.B])
    one_by_one = fisher_information(backbone, streams, tasks[0], 1, "batch", RUNTIME)
    torch.testing.assert_close(fisher, one_by_one)  # squared batch means of single images are the per-sample form


@pytest.mark.parametrize("form", ["batch", "sample"])
def test_a_last_batch_filled_up_for_compiled_passes_adds_nothing(vit, tasks, form):
    backbone = Backbone(copy.deepcopy(vit), "tiny")
    plan = [AdapterSpec(0.0), AdapterSpec(0.2)]
    streams = AdapterPlan(tuple(plan), RANK, "sparse", Schedule(1, 8, 0.5)).train(backbone, tasks[0], RUNTIME)
    size = len(tasks[0].labels) // 3 - 1
    assert len(tasks[0].labels) % size and len(tasks[0].labels) % (2 * size)  # batches of unequal size
    padded = fisher_information(backbone, streams, tasks[0], size, form, replace(RUNTIME, compile=True))
    torch.testing.assert_close(padded, fisher_information(backbone, streams, tasks[0], size, form, RUNTIME))


def test_embedding_set_is_balanced(vit, tasks):
    method = learner(vit, options(calibration_epochs=1))
    method.fit_base(tasks[0])
    method.learn(tasks[1])
    method.count_classes(tasks[2])
    method.head.prototypes = torch.cat([method.head.prototypes, method.head.prototypes[:2]])
    method.head.rows = torch.cat([method.head.rows, method.head.rows[:2]])
    method.head._borrow(6)
    real = method.head._real_features(method.lesson(tasks[2]), 0)
    known = method.head.known_classes(torch.tensor([6, 7]), method.trained_rows)
    batches = list(embeddings.embedding_batches(known, real, method.head.options, RUNTIME, 2, 0))
    counts = torch.bincount(torch.cat([y for _, y in batches]))
    assert counts.tolist() == [256] * 6 + [258] * 2  # ceil(256 / 3) · 3
    assert len(batches) == 8  # one step per class seen
    assert [len(y) for _, y in batches] == [256] * 7 + [256 + 4]


def test_exact_option_truncates_real_features(vit, tasks):
    method = learner(vit, options(real_features="exact"))
    method.fit_base(tasks[0])
    method.count_classes(tasks[1])
    _, targets = method.head._real_features(method.lesson(tasks[1]), 0)
    assert torch.bincount(targets)[BASE:].tolist() == [256, 256]


def test_cached_views_fill_the_same_share(vit, tasks):
    method = learner(vit, options(views=4))
    method.fit_base(tasks[0])
    method.count_classes(tasks[1])
    features, targets = method.head._real_features(method.lesson(tasks[1]), 0)
    assert torch.bincount(targets)[BASE:].tolist() == [258, 258]
    assert len(torch.unique(features, dim=0)) == 4 * 6


def test_uneven_shots_are_balanced(vit, tasks):
    base = tasks[0]
    uneven = Task(1, (4, 5), tasks[1].images.select(range(5)), torch.tensor([4, 5, 5, 5, 5]))
    method = learner(vit, options(calibration_epochs=1))
    method.fit_base(base)
    method.count_classes(uneven)
    _, targets = method.head._real_features(method.lesson(uneven), 0)
    assert torch.bincount(targets)[BASE:].tolist() == [256, 256]


def test_streamed_draws_have_the_same_moments(vit, tasks, monkeypatch):
    method = learner(vit, options(density_filter=False, second_centre="off"))
    method.fit_base(tasks[0])
    method.count_classes(tasks[1])
    method.head.prototypes = torch.cat([method.head.prototypes, method.head.prototypes[:2]])
    method.head._borrow(4)
    monkeypatch.setattr(embeddings, "EPOCH_SET_BYTES", 0)
    none = (torch.zeros(0, DIM, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    known, o = method.head.known_classes(torch.tensor([4, 5]), method.trained_rows), method.head.options
    epochs = (embeddings.embedding_batches(known, none, o, RUNTIME, 1, epoch) for epoch in range(60))
    x, y = zip(*(batch for epoch in epochs for batch in epoch), strict=True)
    x, y = torch.cat(x), torch.cat(y)
    for label in range(BASE):
        own = x[y == label]
        assert len(own) == 60 * 256
        torch.testing.assert_close(own.mean(0), method.head.prototypes[label], rtol=0, atol=0.05)
        expected = method.head.roots.covariance(torch.tensor([label]))[0]
        assert (torch.cov(own.T) - expected).norm() / expected.norm() < 0.05


def test_streamed_draws_do_not_depend_on_how_many_are_made_at_once(vit, tasks, monkeypatch):
    method = learner(vit, options())
    method.fit_base(tasks[0])
    method.count_classes(tasks[1])
    real = (torch.randn(50, DIM, dtype=torch.float64), torch.arange(50) % 2 + 2)
    known, o = method.head.known_classes(torch.tensor([2, 3]), method.trained_rows), method.head.options
    monkeypatch.setattr(embeddings, "EPOCH_SET_BYTES", 0)
    epochs = []
    for size in (1, 2**29):
        monkeypatch.setattr(embeddings, "PART_BYTES", size)
        epochs.append(list(embeddings.embedding_batches(known, real, o, RUNTIME, 1, 0)))
    assert len(epochs[0]) == len(epochs[1]) > 1
    for (x, y), (other, labels) in zip(*epochs, strict=True):
        assert torch.equal(y, labels) and set(y.tolist()) <= set(range(4))
        torch.testing.assert_close(x, other, rtol=0, atol=1e-12)


def test_options_of_section_9_change_the_outcome(vit, tasks):
    """Each open choice is a switch that does something: another value, another classifier or other prototypes."""
    standard = run(vit, tasks[:2], options(calibration_epochs=1))
    changed = {
        "lora_init": "zeros",
        "merge": "average",
        "fisher": "sample",
        "fisher_head": "d",
        "prototype_views": "train",
        "rows": "raw",
        "covariance": "biased",
        "second_centre": "off",
        "density_filter": False,
        "initial_classifier": "trained",
        "calibration_margin": 0.0,
        "real_features": "exact",
    }
    for name, value in changed.items():
        other = run(vit, tasks[:2], options(calibration_epochs=1, **{name: value}))
        assert not torch.allclose(other.head.rows, standard.head.rows, rtol=0, atol=1e-12), name


def test_state_round_trip_and_same_seed(vit, tasks):
    method = run(vit, tasks[:2], options(calibration_epochs=1))
    copied = learner(vit, options(calibration_epochs=1))
    copied.load_state({name: tensor.clone() for name, tensor in method.state().items()})
    for continued in (method, copied):
        continued.learn(tasks[2])
    assert torch.equal(method.head.rows, copied.head.rows)
    again = run(vit, tasks, options(calibration_epochs=1))
    assert torch.equal(method.head.rows, again.head.rows)
    other_seed = run(vit, tasks, options(calibration_epochs=1), Runtime(dtype=torch.float64, seed=2024))
    assert not torch.equal(method.head.rows, other_seed.head.rows)


def test_margin_never_appears_at_inference(vit, tasks):
    method = run(vit, tasks[:1], options())
    features = method.features(tasks[0].images)
    expected = 16 * torch.nn.functional.cosine_similarity(features[:, None], method.head.rows[None], dim=-1)
    torch.testing.assert_close(method.logits_from(features), expected)
