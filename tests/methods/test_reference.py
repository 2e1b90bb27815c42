"""The independent SMP reference, checked against torch, timm, scikit-learn and cases worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from timm.models.vision_transformer import VisionTransformer

import reference_smp as ref

DIM, DEPTH, BASE_CLASSES, SHOTS = 16, 2, 4, 3


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.fixture
def vit():
    torch.manual_seed(3)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=DIM, depth=DEPTH, num_heads=2, num_classes=0)
    for parameter in vit.parameters():  # spread out, so that biases and attention matter
        torch.nn.init.normal_(parameter, std=0.3)
    return vit.double().eval().requires_grad_(False)


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_lora(generator, rank=2):
    shapes = {"A_k": (rank, DIM), "B_k": (DIM, rank), "A_v": (rank, DIM), "B_v": (DIM, rank)}
    return [{name: 0.3 * randn(generator, *shape) for name, shape in shapes.items()} for _ in range(DEPTH)]


def random_batches(generator, epochs, steps, size=5):
    def batch():
        return randn(generator, size, 3, 16, 16), torch.randint(BASE_CLASSES, (size,), generator=generator)

    return [[batch() for _ in range(steps)] for _ in range(epochs)]


def folded_features(vit, deltas, images):
    """timm's own forward with ΔW added to the K and V thirds of every qkv weight."""
    weights = {}
    for layer, block in enumerate(vit.blocks):
        q, k, v = block.attn.qkv.weight.chunk(3)
        weights[f"blocks.{layer}.attn.qkv.weight"] = torch.cat([q, k + deltas[layer, "k"], v + deltas[layer, "v"]])
    return torch.func.functional_call(vit, weights, (images,))


def torch_cosface(x, rows, labels, scale, margin):
    logits = F.linear(F.normalize(x), F.normalize(rows))
    return F.cross_entropy(scale * (logits - margin * F.one_hot(labels, len(rows)).to(x)), labels)


def test_forward_is_timms_with_the_update_folded_in(vit, generator):
    images, deltas = randn(generator, 4, 3, 16, 16), ref.dense(random_lora(generator))
    expected = folded_features(vit, deltas, images)
    torch.testing.assert_close(ref.features(vit, deltas, images), expected, rtol=1e-10, atol=1e-10)
    assert (expected - vit(images)).abs().max() > 1e-3


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_cosface_is_cross_entropy_of_shifted_cosines(generator, margin):
    x, rows, labels = randn(generator, 6, DIM), randn(generator, 5, DIM), torch.tensor([0, 4, 2, 2, 1, 3])
    ours, expected = ref.cosface(x, rows, labels, 16.0, margin), torch_cosface(x, rows, labels, 16.0, margin)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_cosface_by_hand():
    # cosines 1 and 0 with s = 2, m = 0.5: log(1 + e^(0 - 2 (1 - 0.5)))
    x, rows = torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 9.0]])
    assert ref.cosface(x, rows, torch.tensor([0]), 2.0, 0.5).item() == pytest.approx(math.log(1 + math.exp(-1)))


def test_cosine_rate_gives_the_published_values_and_torchs_schedule():
    published = [1e-3, 9.05e-4, 6.55e-4, 3.45e-4, 9.5e-5]
    assert [ref.cosine_rate(1e-3, e, 5) for e in range(5)] == pytest.approx(published, rel=6e-3)
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=20)
    for epoch in range(20):
        assert ref.cosine_rate(0.01, epoch, 20) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimiser.step()
        schedule.step()


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_training_matches_torch_sgd_on_timms_forward(vit, generator, margin):
    hyper = ref.Hyper(base_lr=0.1, weight_decay=0.05)
    epochs, start = random_batches(generator, epochs=3, steps=2), random_lora(generator)
    start_head = randn(generator, BASE_CLASSES, DIM)
    trained, trained_head = ref.train_set(vit, epochs, start, start_head, margin, hyper)

    lora = [{name: factor.clone().requires_grad_() for name, factor in layer.items()} for layer in start]
    head = start_head.clone().requires_grad_()
    parameters = [*(factor for layer in lora for factor in layer.values()), head]
    optimiser = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=3)
    for batches in epochs:
        for images, labels in batches:
            deltas = {(i, p): layer[f"B_{p}"] @ layer[f"A_{p}"] for i, layer in enumerate(lora) for p in "kv"}
            optimiser.zero_grad()
            torch_cosface(folded_features(vit, deltas, images), head, labels, 16.0, margin).backward()
            optimiser.step()
        schedule.step()

    torch.testing.assert_close(trained_head, head.detach(), rtol=1e-10, atol=1e-11)
    for ours, theirs, initial in zip(trained, lora, start, strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name].detach(), rtol=1e-10, atol=1e-11)
            assert (ours[name] - initial[name]).abs().max() > 1e-4


