"""Each head of the field against its definition, written out slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge
from torch.nn import functional as F

from fscil.heads.base import Lesson
from fscil.heads.embeddings import KnownClasses, gaussian_features
from fscil.heads.mpcc import MPCCOptions
from fscil.maths.calibrating import correlation
from fscil.maths.gaussians import class_roots
from fscil.maths.random_features import best_ridge, fourier
from head_world import BASE, CLASSES, DIM, base_lesson, held_out, lesson, small_head, trained_head


def seen_features(shots: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything that `trained_head` was shown."""
    lessons = [base_lesson(), *(lesson([label], shots, number=label - BASE + 1) for label in range(BASE, CLASSES))]
    return torch.cat([one.features for one in lessons]).double(), torch.cat([one.labels for one in lessons])


@pytest.mark.parametrize("form", ["released", "balanced"])
def test_ranpac_is_ridge_regression_on_random_features(form):
    """Against scikit-learn's Ridge on the rectified features, with sample weights for the balanced form."""
    head = trained_head("ranpac", form=form, ridge=3.0)
    x, y = seen_features()
    h = (x @ head.projection.double()).relu().numpy()
    counts = np.bincount(y)
    weights = np.ones(len(y)) if form == "released" else 1 / (counts[y] * CLASSES)
    model = Ridge(alpha=3.0, fit_intercept=False, solver="cholesky")
    model.fit(h, np.eye(CLASSES)[y.numpy()], sample_weight=weights)
    queries = held_out()[0]
    expected = model.predict((queries.double() @ head.projection.double()).relu().numpy())
    expected = expected * (CLASSES if form == "balanced" else 1)  # Q_c = E_c[h], not divided by the classes
    np.testing.assert_allclose(head.scores(queries).numpy(), expected, rtol=0, atol=2e-2 * np.abs(expected).max())


def test_the_ridge_is_the_one_with_the_least_error_on_the_last_fifth():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.randn(8, 3, generator=generator, dtype=torch.float64)
    targets += 2 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    weights, ridges = torch.rand(60, generator=generator, dtype=torch.float64), [1e-3, 1e-1, 1.0, 10.0, 1e3]
    errors = []
    for ridge in ridges:
        model = Ridge(alpha=ridge, fit_intercept=False).fit(inputs[:48], targets[:48], sample_weight=weights[:48])
        errors.append(np.mean((model.predict(inputs[48:]) - targets[48:].numpy()) ** 2))
    assert best_ridge(inputs, targets, weights, ridges) == ridges[int(np.argmin(errors))]
    assert 0 < int(np.argmin(errors)) < len(ridges) - 1  # a choice, not an end


def test_a_ridge_that_rounding_would_swamp_is_not_chosen():
    generator = torch.Generator().manual_seed(0)
    inputs = 1000 * torch.randn(40, 20, generator=generator)
    targets = inputs @ torch.randn(20, 3, generator=generator)  # no noise: the less ridge the better
    largest = float(np.linalg.eigvalsh((inputs[:32].T @ inputs[:32]).double().numpy()).max())
    ridges = [10.0**power for power in range(-8, 9)]
    chosen = best_ridge(inputs, targets, torch.ones(40), ridges)
    assert chosen == min(ridge for ridge in ridges if ridge > largest * 2**-23) > min(ridges)


def test_ranpac_chooses_again_with_each_task_and_its_balanced_form_once():
    for form, again in (("released", True), ("balanced", False)):
        head = small_head("ranpac", form=form)
        head.fit(base_lesson())
        head.ridge = torch.tensor(123.0, dtype=torch.float64)
        noise = torch.randn(10, DIM, generator=torch.Generator().manual_seed(3))
        head.teach(Lesson(noise, torch.tensor([BASE] * 5 + [BASE + 1] * 5), BASE + 2, base_lesson().views, 1))
        assert (float(head.ridge) != 123.0) == again


def naive_fecam(x, y, queries, shrinkage, calibrated=False):
    """Distances class by class, as the papers write them."""
    means = [x[y == c].mean(0) for c in range(CLASSES)]
    covariances = [torch.cov(x[y == c].T) for c in range(CLASSES)]
    if calibrated:
        base = torch.stack(means[:BASE])
        for c in range(BASE, CLASSES):
            w = torch.softmax(16 * torch.stack([F.cosine_similarity(means[c], b, dim=0) for b in base]), 0)
            shift = sum(w[b] * F.normalize(base[b], dim=0) for b in range(BASE))
            covariances[c] = sum(w[b] * covariances[b] for b in range(BASE)) + covariances[c]
            means[c] = 0.9 * F.normalize(means[c], dim=0) + 0.1 * F.normalize(shift, dim=0)
    scores = torch.zeros(len(queries), CLASSES, dtype=torch.float64)
    for c in range(CLASSES):
        shrunk = covariances[c] + shrinkage * covariances[c].diagonal().mean() * torch.eye(DIM)
        sd = shrunk.diagonal().sqrt()
        inverse = torch.linalg.inv(shrunk / sd[:, None] / sd[None])
        for i, query in enumerate(queries.double()):
            difference = F.normalize(query, dim=0) - F.normalize(means[c], dim=0)
            scores[i, c] = -difference @ inverse @ difference
    return scores


