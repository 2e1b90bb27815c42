"""iCaRL, FOSTER, CEC, FACT, TEEN, CLOM and ADBS: their formulas against slow ones, the special cases in which another
method gives the same, and every mechanism switched off once to show that it does something."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fscil.backbones.lora import initial_lora
from fscil.config import resolve
from fscil.errors import UserError
from fscil.maths.distillation import distillation, effective_number_weights
from fscil.maths.margins import cosine
from fscil.methods import clom
from fscil.methods.adbs import inter_class_constraint
from fscil.methods.cec import Episodes, GraphAttention
from fscil.methods.clom import pair_margins
from fscil.methods.fact import MASKED, choose_virtual, forward_terms, tie
from fscil.methods.families.exemplars import choose_exemplars, fresh_linear, herding
from fscil.methods.teen import calibrate
from fscil.runtime import Runtime, keyed_seed
from tiny_world import (
    BASE,
    MemoryKeeper,
    MemoryShelf,
    base_task,
    copy_state,
    differing,
    few_shot_tasks,
    make_backbone,
    make_images,
    make_method,
    make_task,
)

torch.set_num_threads(1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(name: str, options: dict | None = None, tasks: int = 0, **runtime):
    method = make_method(name, options, **runtime)
    method.fit_base(base_task())
    for task in few_shot_tasks()[:tasks]:
        method.learn(task)
    return method


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal up to the order in which float64 sums are taken."""
    assert one.dtype == torch.float64
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def changes(name: str, switched: dict, tasks: int = 0, common: dict | None = None) -> set[str]:
    """What is learned differently when some options are switched."""
    common = common or {}
    return differing(fitted(name, common, tasks).state(), fitted(name, {**common, **switched}, tasks).state())


# ---- TEEN ----------------------------------------------------------------------------------------------------------


def test_teen_calibration_is_the_formula():
    new, base, tau, alpha = draw(3, 5), draw(4, 5, seed=1), 16.0, 0.3
    for c, row in zip(new, calibrate(new, base, tau, alpha)):
        c = c / c.norm()
        units = [b / b.norm() for b in base]
        weights = [math.exp(tau * float(c @ b)) for b in units]
        delta = sum(w / sum(weights) * b for w, b in zip(weights, units))
        torch.testing.assert_close(row, (1 - alpha) * c + alpha * delta / delta.norm())


@pytest.mark.parametrize(
    ("plain", "options"), [("single_m0", {}), ("baseline", {"scale": 1.0, "learnable_scale": True})]
)
def test_teen_with_alpha_zero_is_plain_prototypes(plain, options):
    images, _ = make_images()
    plain = fitted(plain, tasks=2, dtype=torch.float64)
    method = fitted("teen", {**options, "alpha": 0.0}, tasks=2, dtype=torch.float64)
    assert_same(method.logits(images), plain.logits(images))
    calibrated = fitted("teen", {**options, "alpha": 0.5}, tasks=2, dtype=torch.float64).logits(images)
    assert (calibrated - plain.logits(images)).abs().max() > 1e-3


def test_teen_keeps_base_rows_and_takes_the_plain_adapters_from_the_shelf():
    shelf, keeper = MemoryShelf(), MemoryKeeper()
    plain = fitted("single_m0", shelf=shelf)
    method = fitted("teen", shelf=shelf, keeper=keeper)
    assert keeper.saves == 0 and torch.equal(method.lora.A, plain.lora.A)  # nothing was trained
    before = method.rows.clone()
    method.learn(few_shot_tasks()[0])
    assert torch.equal(method.rows[:BASE], before)
    fitted("teen", {"scale": 32.0}, shelf=shelf, keeper=keeper)
    assert keeper.saves > 0  # another temperature, other adapters


# ---- ADBS ----------------------------------------------------------------------------------------------------------


def test_inter_class_constraint_is_the_formula():
    rows, scales = draw(5, 4), 1 + 0.3 * draw(5, seed=1)
    units = F.normalize(rows, dim=1)
    terms = [
        max(0.0, float((1 - units[i] @ units[j]) - (scales[i] - scales[j] * (units[i] @ units[j]))))
        for i, j in itertools.product(range(5), repeat=2)
    ]
    assert float(inter_class_constraint(rows, scales)) == pytest.approx(sum(terms) / 25)
    assert float(inter_class_constraint(rows, torch.ones(5))) == 0


def test_adbs_with_scales_of_one_is_the_plain_adapter():
    images, _ = make_images()
    plain = fitted("single_m0", tasks=2, dtype=torch.float64)
    method = fitted("adbs", {"adaptive": False, "alpha": 0.0}, tasks=2, dtype=torch.float64)
    assert_same(method.lora.B, plain.lora.B)
    assert_same(method.logits(images), plain.logits(images))


