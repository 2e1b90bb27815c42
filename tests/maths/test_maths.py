"""The equations against their obvious slow forms, autograd, scikit-learn and Monte-Carlo estimates."""

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.nn import functional as F

from fscil.maths import discriminant as discriminants
from fscil.maths import gaussians
from fscil.maths.discriminant import discriminant, pooled_covariance, shrink
from fscil.maths.fisher import batch_square, block_norms, sample_square
from fscil.maths.gaussians import class_roots, densest_half, packed_roots
from fscil.maths.margins import cosine_schedule, margin_loss, penalise, streams_loss
from fscil.maths.merging import merge_factors, merge_weights
from fscil.maths.prototypes import class_covariances, class_means, combine_moments, nearest_rows


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_margin_loss_equals_the_explicit_formula_and_its_gradient():
    features, rows, labels = randn(6, 5), randn(4, 5).requires_grad_(), torch.tensor([0, 3, 1, 1, 2, 0])
    s, m = 16.0, 0.2
    total = 0.0
    for f, y in zip(features, labels.tolist(), strict=True):
        cosines = torch.stack([f @ w / (f.norm() * w.norm()) for w in rows])
        target = torch.exp(s * (cosines[y] - m))
        others = sum(torch.exp(s * c) for j, c in enumerate(cosines) if j != y)
        total = total - torch.log(target / (target + others))
    expected = total / 6
    ours = margin_loss(features, rows, labels, s, m)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, rows)[0] for loss in (ours, expected)))


def test_margin_zero_is_plain_cross_entropy_and_a_larger_margin_costs_more():
    features, rows, labels = randn(6, 5), randn(4, 5), torch.tensor([0, 3, 1, 1, 2, 0])
    cosines = F.normalize(features, dim=1) @ F.normalize(rows, dim=1).T
    torch.testing.assert_close(margin_loss(features, rows, labels, 16.0, 0.0), F.cross_entropy(16 * cosines, labels))
    losses = [float(margin_loss(features, rows, labels, 16.0, m)) for m in (0.0, 0.1, 0.2, 0.3)]
    assert losses == sorted(losses) and len(set(losses)) == 4


def test_penalise_refuses_a_label_out_of_range():
    with pytest.raises((RuntimeError, IndexError)):
        penalise(randn(1, 3), torch.tensor([3]), 0.2)


def test_streams_loss_is_each_streams_own_loss():
    features, rows, labels = randn(3, 6, 5), randn(3, 4, 5), torch.tensor([0, 3, 1, 1, 2, 0])
    scales, margins = torch.tensor([16.0, 1.0, 4.0]).double(), torch.tensor([0.0, 0.2, 0.1]).double()
    expected = torch.stack([margin_loss(features[i], rows[i], labels, scales[i], margins[i]) for i in range(3)])
    torch.testing.assert_close(streams_loss(features, rows, labels, scales, margins), expected)


def test_cosine_schedule_equals_torch():
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20)
    for epoch in range(20):
        assert cosine_schedule(0.01, epoch, 20) == pytest.approx(optimiser.param_groups[0]["lr"], abs=1e-12)
        optimiser.step()
        schedule.step()


def test_fisher_squares_equal_autograd_on_dense_leaves():
    images, tokens, dim, out = 5, 3, 4, 6
    x, weight = randn(images, tokens, dim), randn(out, dim).requires_grad_()
    readout = randn(tokens, out)

    def loss_of(index):
        return torch.tanh((x[index] @ weight.T) * readout).sum()

    per_sample = torch.stack([torch.autograd.grad(loss_of(i), weight)[0] for i in range(images)])
    y = (x @ weight.T).detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(y * readout).sum(), y)
    torch.testing.assert_close(sample_square(x[None], g[None])[0], (per_sample**2).sum(0))
    torch.testing.assert_close(batch_square(x[None], g[None])[0], per_sample.sum(0) ** 2)
    torch.testing.assert_close(block_norms(per_sample[0]), (per_sample[0] ** 2).sum().sqrt())


