"""Which unlabelled points are worth a label: uncertain ones, strange ones, and no two alike.

    worth_i = 1 − (p₁ − p₂)  +  share of the others that fit the known classes better than i does
    next    = argmax worth_i · min(1, ‖x_i − nearest chosen‖ / u)

The first term is the margin of the two likeliest classes (Scheffer et al. 2001), the second finds classes that are not
known yet; u is the usual distance of two points of one class. So it is a greedy k-centre (Sener and Savarese 2018,
arXiv 1708.00489) in which a point counts by its worth, and twenty pictures of one scene are asked about once.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPED_AT_MOST = 3000  # points that are grouped; more would take gigabytes


def margin_worth(probabilities: Tensor) -> Tensor:
    """(n, C) -> (n,): 0 where one class is certain, 1 where two are equally likely.

    >>> margin_worth(torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.75, 0.25]])).tolist()
    [0.0, 1.0, 0.5]
    """
    if probabilities.shape[1] < 2:
        return torch.zeros(len(probabilities), dtype=probabilities.dtype)
    best = probabilities.topk(2, dim=1).values
    return 1 - (best[:, 0] - best[:, 1])


def strangeness(fits: Tensor) -> Tensor:
    """(n,) -> (n,): the share of points that fit better than each does.

    >>> strangeness(torch.tensor([3.0, 1.0, 2.0, 4.0])).tolist()
    [0.25, 0.75, 0.5, 0.0]
    """
    return 1 - (fits.argsort().argsort() + 1) / len(fits)


def groups_of(points: Tensor, width: float) -> Tensor:
    """Number of the group of each point (n,), by average linkage: members of a group are less than `width` apart on
    average. Beyond `GROUPED_AT_MOST` points the rest join the group of the nearest one."""
    if len(points) < 2:
        return torch.zeros(len(points), dtype=torch.int64)
    from scipy.cluster.hierarchy import fcluster, linkage

    first = points[:GROUPED_AT_MOST]
    found = torch.from_numpy(fcluster(linkage(first.cpu().double().numpy(), "average"), width, "distance") - 1).long()
    rest = [found[torch.cdist(part, first).argmin(1).cpu()] for part in points[GROUPED_AT_MOST:].split(1024)]
    return torch.cat([found, *rest])


def choose_diverse(worth: Tensor, points: Tensor, width: float, count: int) -> list[int]:
    """Positions of `count` points (n, d), best first; see above."""
    chosen: list[int] = []
    near = torch.full((len(points),), torch.inf, dtype=points.dtype, device=points.device)
    worth = worth.to(points)
    for _ in range(min(count, len(points))):
        value = worth * (near / width).clamp(max=1)
        value[chosen] = -torch.inf
        chosen.append(int(value.argmax()))
        near = torch.minimum(near, (points - points[chosen[-1]]).norm(dim=1))
    return chosen