def test_adbs_learns_new_scales_only_from_the_mean_of_the_old():
    method = fitted("adbs", {"learn_steps": 0})
    old = method.scales.clone()
    assert (old - 1).abs().max() > 1e-4
    method.learn(few_shot_tasks()[0])
    assert torch.equal(method.scales[:BASE], old)
    torch.testing.assert_close(method.scales[BASE:], old.mean().repeat(3))
    trained = fitted("adbs", {"learn_steps": 3}, tasks=1)
    assert torch.equal(trained.scales[:BASE], old)  # old scales stay frozen
    assert torch.equal(trained.prototypes, method.prototypes)
    assert (trained.scales[BASE:] - method.scales[BASE:]).abs().min() > 1e-5
    assert "scales" in changes("adbs", {"alpha": 5.0})


@pytest.mark.parametrize("views", ["augmented", "plain"])
def test_adbs_s_scale_steps_are_autograd_on_a_loop_over_images_and_pairs(views):
    steps, task = 3, few_shot_tasks()[0]
    options = {"learn_views": views, "learn_steps": steps, "learn_lr": 0.1, "alpha": 0.5}
    before = fitted("adbs", options, dtype=torch.float64)
    after = fitted("adbs", options, tasks=1, dtype=torch.float64)
    rows = F.normalize(after.prototypes, dim=1)
    new = before.scales.mean().repeat(3).requires_grad_()
    momentum, seen_views = torch.zeros(3, dtype=torch.float64), []
    for step in range(steps):
        images = task.images.plain()
        if views == "augmented":
            images = task.images.augmented(torch.arange(len(task.labels)), 1_000_000 + step)  # task 1, view `step`
            seen_views.append(images)
        with torch.no_grad():
            features = before.backbone(images.double(), before.lora)[0]
        scales, loss = torch.cat([before.scales, new]), 0.0
        for f, label in zip(features, task.labels):
            logits = [16 * scales[j] * (f / f.norm() @ rows[j]) for j in range(len(rows))]
            loss = loss + (torch.stack(logits).logsumexp(0) - logits[label]) / len(task.labels)
        for i, j in itertools.product(range(len(rows)), repeat=2):
            w = rows[i] @ rows[j] if i != j else torch.ones((), dtype=torch.float64)
            loss = loss + 0.5 * ((1 - w) - (scales[i] - scales[j] * w)).clamp(min=0) / len(rows) ** 2
        (gradient,) = torch.autograd.grad(loss, new)
        # SGD with momentum 0.9 and dampening 0.9, which spares the first step
        momentum = gradient if step == 0 else 0.9 * momentum + 0.1 * gradient
        new = (new - 0.1 * momentum).detach().requires_grad_()
    torch.testing.assert_close(after.scales[BASE:], new.detach())
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(seen_views, 2))


# ---- CLOM ----------------------------------------------------------------------------------------------------------


def test_pair_margins_are_the_formula():
    rows, a, b = draw(4, 6), -0.2, -0.5
    units = F.normalize(rows, dim=1)
    pairs = [(i, j) for i, j in itertools.product(range(4), repeat=2) if i != j]
    mean = sum(float(units[i] @ units[j]) for i, j in pairs) / len(pairs)
    margins = pair_margins(rows, a, b)
    for i, j in pairs:
        assert float(margins[i, j]) == pytest.approx(a + (b - a) / (1 - mean) * (float(units[i] @ units[j]) - mean))
    assert not margins.diag().any()
    assert float(margins.sum() / len(pairs)) == pytest.approx(a)  # the average margin
    assert not pair_margins(rows[:1], a, b).any()  # a single class has no pairs


def test_clom_without_margins_and_mapped_loss_is_the_plain_adapter():
    zero = dict.fromkeys(["margin_average", "margin_upper", "mapped_average", "mapped_upper", "mapped_weight"], 0.0)
    plain = fitted("single_m0", tasks=1, dtype=torch.float64)
    method = fitted("clom", zero, tasks=1, dtype=torch.float64)
    assert_same(method.lora.B, plain.lora.B)
    assert_same(method.prototypes, plain.head.prototypes)
    unrelated = fitted("clom", {**zero, "class_relations": False}, dtype=torch.float64)
    assert_same(unrelated.lora.B, plain.lora.B)


@pytest.mark.parametrize(
    "switched",
    [{"margin_average": 0.0, "margin_upper": 0.0}, {"mapped_weight": 0.0}, {"mapped_average": 0.0, "mapped_upper": 0.0},
     {"class_relations": False}],
)  # fmt: skip
def test_every_part_of_clom_s_loss_counts(switched):
    assert {"lora.A", "prototypes"} <= changes("clom", switched)