def test_factored_merge_equals_the_dense_sum():
    A, B = randn(3, 2, 2, 4, 7), randn(3, 2, 2, 7, 4)
    weights = merge_weights(torch.rand(3, 2, 2, dtype=torch.float64))
    joined_A, joined_B = merge_factors(A, B, weights)
    dense = weights[..., None, None] * (B @ A)
    torch.testing.assert_close((joined_B @ joined_A)[:, 0], dense.sum(1))
    assert joined_A.shape == (3, 1, 2, 8, 7)
    assert merge_weights(torch.zeros(1, 2, 2)).eq(0.5).all()


def test_prototypes_and_covariances_equal_the_naive_forms():
    features, labels = randn(50, 6), torch.arange(50) % 4
    means, covariances = class_means(features, labels, 4), class_covariances(features, labels, 4)
    for label in range(4):
        torch.testing.assert_close(means[label], features[labels == label].mean(0))
        torch.testing.assert_close(covariances[label], torch.cov(features[labels == label].T))


def test_chan_update_equals_the_batch_formula():
    first, second = randn(9, 5), randn(4, 5)
    parts = [(len(x), x.mean(0), (x - x.mean(0)).T @ (x - x.mean(0))) for x in (first, second)]
    count, mean, scatter = combine_moments(*parts[0], *parts[1])
    together = torch.cat([first, second])
    assert count == 13
    torch.testing.assert_close(mean, together.mean(0))
    torch.testing.assert_close(scatter / 12, torch.cov(together.T))


def test_neighbour_is_the_largest_cosine_and_ties_go_to_the_lowest_index():
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    assert nearest_rows(torch.tensor([[5.0, 0.1], [0.1, 3.0]]), rows).tolist() == [0, 2]


@pytest.mark.parametrize("form", ["full", "low_rank"])
def test_roots_give_the_covariance_and_the_log_density(form):
    dim, eps = 12, 1e-3
    features, labels = randn(24, dim), torch.arange(24) % 3  # 8 images per class: rank 7
    roots, used = class_roots(features, labels, 3, eps, form=form)
    assert used == eps
    index = torch.arange(3)
    expected = class_covariances(features, labels, 3) + eps * torch.eye(dim, dtype=torch.float64)
    torch.testing.assert_close(roots.covariance(index), expected, rtol=0, atol=1e-10)
    z = randn(3, 5, dim)
    x = roots.apply(index, z)
    for label in range(3):  # ‖z‖² is the squared Mahalanobis distance, so it orders draws by density
        density = torch.distributions.MultivariateNormal(torch.zeros(dim).double(), expected[label]).log_prob(x[label])
        constant = density + 0.5 * z[label].square().sum(1)
        torch.testing.assert_close(constant, constant[:1].expand(5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["full", "low_rank"])
def test_single_draws_are_taken_together_by_class(form, monkeypatch):
    monkeypatch.setattr(gaussians, "ROOTS_AT_ONCE", 2)  # several blocks of classes, some draws of each, none of class 3
    roots, _ = class_roots(randn(40, 12), torch.arange(40) % 5, 5, form=form)
    index, z = torch.tensor([4, 0, 0, 2, 4, 4, 1, 4]), randn(8, 12)
    expected = torch.cat([roots.apply(index[i : i + 1], z[i : i + 1, None])[:, 0] for i in range(8)])
    torch.testing.assert_close(roots.apply_each(index, z), expected, rtol=0, atol=1e-12)
    assert roots.apply_each(index[:0], z[:0]).shape == (0, 12)


def test_auto_form_takes_the_smaller_and_both_sample_alike():
    features, labels = randn(30, 40), torch.arange(30) % 2
    assert class_roots(features, labels, 2)[0].basis is not None
    assert class_roots(randn(100, 8), torch.arange(100) % 2, 2)[0].packed is not None
    index, z = torch.tensor([0]), randn(1, 60_000, 40)
    full, low = (class_roots(features, labels, 2, form=f)[0] for f in ("full", "low_rank"))
    for roots in (full, low):
        draws = roots.apply(index, z)[0]
        assert draws.mean(0).abs().max() < 0.05
        expected = full.covariance(index)[0]
        assert (torch.cov(draws.T) - expected).norm() / expected.norm() < 0.03


def test_jitter_grows_until_cholesky_succeeds():
    broken = torch.diag(torch.tensor([1.0, -0.005]).double())[None]
    roots, used = packed_roots(broken, 1e-3)
    assert used == pytest.approx(1e-2)
    torch.testing.assert_close(roots.covariance(torch.tensor([0]))[0], broken[0] + used * torch.eye(2).double())
    with pytest.raises(torch.linalg.LinAlgError, match="positive definite"):
        packed_roots(torch.full((1, 2, 2), float("nan")).double(), 1e-3)


def test_density_filter_keeps_the_smallest_half_in_order():
    z = randn(4, 10, 6)
    kept = densest_half(z, 5)
    for group, chosen in zip(z, kept, strict=True):
        order = sorted(sorted(range(10), key=lambda i, g=group: float(g[i].norm()))[:5])
        torch.testing.assert_close(chosen, group[order])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.9])