@pytest.mark.parametrize("name, calibrated", [("fecam", False), ("c_fecam", True)])
def test_fecam_and_its_calibrated_form(name, calibrated):
    head = trained_head(name)
    queries = held_out()[0][::20]
    expected = naive_fecam(*seen_features(), queries, 1.0, calibrated)
    torch.testing.assert_close(head.scores(queries).double(), expected, rtol=1e-3, atol=1e-4)


def test_a_class_of_one_image_has_no_covariance_and_is_compared_plainly():
    head = small_head("fecam")
    head.fit(base_lesson())
    single = lesson([BASE], 1, number=1)
    head.teach(single)
    queries = held_out()[0]
    expected = -(F.normalize(queries, dim=1) - F.normalize(single.features, dim=1)).square().sum(1)
    torch.testing.assert_close(head.scores(queries)[:, BASE], expected, rtol=1e-4, atol=1e-5)


def test_correlation_is_numpys():
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).double()
    np.testing.assert_allclose(correlation(torch.cov(x.T), 0.0), np.corrcoef(x.T.numpy()), rtol=1e-10)


def test_c_ranpac_draws_have_the_calibrated_moments():
    head = small_head("c_ranpac", draws=60_000, projections=4)
    head.fit(base_lesson())
    taught = lesson([BASE], 5, number=1)
    head.teach(taught)
    base, shots = base_lesson(), taught.features
    means = torch.stack([base.features[base.labels == c].mean(0) for c in range(BASE)])
    w = torch.softmax(16 * torch.stack([F.cosine_similarity(shots.mean(0), mean, dim=0) for mean in means]), 0)
    mean = 0.9 * shots.mean(0) + 0.1 * sum(w[b] * means[b] for b in range(BASE))
    spread = sum(w[b] * torch.cov(base.features[base.labels == b].T) for b in range(BASE)) + torch.cov(shots.T)
    drawn = head.class_features(BASE)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(torch.cov(drawn.T), 0.5 * spread, rtol=0, atol=0.08)
    assert torch.equal(head.class_features(0), base.features[base.labels == 0])  # base classes stay real


def test_fourier_features_approximate_the_gaussian_kernel():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 4, generator=generator).double()
    frequencies = math.sqrt(2 * 0.3) * torch.randn(4, 200_000, generator=generator).double()
    phases = 2 * math.pi * torch.rand(200_000, generator=generator).double()
    mapped = fourier(x, frequencies, phases)
    expected = torch.exp(-0.3 * torch.cdist(x, x).square())
    torch.testing.assert_close(mapped @ mapped.T, expected, rtol=0, atol=0.01)


def test_klda_s_features_have_the_kernel_of_its_bandwidth():
    head, x = small_head("klda", dimensions=50_000, bandwidth=0.02), base_lesson().features[::30].double()
    mapped = head.mapped(x, 0)
    expected = torch.stack([torch.exp(-0.02 * (x - other).square().sum(1)) for other in x])
    torch.testing.assert_close(mapped @ mapped.T, expected, rtol=0, atol=0.03)
    assert not torch.equal(mapped, head.mapped(x, 1))  # members draw their own