def test_both_published_settings_of_clom_s_margins_are_recipes_for_cub200():
    names = ("margin_average", "margin_upper", "mapped_average", "mapped_upper", "mapped_weight")
    found = [
        [resolve(recipe=recipe).options[name] for name in names]
        for recipe in ("cub200/clom", "cub200/clom_cub_margins")
    ]
    assert found == [[-0.2, -0.5, 0.1, 0.2, 1.0], [-0.2, -0.25, 0.3, 0.6, 0.01]]


def test_clom_recomputes_margins_each_epoch(monkeypatch):
    moving, kept = fitted("clom"), {}

    def first_only(rows, average, upper):
        return kept.setdefault(tuple(rows.shape), pair_margins(rows, average, upper))

    monkeypatch.setattr(clom, "pair_margins", first_only)
    assert "lora.A" in differing(moving.state(), fitted("clom").state())


def test_clom_adds_the_logits_of_both_spaces_with_running_statistics():
    method = fitted("clom", tasks=1)
    images, _ = make_images()
    f = method.features(images)
    mean, variance = method.running_mean, method.running_variance
    assert mean.abs().max() > 0  # moved in training, and part of the state
    assert {"running_mean", "running_variance"} <= method.state().keys()
    normed = (f @ method.projection - mean) / (variance + 1e-5).sqrt() * method.gain + method.shift
    g = torch.where(normed > 0, normed, 0.1 * normed)
    expected = 16 * (cosine(f, method.prototypes) + cosine(g, method.mapped_prototypes))
    torch.testing.assert_close(method.logits(images), expected)


def test_clom_takes_a_batch_of_one_image():
    assert fitted("clom", {"batch_size": 7}).running_variance.isfinite().all()  # 36 = 5 · 7 + 1


# ---- FACT ----------------------------------------------------------------------------------------------------------


def test_fact_terms_are_the_formulas():
    classes, virtual, count = 4, 3, 6
    logits, mixed = 4 * draw(count, classes + virtual), 4 * draw(count, classes + virtual, seed=1)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    differ = torch.tensor([True, False, True, True, False, True])
    tied = tie(classes, virtual, 2, torch.Generator().manual_seed(0))
    tied[0] = False  # a base class without a virtual one of its own may take on any

    def cross_entropy(row, target):
        return float(row.exp().sum().log() - row[target])

    second, third, fourth = [], [], []
    for i in range(count):
        masked = logits[i].clone()
        masked[labels[i]] = MASKED
        options = [v for v in range(virtual) if tied[labels[i], v]] or list(range(virtual))
        second.append(cross_entropy(masked, classes + max(options, key=lambda v: float(logits[i, classes + v]))))
        if differ[i]:
            best = int(mixed[i, classes:].argmax()) + classes
            third.append(cross_entropy(mixed[i], best))
            without = mixed[i].clone()
            without[best] = MASKED
            fourth.append(cross_entropy(without, int(mixed[i, :classes].argmax())))
    first, terms = forward_terms(logits, mixed, labels, differ, tied)
    assert float(first) == pytest.approx(float(F.cross_entropy(logits[:, :classes], labels)))
    for value, expected in zip(terms.values(), (second, third, fourth)):
        assert float(value) == pytest.approx(sum(expected) / len(expected))
    # a batch of one class has no mixtures of two
    assert float(forward_terms(logits, mixed, labels, ~differ & differ, tied)[1]["mixed_base"]) == 0


def test_virtual_classes_are_tied_to_three_base_classes_each():
    tied = tie(60, 10, 3, torch.Generator().manual_seed(0))
    assert tied.shape == (60, 10) and (tied.sum(0) == 3).all()


def test_the_multiplied_mask_takes_an_untied_class_for_better_than_a_negative_tied_one():
    logits = draw(50, 4)
    tied = draw(50, 4, seed=1) > 0
    expected = [max(range(4), key=lambda v: float(x[v]) * bool(t[v])) for x, t in zip(logits, tied)]
    assert choose_virtual(logits, tied, "multiplied").tolist() == expected
    strict = choose_virtual(logits, tied, "strict")
    assert all(t[v] or not t.any() for t, v in zip(tied, strict))
    assert strict.tolist() != expected
    assert "lora.A" in changes("fact", {"mask": "multiplied"}, common={"gamma": 1.0})