def test_closed_form_without_correction_is_scikit_learns_lda(alpha):
    features, labels = randn(90, 5) + 2 * torch.eye(5, dtype=torch.float64)[torch.arange(90) % 3], torch.arange(90) % 3
    means = class_means(features, labels, 3)
    pooled = pooled_covariance(features, labels, means)
    queries = randn(40, 5)
    weights, biases = discriminant(means, torch.full((3,), 30), pooled, alpha, gamma=0.0)
    scores = queries @ weights.T + biases

    class SharedCovariance:
        """Hands scikit-learn the same shrunken pooled covariance (its own divides by N)."""

        def fit(self, _):
            self.covariance_ = shrink(pooled, alpha).numpy()
            return self

    lda = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / 3] * 3, covariance_estimator=SharedCovariance())
    theirs = lda.fit(features.numpy(), labels.numpy()).predict_log_proba(queries.numpy())
    torch.testing.assert_close(scores.log_softmax(1), torch.from_numpy(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [1, 3, 8192])
def test_classes_are_solved_for_in_blocks_as_by_the_inverse(monkeypatch, block):
    monkeypatch.setattr(discriminants, "BLOCK", block)
    means, counts, root = randn(7, 4), torch.tensor([1, 5, 2, 9, 4, 30, 3]), randn(4, 4)
    pooled = root @ root.T
    weights, biases = discriminant(means.float(), counts, pooled.float(), 0.3, 0.5)
    inverse = torch.linalg.inv(shrink(pooled, 0.3))
    expected = [-0.5 * mean @ inverse @ mean + 0.25 * (inverse @ pooled).trace() / n for mean, n in zip(means, counts)]
    torch.testing.assert_close(weights, (means @ inverse).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(biases, torch.stack(expected).float(), rtol=1e-4, atol=1e-5)
    assert discriminant(means.float(), counts, pooled.float(), 0.3, dtype=torch.float64)[0].dtype == torch.float64


def test_correction_is_the_inflation_of_the_squared_distance():
    """E‖x − μ̂‖² over noisy means minus ‖x − μ‖² is tr(Σ⁻¹ S)/n: a Monte-Carlo estimate against the bias that is
    added."""
    dim, images, draws = 6, 5, 200_000
    root = randn(dim, dim)
    pooled = root @ root.T / dim
    mean, query = randn(1, dim), randn(dim)
    noise = randn(draws, dim) @ torch.linalg.cholesky(pooled / images).T
    noisy = mean + torch.cat([noise, -noise])  # in pairs, so that the linear term cancels

    def distance(centres):
        difference = query - centres
        return (difference * torch.linalg.solve(shrink(pooled, 0.3), difference.T).T).sum(1)

    inflation = distance(noisy).mean() - distance(mean)[0]
    count = torch.tensor([images])
    with_correction, without = (discriminant(mean, count, pooled, 0.3, gamma)[1] for gamma in (1.0, 0.0))
    assert float(2 * (with_correction - without)) == pytest.approx(float(inflation), rel=0.02)