def test_klda_averages_the_probabilities_of_its_members():
    head = trained_head("klda", dimensions=20, bandwidth=0.01)
    x, y = seen_features()
    queries = held_out()[0][::20].double()
    total = torch.zeros(len(queries), CLASSES, dtype=torch.float64)
    for member in range(2):
        mapped, asked = head.mapped(x, member), head.mapped(queries, member)
        means = torch.stack([mapped[y == c].mean(0) for c in range(CLASSES)])
        scatter = sum(torch.outer(row - means[c], row - means[c]) for row, c in zip(mapped, y, strict=True))
        inverse = torch.linalg.pinv(scatter)
        for i, query in enumerate(asked):
            distances = torch.stack([(means[c] - query) @ inverse @ (means[c] - query) for c in range(CLASSES)])
            total[i] += torch.softmax(-distances, 0) / 2
    torch.testing.assert_close(head.scores(queries.float()).exp().double(), total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("count", [8, 7])
def test_gaussian_features_are_the_denser_half_around_each_centre(count):
    """An odd number has one more around the trained row; classes without one have all around the prototype."""
    lesson_, eps, options = base_lesson(), 1e-3, MPCCOptions(features_per_class=count)
    means = [lesson_.features[lesson_.labels == c].mean(0) for c in range(BASE)]
    roots, _ = class_roots(lesson_.features, lesson_.labels, BASE, eps)
    rows = torch.randn(BASE - 1, DIM, generator=torch.Generator().manual_seed(5))
    known = KnownClasses(torch.stack(means), rows, torch.arange(BASE), roots, torch.zeros(0, dtype=torch.int64))
    z = torch.randn(BASE, 2 * count, DIM, generator=torch.Generator().manual_seed(6))
    found = gaussian_features(known, torch.arange(BASE), z, options)
    for c in range(BASE):
        root = torch.linalg.cholesky(torch.cov(lesson_.features[lesson_.labels == c].T) + eps * torch.eye(DIM))
        expected = []
        if c < len(rows):
            groups = (means[c], z[c, :count], count // 2), (rows[c], z[c, count:], count - count // 2)
        else:
            groups = ((means[c], z[c], count),)
        for centre, draws, kept in groups:
            limit = sorted(float(draw @ draw) for draw in draws)[kept - 1]
            expected += [centre + root @ draw for draw in draws if float(draw @ draw) <= limit]
        torch.testing.assert_close(found[c], torch.stack(expected), rtol=1e-3, atol=1e-4)


def test_plda_scores_are_predictive_densities():
    """log N(x; m + posterior mean, Σ + posterior covariance), against scipy, up to a constant per picture."""
    head = trained_head("plda", between_shrinkage=0.0)
    within = 0.7 * head.within.double() + 0.3 * head.within.double().trace() / DIM * torch.eye(DIM)
    root = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(4))
    head.between = root @ root.T  # positive definite, as the six base classes' own cannot be in twelve dimensions
    between, centre = head.between.double(), head.centre.double()
    queries = held_out()[0][::20].double()
    expected = torch.zeros(len(queries), CLASSES, dtype=torch.float64)
    for c in range(CLASSES):
        n = int(head.counts[c])
        gain = between @ torch.linalg.inv(between + within / n)
        mean = centre + gain @ (head.means[c].double() - centre)
        covariance = within + between - gain @ between
        expected[:, c] = torch.from_numpy(multivariate_normal(mean, covariance).logpdf(queries))
    found = head.scores(queries.float()).double()
    torch.testing.assert_close(found - found[:, :1], expected - expected[:, :1], rtol=1e-3, atol=1e-3)


def test_slca_trains_on_draws_around_shortened_means_with_normalised_logits():
    """One epoch, one batch of all draws, against autograd on the formula."""
    draws = 30
    head = small_head("slca", epochs=1, draws=draws * (BASE + 1), lr=0.1, momentum=0.0, weight_decay=0.0)
    head.fit(base_lesson())
    base_rows = head.rows.clone()
    taught = lesson([BASE], 5, number=1)
    head.teach(taught)
    options = head.options
    rows = torch.cat([base_rows, F.normalize(taught.features.mean(0, keepdim=True), dim=1)]).requires_grad_()
    biases = torch.zeros(BASE + 1, requires_grad=True)
    z = head.runtime.randn((BASE + 1, options.draws, DIM), "slca", "z", 1, 0)
    inputs = []
    for c in range(BASE + 1):
        own = base_lesson().features[base_lesson().labels == c] if c < BASE else taught.features
        root = torch.linalg.cholesky(torch.cov(own.T) + 1e-3 * torch.eye(DIM))
        inputs.append(own.mean(0) * (0.95 if c < BASE else 1.0) + z[c] @ root.T)
    labels = torch.arange(BASE + 1).repeat_interleave(options.draws)
    order = torch.randperm(len(labels), generator=head.runtime.generator("slca", "order", 1, 0))
    x, y = torch.cat(inputs), labels
    for chosen in order.split(options.draws):
        logits = x[chosen] @ rows.T + biases
        norm = (logits[:, :BASE].norm(dim=1) + logits[:, BASE:].norm(dim=1)) / 2
        loss = F.cross_entropy(logits / norm[:, None] / 0.1, y[chosen])
        gradients = torch.autograd.grad(loss, (rows, biases))
        rows = (rows - 0.1 * gradients[0]).detach().requires_grad_()
        biases = (biases - 0.1 * gradients[1]).detach().requires_grad_()
    torch.testing.assert_close(head.rows, rows.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(head.biases, biases.detach(), rtol=1e-3, atol=1e-4)