@pytest.mark.parametrize("rows_of", ["trained", "frozen"])
def test_a_step_of_fact_is_the_loss_written_out_on_two_classes(rows_of):
    task, lr, decay, gamma = make_task(0, range(2), 6), 0.1, 0.01, 0.5
    options = {"epochs": 1, "batch_size": 12, "lr": lr, "weight_decay": decay, "gamma": gamma, "virtual_rows": rows_of}
    method = make_method("fact", {**options, "virtual_classes": 3, "tied": 1}, dtype=torch.float64)
    runtime, backbone = method.runtime, method.backbone
    lora, _ = method.fresh_adapters(2)
    start = torch.empty(5, 16, dtype=torch.float64)
    torch.nn.init.orthogonal_(start, generator=runtime.generator("virtual"))
    base, dummy, virtual = start[:2].clone().requires_grad_(), start[2:], start[2:].clone().requires_grad_()
    tied = tie(2, 3, 1, runtime.generator("ties"))
    method.fit_base(task)

    order = torch.randperm(12, generator=runtime.generator("FACT", "order", 0))
    partner = torch.randperm(12, generator=runtime.generator("partner", 0, 0))
    share = np.random.default_rng(keyed_seed(runtime.seed, "mixup", 0, 0)).beta(0.5, 0.5)
    labels = task.labels[order].tolist()
    tokens = backbone.blocks(backbone.embed(task.images.augmented(order, 0)), stop=1, lora=lora)
    mixtures = torch.stack([share * tokens[i] + (1 - share) * tokens[partner[i]] for i in range(12)])
    plain, mixed = (backbone.pool(backbone.blocks(t, start=1, lora=lora)) for t in (tokens, mixtures))

    def logits(feature, rows):
        return torch.stack([16 * (feature @ row) / (feature.norm() * row.norm()) for row in rows])

    def loss(scores, target, masked=None):
        kept = [score for at, score in enumerate(scores) if at != masked]
        return torch.stack(kept).logsumexp(0) - scores[target]

    terms = {name: [] for name in ("L1", "L2", "L3", "L4")}
    for i, label in enumerate(labels):
        scores = logits(plain[i], [*base, *dummy])
        terms["L1"].append(loss(scores[:2], label))
        mine = [v for v in range(3) if tied[label, v]] or list(range(3))
        terms["L2"].append(loss(scores, 2 + max(mine, key=lambda v: scores[2 + v].item()), masked=label))
        if labels[partner[i]] != label:
            scores = logits(mixed[i], [*base, *(virtual if rows_of == "trained" else dummy)])
            best = 2 + int(scores[2:].argmax())
            terms["L3"].append(loss(scores, best))
            terms["L4"].append(loss(scores, int(scores[:2].argmax()), masked=best))
    first, *rest = (torch.stack(values).mean() for values in terms.values())
    trained = [lora.A, lora.B, *([virtual] if rows_of == "trained" else [])]
    gradients = torch.autograd.grad(first + gamma * sum(rest), trained)
    expected = [p - lr * (g + decay * p) for p, g in zip(trained, gradients)]
    torch.testing.assert_close(method.lora.A, expected[0])
    torch.testing.assert_close(method.lora.B, expected[1])
    torch.testing.assert_close(method.virtual, F.normalize(expected[2] if rows_of == "trained" else dummy, dim=1))


@pytest.mark.parametrize("left_out", ["masked", "mixed_virtual", "mixed_base"])
def test_every_term_of_fact_counts(left_out):
    strong = {"gamma": 1.0}
    terms = tuple(t for t in ("masked", "mixed_virtual", "mixed_base") if t != left_out)
    assert "lora.A" in changes("fact", {"terms": terms}, common=strong)


def test_fact_mixes_in_the_middle_and_from_its_first_epoch():
    strong = {"gamma": 1.0}
    assert "lora.A" in changes("fact", {"mixup": 50.0}, common=strong)
    assert "lora.A" in changes("fact", {"mix_block": 0}, common=strong)
    assert not changes("fact", {"mix_block": 1}, common=strong)  # half of two blocks is the default
    assert not changes("fact", {"gamma": 0.0}, common={"gamma": 1.0, "first_epoch": 2})  # of two epochs
    assert "lora.A" in changes("fact", {"gamma": 0.0}, common={"gamma": 1.0, "first_epoch": 1})


def test_fact_reserves_expected_classes_and_goes_on_beyond_them():
    method = fitted("fact", {"expected_classes": BASE + 2}, tasks=2)  # four classes more came
    assert method.virtual.shape[0] == 2 and method.seen == BASE + 4
    torch.testing.assert_close(method.virtual.norm(dim=1), torch.ones(2))
    assert fitted("fact", {"expected_classes": None, "virtual_classes": 3}).virtual.shape[0] == 3
    with pytest.raises(UserError, match="expected_classes is 6"):
        fitted("fact", {"expected_classes": BASE})


@pytest.mark.parametrize("similarity", ["released", "cosine"])
def test_fact_scores_mix_both_predictions(similarity):
    method = fitted("fact", {"similarity": similarity, "eta": 0.4, "top_virtual": 2}, tasks=1)
    images, _ = make_images()
    features, rows, virtual = method.features(images)[:5], method.prototypes, method.virtual
    scores = method.logits_from(features)
    for f, row in zip(features, scores):
        f = f / f.norm()
        near = torch.softmax(torch.stack([16 * f @ (p / p.norm()) for p in rows]), 0)
        close = torch.stack([f @ v for v in virtual])
        kept = close.argsort(descending=True)[:2].tolist()
        scaled = rows / (rows.norm(dim=0) if similarity == "released" else rows.norm(dim=1, keepdim=True))
        through = torch.softmax(torch.stack([sum(close[v] * (virtual[v] @ p) for v in kept) for p in scaled]), 0)
        torch.testing.assert_close(row.exp(), 0.4 * through + 0.6 * near, rtol=1e-4, atol=1e-6)