@pytest.mark.parametrize(("form", "sizes"), [("batch", [3, 3, 1]), ("sample", [1] * 7)])
def test_fisher_squares_finite_difference_gradients(vit, generator, form, sizes):
    deltas, head = ref.dense(random_lora(generator)), randn(generator, BASE_CLASSES, DIM)
    images, labels = randn(generator, 7, 3, 16, 16), torch.tensor([0, 0, 1, 1, 2, 3, 3])
    norms = ref.fisher_norms(vit, deltas, head, images, labels, ref.Hyper(fisher=form, fisher_batch=3))

    slot, h = (1, "v"), 1e-5
    mean_square = torch.zeros(DIM, DIM, dtype=torch.float64)
    for row in range(DIM):
        for column in range(DIM):
            losses = []
            for sign in (+1, -1):
                moved = deltas[slot].clone()
                moved[row, column] += sign * h
                x = folded_features(vit, deltas | {slot: moved}, images)
                parts = zip(x.split(sizes), labels.split(sizes), strict=True)
                losses.append(torch.stack([torch_cosface(f, head, y, 16.0, 0.0) for f, y in parts]))
            mean_square[row, column] = ((losses[0] - losses[1]) / (2 * h)).square().mean()
    assert norms[slot] == pytest.approx(torch.linalg.norm(mean_square).item(), rel=1e-6)


def test_merge_weighs_each_block_by_its_own_norm():
    g, d = {(0, "k"): torch.ones(2, 2), (0, "v"): torch.ones(2, 2)}, {(0, "k"): torch.zeros(2, 2)}
    d[0, "v"] = torch.full((2, 2), 5.0)
    merged, weights_g, weights_d = ref.merge(g, d, {(0, "k"): 3.0, (0, "v"): 1.0}, {(0, "k"): 1.0, (0, "v"): 1.0})
    assert weights_g == {(0, "k"): 0.75, (0, "v"): 0.5}
    assert weights_d == {(0, "k"): 0.25, (0, "v"): 0.5}
    assert merged[0, "k"].tolist() == [[0.75] * 2] * 2
    assert merged[0, "v"].tolist() == [[3.0] * 2] * 2


def test_covariance_is_torchs_plus_jitter(generator):
    x = randn(generator, 9, 4)
    torch.testing.assert_close(ref.covariance(x, 1e-3), torch.cov(x.T) + 1e-3 * torch.eye(4, dtype=x.dtype))
    torch.testing.assert_close(ref.prototype(x), x.mean(dim=0))


def test_density_filter_keeps_the_draws_of_smallest_norm_in_order(generator):
    covariance = ref.covariance(randn(generator, 9, 4), 1e-3)
    mean, z = randn(generator, 4), randn(generator, 10, 4)
    z = z[z.norm(dim=1).argsort(descending=True)]  # the denser half comes last, the densest at the very end
    kept = z[5:] @ torch.linalg.cholesky(covariance).T + mean
    torch.testing.assert_close(ref.sample_gaussian(mean, covariance, z), kept)


def test_borrowed_covariance_by_largest_cosine_then_lowest_number():
    base = torch.tensor([[100.0, 99.0], [0.0, 1.0], [0.0, 2.0]])
    assert ref.nearest_base(torch.tensor([0.0, 7.0]), base) == 1
    assert ref.nearest_base(torch.tensor([0.1, 0.1]), base) == 0


def test_last_calibration_batch_takes_the_remainder():
    x = torch.arange(268)[:, None]
    batches = ref.calibration_batches(x, x[:, 0], classes=4, size=64)
    assert [len(y) for _, y in batches] == [64, 64, 64, 76]
    assert torch.equal(torch.cat([y for _, y in batches]), x[:, 0])


