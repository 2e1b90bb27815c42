"""Class Gaussians: square roots of covariances, kept once and reused, and draws from them (paper Eq. 14-16).

A covariance Σ + εI is held as the smaller of two exact square roots R with R Rᵀ = Σ + εI:

* `packed`:   the lower Cholesky factor, d (d + 1) / 2 numbers;
* `low_rank`: for N ≤ d/2 images Σ = Q diag(s) Qᵀ has rank k ≤ N − 1, and  R = √ε I + Q diag(√(s + ε) − √ε) Qᵀ,  k (d
+ 1) numbers.

A draw is  x = μ + R z,  so its squared Mahalanobis distance is ‖z‖² in both forms, and the density filter needs no
density.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_JITTER_STEPS = 6
ROOTS_AT_ONCE = 64  # classes whose roots are unpacked at a time


@dataclass
class Roots:
    """Square roots of C covariances (+ εI): either `packed` (C, d(d+1)/2) or `basis` (C, d, k) with `spread` (C, k)
    and `floor` = √ε."""

    dim: int
    packed: Tensor | None = None
    basis: Tensor | None = None
    spread: Tensor | None = None  # √(s + ε) − √ε
    floor: float = 0.0

    @property
    def held(self) -> Tensor:
        """What is kept of each class, whichever form it has."""
        held = self.packed if self.packed is not None else self.basis
        assert held is not None
        return held

    def __len__(self) -> int:
        return len(self.held)

    def apply(self, index: Tensor, z: Tensor) -> Tensor:
        """R_c z for rows of draws: index (n,), z (n, m, d) -> (n, m, d)."""
        if self.packed is not None:
            return z @ self.lower(index).transpose(1, 2)
        assert self.basis is not None and self.spread is not None
        basis, spread = self.basis[index], self.spread[index]
        return self.floor * z + ((z @ basis) * spread[:, None, :]) @ basis.transpose(1, 2)

    def apply_each(self, index: Tensor, z: Tensor) -> Tensor:
        """R_c z of single draws, index (n,), z (n, d) -> (n, d): draws of one class are taken together, so that a root
        is read once however many there are."""
        order = index.argsort(stable=True)
        classes, counts = index[order].unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        made = torch.empty_like(z)
        for first in range(0, len(classes), ROOTS_AT_ONCE):
            block = slice(first, first + ROOTS_AT_ONCE)
            place = torch.arange(int(counts[block].max()), device=z.device)  # of a draw among those of its class
            there = place < counts[block, None]
            rows = order[torch.where(there, starts[block, None] + place, 0)]  # (classes, most); the rest is filled up
            made[rows[there]] = self.apply(classes[block], z[rows])[there]
        return made

    def lower(self, index: Tensor) -> Tensor:
        """Cholesky factors (n, d, d) of the given classes."""
        assert self.packed is not None
        rows, columns = torch.tril_indices(self.dim, self.dim, device=self.packed.device)
        factor = self.packed.new_zeros(len(index), self.dim * self.dim)
        factor.scatter_(1, (rows * self.dim + columns).expand(len(index), -1), self.packed[index])
        return factor.view(-1, self.dim, self.dim)

    def covariance(self, index: Tensor) -> Tensor:
        """R Rᵀ of the given classes: (n, d, d)."""
        eye = torch.eye(self.dim, device=index.device, dtype=self.held.dtype)
        root = self.apply(index, eye.expand(len(index), -1, -1))  # rows are R e_i, i.e. Rᵀ
        return root.transpose(1, 2) @ root

    def tensors(self) -> dict[str, Tensor]:
        if self.packed is not None:
            return {"packed": self.packed}
        assert self.basis is not None and self.spread is not None
        return {"basis": self.basis, "spread": self.spread, "floor": torch.tensor([self.floor], dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Roots:
        if "packed" in tensors:
            dim = int(((8 * tensors["packed"].shape[1] + 1) ** 0.5 - 1) / 2)
            return cls(dim, packed=tensors["packed"])
        basis = tensors["basis"]
        return cls(basis.shape[1], basis=basis, spread=tensors["spread"], floor=float(tensors["floor"]))


def packed_roots(covariances: Tensor, eps: float) -> tuple[Roots, float]:
    """Cholesky factors of Σ + εI; ε grows tenfold until every factorisation succeeds. Returns the ε that was used
    too."""
    dim = covariances.shape[-1]
    eye = torch.eye(dim, device=covariances.device, dtype=covariances.dtype)
    for _ in range(MAX_JITTER_STEPS):
        factor, info = torch.linalg.cholesky_ex(covariances + eps * eye)
        if not bool(info.any()):
            rows, columns = torch.tril_indices(dim, dim, device=factor.device)
            return Roots(dim, packed=factor[:, rows, columns]), eps
        eps *= 10
    raise torch.linalg.LinAlgError(
        f"a class covariance is not positive definite even with {eps:g} on its diagonal; "
        "the features hold NaN or infinity"
    )


def low_rank_roots(centred: list[Tensor], eps: float, divisors: list[int]) -> Roots:
    """Exact low-rank roots from the centred features (N_c, d) of each class, padded to the largest rank."""
    dim, rank = centred[0].shape[1], max(min(*c.shape) for c in centred)
    basis = centred[0].new_zeros(len(centred), dim, rank)
    spread = centred[0].new_zeros(len(centred), rank)
    for index, (rows, divisor) in enumerate(zip(centred, divisors, strict=True)):
        _, singular, right = torch.linalg.svd(rows, full_matrices=False)
        k = len(singular)
        basis[index, :, :k] = right.T
        spread[index, :k] = (singular**2 / divisor + eps).sqrt() - eps**0.5
    return Roots(dim, basis=basis, spread=spread, floor=eps**0.5)


def class_roots(
    features: Tensor, labels: Tensor, classes: int, eps: float = 1e-3, unbiased: bool = True, form: str = "auto"
) -> tuple[Roots, float]:
    """Square roots of every class covariance + εI, in the smaller form (or the one asked for: full | low_rank)."""
    dim = features.shape[1]
    counts = torch.bincount(labels, minlength=classes)
    if form == "auto":
        form = "low_rank" if int(counts.max()) - 1 < dim / 2 else "full"
    if form == "low_rank":
        groups = [features[labels == c] for c in range(classes)]
        centred = [g - g.mean(0) for g in groups]
        return low_rank_roots(centred, eps, [max(1, len(g) - unbiased) for g in groups]), eps
    from fscil.maths.prototypes import class_covariances

    return packed_roots(class_covariances(features, labels, classes, unbiased), eps)


def covariance_roots(roots: Roots, label: int, covariance: Tensor, eps: float) -> Roots:
    """`roots` with the root of one class made anew from its covariance (without ε); a low-rank basis widens as
    needed."""
    if roots.packed is not None:
        packed = roots.packed.clone()
        packed[label] = packed_roots(covariance[None], eps)[0].held[0]
        return Roots(roots.dim, packed=packed)
    assert roots.basis is not None and roots.spread is not None
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    rank = max(1, int((values > values[-1] * roots.dim * torch.finfo(values.dtype).eps).sum()))
    values, vectors = values[-rank:].clamp(min=0), vectors[:, -rank:]
    spare = max(0, rank - roots.basis.shape[2])
    basis = torch.cat([roots.basis, roots.basis.new_zeros(len(roots), roots.dim, spare)], 2)
    spread = torch.cat([roots.spread, roots.spread.new_zeros(len(roots), spare)], 1)
    basis[label], spread[label] = 0, 0
    basis[label, :, :rank], spread[label, :rank] = vectors, (values + eps).sqrt() - eps**0.5
    return Roots(roots.dim, basis=basis, spread=spread, floor=roots.floor)


def densest_half(z: Tensor, keep: int) -> Tensor:
    """The `keep` draws of smallest norm along axis −2, in their original order: (…, m, d) -> (…, keep, d)."""
    order = z.square().sum(-1).argsort(-1)[..., :keep].sort(-1).values
    return z.gather(-2, order.unsqueeze(-1).expand(*order.shape, z.shape[-1]))