def test_fact_scores_the_base_task_by_cosine_alone():
    method, images = fitted("fact", {"eta": 0.4}), make_images()[0]
    features = method.features(images)
    expected = torch.log_softmax(16 * cosine(features, method.prototypes), 1)
    torch.testing.assert_close(method.logits(images), expected)


# ---- CEC -----------------------------------------------------------------------------------------------------------


def test_graph_attention_equals_attention_over_every_whole_sequence():
    dim, graph = 6, GraphAttention(6, torch.Generator().manual_seed(0)).double()
    prototypes, queries = draw(4, dim), draw(3, dim, seed=1)
    output = graph(prototypes, queries)
    for number, query in enumerate(queries):  # [all prototypes, one query], literally
        x = torch.cat([prototypes, query[None]])
        q, k, v = (F.linear(x, w) for w in (graph.query, graph.key, graph.value))
        attended = torch.softmax(q @ k.T / math.sqrt(dim), 1) @ v
        x = F.layer_norm(
            F.linear(attended, graph.out, graph.bias) + x, (dim,), graph.norm.weight, graph.norm.bias, graph.norm.eps
        )
        torch.testing.assert_close(output[number], F.cosine_similarity(x[-1:], x[:-1]))


def test_pseudo_classes_are_rotated_copies_by_one_angle_per_class():
    method, task = make_method("cec"), base_task()
    episodes = Episodes(task, method.options, Runtime())
    images = episodes.augmented(torch.tensor([1]), 0)
    each, way = method.options.shots + method.options.queries, method.options.way
    images = images.view(each, 2 * way, *images.shape[1:])
    for i in range(way):
        fits = [k for k in (1, 2, 3) if torch.equal(images[:, way + i], torch.rot90(images[:, i], k, (-2, -1)))]
        assert len(fits) == 1
    assert torch.equal(images.flatten(0, 1), Episodes(task, method.options, Runtime()).augmented(torch.tensor([1]), 0))
    assert not torch.equal(images.flatten(0, 1), episodes.augmented(torch.tensor([0]), 0))


def test_cec_without_stage_two_and_attention_is_the_plain_adapter():
    images, _ = make_images()
    plain = fitted("single_m0", tasks=2, dtype=torch.float64)
    method = fitted("cec", {"episode_epochs": 0, "attention": False}, tasks=2, dtype=torch.float64)
    assert_same(method.logits(images), plain.logits(images))


@pytest.mark.parametrize("switched", [{"pseudo_classes": False}, {"attention": False}, {"episode_epochs": 0}])
def test_every_part_of_cec_s_second_stage_counts(switched):
    changed = changes("cec", switched, common={"encoder_lr": 0.01})
    assert {"lora.A", "prototypes"} <= changed
    if switched != {"pseudo_classes": False}:
        assert "graph.query" in changed


def test_cec_takes_classes_with_fewer_images_than_an_episode_wants():
    method = make_method("cec", {"queries": 5, "way": 50})
    method.fit_base(make_task(0, range(3), 2))
    assert method.seen == 3


# ---- exemplars, distillation ---------------------------------------------------------------------------------------


def test_herding_is_the_greedy_search_and_takes_what_there_is():
    features = F.normalize(draw(7, 4), dim=1)
    chosen: list[int] = []
    for _ in range(5):
        rest = [i for i in range(7) if i not in chosen]
        chosen.append(min(rest, key=lambda i: float((features.mean(0) - features[[*chosen, i]].mean(0)).norm())))
    assert herding(features, 5).tolist() == chosen
    assert sorted(herding(features, 20).tolist()) == list(range(7))  # more exemplars than images
    assert chosen != sorted(chosen)


def test_a_smaller_budget_keeps_the_first_of_the_herding_order():
    features, labels = F.normalize(draw(12, 4), dim=1), torch.arange(12) % 2
    whole = choose_exemplars(features, labels, [0, 1], 2, 6)
    kept = choose_exemplars(features[whole], labels[whole], [1], 2, 2)  # class 0 untouched: the first two of its order
    assert whole[kept[:2]].tolist() == whole[:2].tolist()
    few = choose_exemplars(features, labels, [0, 1], 2, 2)
    assert few[:2].tolist() == whole[:2].tolist()