def test_whole_stream(vit, generator):
    """Base task and two few-shot tasks, with the last calibration repeated by torch.optim.SGD on the same features."""
    hyper = ref.Hyper(fisher_batch=4, features_per_class=8, calibration_epochs=2, calibration_lr=0.05)
    images = randn(generator, BASE_CLASSES * 6, 3, 16, 16)
    labels = torch.arange(BASE_CLASSES).repeat_interleave(6)

    def keyed(*key):
        return torch.Generator().manual_seed(hash(key) % 2**32)

    def task(number):
        first = BASE_CLASSES + 2 * (number - 1)

        def view(epoch, view):
            return randn(keyed(number, epoch, view), 2 * SHOTS, 3, 16, 16)

        # interleaved labels: task order is not class order
        return ref.FewShotTask(view(-1, -1), torch.tensor([first, first + 1] * SHOTS), view)

    def draws(session, epoch, label, group, count):
        return randn(keyed(session, epoch, label, len(group)), count, DIM)

    def shuffle(session, epoch, count):
        return torch.randperm(count, generator=keyed(session, epoch))

    tasks = [task(1), task(2)]
    base, sessions = ref.reference_smp(
        vit,
        ref.BaseTask(random_batches(generator, epochs=2, steps=2), images, labels),
        random_lora(generator),
        randn(generator, BASE_CLASSES, DIM),
        tasks,
        draws,
        shuffle,
        hyper,
    )

    merged_features = folded_features(vit, base.deltas, images)
    means = torch.stack([merged_features[labels == c].mean(dim=0) for c in range(BASE_CLASSES)])
    torch.testing.assert_close(base.rows, F.normalize(means))
    assert len(base.weights["g"]) == 2 * DEPTH
    assert all(base.weights["g"][s] + base.weights["d"][s] == pytest.approx(1) for s in base.deltas)
    assert [len(s.rows) for s in sessions] == [4, 6, 8]
    assert sessions[2].covariance_of[:4] == [0, 1, 2, 3]
    shots = folded_features(vit, base.deltas, tasks[0].images)
    torch.testing.assert_close(sessions[1].prototypes[4], shots[::2].mean(dim=0))

    # the feature set: 8 per old class, base ones as 4 + 4; ceil(8 / 3) passes over the 6 images of the task
    x, y = ref.feature_set(vit, base, sessions[1], tasks[1], 2, 0, draws, hyper)
    assert y.tolist() == sum([[c] * 8 for c in range(6)], []) + [6, 7] * 9
    assert torch.equal(x[48:54], ref.features(vit, base.deltas, tasks[1].view(0, 0)))
    second_group = ref.sample_gaussian(base.heads["d"][1], base.covariances[1], draws(2, 0, 1, "classifier", 8))
    assert torch.equal(x[12:16], second_group)

    new = F.normalize(sessions[2].prototypes[6:])
    rows = torch.cat([sessions[1].rows, new]).requires_grad_()
    optimiser = torch.optim.SGD([rows], lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=2)
    for epoch in range(2):
        x, y = ref.feature_set(vit, base, sessions[1], tasks[1], 2, epoch, draws, hyper)
        order = shuffle(2, epoch, 66)
        sizes = [8] * 7 + [10]
        for batch in order.split(sizes):
            optimiser.zero_grad()
            torch_cosface(x[batch], rows, y[batch], 16.0, 0.2).backward()
            optimiser.step()
        schedule.step()
    torch.testing.assert_close(sessions[2].rows, rows.detach(), rtol=1e-10, atol=1e-11)
    assert (sessions[2].rows[:6] - sessions[1].rows).abs().max() > 1e-3


def test_closed_form_without_correction_is_linear_discriminant_analysis(generator):
    classes, per_class, d = 4, 8, 5
    base = [randn(generator, per_class, d) @ torch.diag(torch.arange(1.0, d + 1).double()) + c for c in range(classes)]
    queries = randn(generator, 6, d)
    scores = ref.reference_closed_form(base, [], queries, shrinkage=0.3, correction=0.0)
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3, priors=[1 / classes] * classes)
    lda.fit(torch.cat(base).numpy(), torch.arange(classes).repeat_interleave(per_class).numpy())
    # scikit-learn divides the scatter by N, we by N - C; its scores carry the constant log prior
    n = classes * per_class
    theirs = torch.from_numpy(lda.decision_function(queries.numpy())) - math.log(1 / classes)
    torch.testing.assert_close(scores * n / (n - classes), theirs)


def test_closed_form_correction_and_views_by_hand(generator):
    base, new = [randn(generator, 10, 3), randn(generator, 10, 3)], [randn(generator, 2, 3)]
    queries = randn(generator, 4, 3)
    plain = ref.reference_closed_form(base, new, queries, shrinkage=0.0, correction=0.0)
    corrected = ref.reference_closed_form(base, new, queries, shrinkage=0.0, correction=2.0)
    # without shrinkage Σ = S, so tr(Σ⁻¹ S) = d: the term is γ d / (2 n)
    gain = torch.tensor([2 * 3 / 20, 2 * 3 / 20, 2 * 3 / 4], dtype=torch.float64)
    torch.testing.assert_close(corrected - plain, gain.expand(4, 3))

    views = [randn(generator, 6, 3)]
    middle = [((new[0].mean(dim=0) + views[0].mean(dim=0)) / 2)[None]]
    with_views = ref.reference_closed_form(base, new, queries, correction=0.0, new_views=views)
    torch.testing.assert_close(with_views, ref.reference_closed_form(base, middle, queries, correction=0.0))

    long = [[x * torch.rand(len(x), 1, generator=generator).add(0.1) for x in group] for group in (base, new)]
    unit_scores = ref.reference_closed_form(base, new, queries, normalise=True)
    torch.testing.assert_close(ref.reference_closed_form(*long, 5 * queries, normalise=True), unit_scores)