def test_memory_holds_the_very_images_and_counts_them():
    task = base_task()
    method = make_method("icarl", {"per_class": 4})
    method.fit_base(task)
    raw = {task.images.raw(i).numpy().tobytes() for i in range(len(task.labels))}
    stored = method.memory.images()
    assert all(image.numpy().tobytes() in raw for image in stored)
    assert method.stored_images() == (4 * BASE, 4 * BASE * 16 * 16 * 3)
    first, second = few_shot_tasks()
    method.learn(first)  # three shots: fewer than four exemplars
    assert method.stored_images()[0] == 4 * BASE + 3 * 3
    assert torch.bincount(method.memory.labels).tolist() == [4] * BASE + [3] * 3
    shared = fitted("icarl", {"memory": "total", "total": 12}, tasks=1)
    assert torch.bincount(shared.memory.labels).tolist() == [1] * 9  # 12 // 9


def test_distillation_is_the_divergence_up_to_the_teacher_s_entropy():
    student, teacher, temperature = draw(5, 4), draw(5, 4, seed=1), 2.0
    q = torch.softmax(teacher / temperature, 1)
    entropy = -(q * q.log()).sum(1).mean()
    divergence = F.kl_div(torch.log_softmax(student / temperature, 1), q, reduction="batchmean")
    torch.testing.assert_close(distillation(student, teacher, temperature), divergence + entropy)
    torch.testing.assert_close(distillation(student, teacher, 2.0, torch.ones(4)), distillation(student, teacher, 2.0))
    one_class = torch.tensor([0.0, 0.0, 1.0, 0.0])  # all weight on one class makes it the label
    expected = F.cross_entropy(student / 2, torch.full((5,), 2))
    torch.testing.assert_close(distillation(student, teacher, 2.0, one_class.double()), expected)


def test_effective_numbers_weigh_rare_classes_more():
    counts, beta = torch.tensor([1, 5, 20, 500]), 0.96
    raw = [(1 - beta) / (1 - beta ** int(n)) for n in counts]
    weights = effective_number_weights(counts, beta)
    assert weights.tolist() == pytest.approx([4 * w / sum(raw) for w in raw])


# ---- iCaRL ---------------------------------------------------------------------------------------------------------


def test_icarl_predicts_the_nearest_mean_of_exemplars():
    method = fitted("icarl", tasks=1)
    images, _ = make_images()
    unit = F.normalize(method.extract(images, method.embed), dim=1)
    task = base_task()
    stored, labels = method.memory.joined(task.images, task.labels)
    stored = F.normalize(method.extract(stored, method.embed), dim=1)[: len(method.memory)]
    means = torch.stack([F.normalize(stored[method.memory.labels == c].mean(0), dim=0) for c in range(9)])
    assert torch.equal(method.logits(images).argmax(1), torch.cdist(unit, means).argmin(1))


def test_both_classifiers_of_icarl_are_of_one_training():
    images, _ = make_images()
    method, linear = fitted("icarl", tasks=1), fitted("icarl_linear", tasks=1)
    assert not differing(method.state(), linear.state())
    expected = linear.extract(images, linear.embed) @ linear.head_weight.T + linear.head_bias
    torch.testing.assert_close(linear.logits(images), expected)
    assert not torch.equal(linear.logits(images).argmax(1), method.logits(images).argmax(1))


def test_icarl_trains_the_network_with_exemplars_and_distillation():
    before, after = fitted("icarl").state(), fitted("icarl", tasks=1).state()
    assert "network.vit.blocks.0.attn.qkv.weight" in differing(before, after)
    for switched in ({"distillation": 0.0}, {"per_class": 1}, {"temperature": 8.0}):
        assert "network.vit.blocks.0.attn.qkv.weight" in changes("icarl", switched, tasks=1)


def softened(logits: torch.Tensor, temperature: float = 2.0) -> list[float]:
    powers = [math.exp(float(logit) / temperature) for logit in logits]
    return [power / sum(powers) for power in powers]


def distilled(student: torch.Tensor, targets: list[float], temperature: float = 2.0) -> torch.Tensor:
    """−Σ q log softmax(student / T) of one image."""
    logs = student / temperature - (student / temperature).logsumexp(0)
    return -sum(q * log for q, log in zip(targets, logs, strict=True))


def one_batch(method, task, stage: str) -> tuple[torch.Tensor, list[int]]:
    """Exemplars and shots as the only step of a stage of one epoch sees them."""
    images, labels = method.memory.joined(task.images, task.labels)
    order = torch.randperm(len(images), generator=method.runtime.generator(stage, "order", 0))
    return images.augmented(order, 0).double(), labels[order].tolist()


def test_a_step_of_icarl_is_its_loss_written_out():
    options = {"per_class": 2, "learn_epochs": 1, "batch_size": 99, "learn_lr": 0.05, "learn_weight_decay": 0.01}
    before, after = (fitted("icarl", options, tasks=tasks, dtype=torch.float64) for tasks in (0, 1))
    task = few_shot_tasks()[0]
    pixels, labels = one_batch(before, task, "iCaRL task 1")
    old_rows, old_bias = before.head_weight.detach(), before.head_bias.detach()
    with torch.no_grad():
        teacher = before.network(pixels) @ old_rows.T + old_bias
    before.count_classes(task)
    before.grow_head()
    logits = before.network(pixels) @ before.head_weight.T + before.head_bias
    terms = [z.logsumexp(0) - z[y] + distilled(z[:BASE], softened(t)) for z, y, t in zip(logits, labels, teacher)]
    qkv = before.network.vit.blocks[0].attn.qkv.weight
    trained = {"head_weight": before.head_weight, "network.vit.blocks.0.attn.qkv.weight": qkv}
    gradients = torch.autograd.grad(sum(terms) / len(terms), list(trained.values()))
    for (name, weight), gradient in zip(trained.items(), gradients):
        torch.testing.assert_close(after.state()[name], (weight - 0.05 * (gradient + 0.01 * weight)).detach())


# ---- FOSTER --------------------------------------------------------------------------------------------------------


def test_foster_hands_one_backbone_on_to_the_next_task():
    def backbone_of(method):
        return {n: t for n, t in copy_state(method).items() if n.startswith("network.")}

    base, learned = fitted("foster"), fitted("foster", tasks=1)
    assert backbone_of(base).keys() == backbone_of(learned).keys()
    assert learned.trainable_parameters() - base.trainable_parameters() == 3 * (learned.backbone.dim + 1)
    assert differing(backbone_of(base), backbone_of(learned))
    idle = fitted("foster", {"compression_epochs": 0}, tasks=1)
    assert not differing(backbone_of(base), backbone_of(idle))  # the student starts from the old backbone
    assert torch.equal(idle.head_weight[:BASE], base.head_weight)  # and from the old rows


@pytest.mark.parametrize("counts", ["published", "images"])
def test_a_step_of_foster_s_boosting_and_compression_is_their_loss_written_out(counts):
    options = {"per_class": 2, "boosting_epochs": 1, "compression_epochs": 1, "batch_size": 99, "lr": 0.05}
    options |= {"weight_decay": 0.01, "weight_counts": counts}
    before, after = (fitted("foster", options, tasks=tasks, dtype=torch.float64) for tasks in (0, 1))
    task, dim, runtime = few_shot_tasks()[0], before.backbone.dim, before.runtime
    seen, shots = BASE + len(task.classes), int(task.labels.bincount()[-1])
    pixels, labels = one_batch(before, task, "FOSTER boosting 1")
    rows, shift = before.head_weight.detach(), before.head_bias.detach()

    def class_weights(beta):
        numbers = [2] * BASE + [shots if counts == "images" else math.inf] * len(task.classes)
        weights = [(1 - beta) / (1 - beta**number) for number in numbers]
        return [weight * seen / sum(weights) for weight in weights]

    # boosting: one step of the second backbone and of both heads, the first backbone frozen
    second = before.network.trainable_copy()
    weight, bias = fresh_linear(seen, 2 * dim, runtime, before.place, "joint head")
    helper, helper_bias = fresh_linear(seen, dim, runtime, before.place, "auxiliary head")
    with torch.no_grad():
        weight[:BASE, :dim], bias[:BASE] = rows, shift
        old = before.network(pixels)
    new, terms = second(pixels), []
    for o, n, y in zip(old, new, labels):
        joint = weight[:, :dim] @ o + weight[:, dim:] @ n + bias
        weighed = torch.stack([z / w for z, w in zip(joint, class_weights(0.96))])
        helped = helper @ n + helper_bias
        terms.append(weighed.logsumexp(0) - weighed[y] + helped.logsumexp(0) - helped[y])
        terms[-1] = terms[-1] + distilled(joint[:BASE], softened(rows @ o + shift))
    qkv = second.vit.blocks[0].attn.qkv.weight
    gradients = torch.autograd.grad(sum(terms) / len(terms), [weight, qkv])
    made = [after.teacher.weight, after.teacher.second.vit.blocks[0].attn.qkv.weight]
    for found, start, gradient in zip(made, (weight, qkv), gradients):
        torch.testing.assert_close(found, (start - 0.05 * (gradient + 0.01 * start)).detach(), check_stride=False)

    # compression: one step of the first backbone and the grown head on the teacher's balanced answers, without decay
    pixels, _ = one_batch(before, task, "FOSTER compression 1")
    before.count_classes(task)
    before.grow_head()
    terms = []
    with torch.no_grad():
        answers = torch.cat([after.teacher.first(pixels), after.teacher.second(pixels)], 1) @ after.teacher.weight.T
        answers += after.teacher.bias
    for feature, answer in zip(before.network(pixels), answers):
        targets = [q * w for q, w in zip(softened(answer), class_weights(0.97))]
        targets = [q / sum(targets) for q in targets]
        terms.append(distilled(before.head_weight @ feature + before.head_bias, targets))
    (gradient,) = torch.autograd.grad(sum(terms) / len(terms), [before.head_weight])
    torch.testing.assert_close(after.head_weight.detach(), (before.head_weight - 0.05 * gradient).detach())


def test_foster_answers_with_the_two_backbones_of_the_last_task():
    images, _ = make_images()
    base, method = fitted("foster", dtype=torch.float64), fitted("foster", tasks=1, dtype=torch.float64)
    assert torch.equal(base.logits(images), base.extract(images, lambda batch: base.head(base.embed(batch))))
    pixels, teacher = images.plain().double(), method.teacher
    with torch.no_grad():
        old, boosted = base.network(pixels), teacher.second(pixels)  # its first backbone is the one before the task
        expected = [
            [float(o @ row[:16] + n @ row[16:] + shift) for row, shift in zip(teacher.weight, teacher.bias)]
            for o, n in zip(old, boosted)
        ]
    torch.testing.assert_close(method.logits(images), torch.tensor(expected, dtype=torch.float64))
    student = fitted("foster_student", tasks=1, dtype=torch.float64)
    assert student.teacher is None and not any(name.startswith("teacher") for name in student.state())
    assert_same(student.head_weight, method.head_weight)  # both train the same student
    with torch.no_grad():
        torch.testing.assert_close(student.logits(images), student.head(student.network(pixels)))


def test_foster_herds_with_the_model_that_it_evaluates():
    task = few_shot_tasks()[0]
    for name in ("foster", "foster_student"):
        before, method = (fitted(name, {"per_class": 2}, tasks=tasks, dtype=torch.float64) for tasks in (0, 1))
        images, labels = before.memory.joined(task.images, task.labels)
        with torch.no_grad():
            if name == "foster":
                teacher, pixels = method.teacher, images.plain().double()
                features = torch.cat([teacher.first(pixels), teacher.second(pixels)], 1)
            else:
                features = method.network(images.plain().double())
        features = F.normalize(features, dim=1)
        for label in task.classes:
            own = (labels == label).nonzero().squeeze(1)
            kept = [image for image, at in zip(method.memory.images(), method.memory.labels) if at == label]
            expected = [images.raw(int(own[i])) for i in herding(features[own], 2)]
            assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))


def test_a_foster_state_without_a_teacher_takes_the_teacher_away():
    images, _ = make_images()
    base, method = fitted("foster"), fitted("foster", tasks=1)
    method.load_state(copy_state(base))  # as undoing a task does
    assert torch.equal(method.logits(images), base.logits(images)) and not differing(method.state(), base.state())


@pytest.mark.parametrize(
    "switched", [{"boosting_epochs": 0}, {"distillation": 0.0}, {"boosting_beta": 0.0}, {"compression_beta": 0.0}]
)
def test_every_part_of_foster_counts(switched):
    assert "network.vit.blocks.0.attn.qkv.weight" in changes("foster", switched, tasks=1)


def test_foster_weighs_classes_as_the_published_code_counts_them_or_by_their_images():
    def weight(images):
        return (1 - 0.96) / (1 - 0.96**images)

    new, shots = 3, int(few_shot_tasks()[0].labels.bincount()[-1])
    for options, old, fresh in (
        ({}, weight(4), 1 - 0.96),
        ({"weight_counts": "images"}, weight(4), weight(shots)),
    ):
        scale = (BASE + new) / (BASE * old + new * fresh)
        found = fitted("foster", {"per_class": 4, **options}, tasks=1).diagnostics()["class_weights"]
        assert found == pytest.approx({"old": old * scale, "new": fresh * scale})


def test_whole_vits_train_in_bf16_on_full_precision_weights():
    runtime = Runtime(dtype=torch.bfloat16)
    backbone = make_backbone().prepare(runtime)
    method = make_method("icarl", backbone=backbone, dtype=torch.bfloat16)
    method.fit_base(base_task())
    assert {t.dtype for n, t in method.state().items() if n.startswith(("network", "head"))} == {torch.float32}
    assert method.logits(make_images()[0]).dtype == torch.float32
    assert next(backbone.vit.blocks.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["adbs", "clom", "fact"])
def test_nesterov_momentum_of_the_originals_is_an_option(name):
    assert "lora.A" in changes(name, {"nesterov": True})


def test_all_adapter_methods_start_from_the_library_s_initial_adapters():
    lora = initial_lora(2, 16, 2, 1, Runtime().generator("lora"))
    for name in ("adbs", "clom", "fact"):
        assert torch.equal(make_method(name).fresh_adapters(BASE)[0].A, lora.A)
