"""The discriminant that is kept between lessons: what is solved for anew, also by several threads."""

import threading

import torch

from fscil.heads.remembered import Remembered
from fscil.maths.discriminant import discriminant


def test_what_is_remembered_is_never_stale():
    means, counts, pooled = (
        torch.randn(5, 3, dtype=torch.float64),
        torch.arange(1, 6),
        torch.eye(3, dtype=torch.float64),
    )
    remembered = Remembered()
    first = remembered(means, counts, pooled, 0.3)
    assert remembered(means, counts, pooled, 0.3) is first
    changes = [
        lambda: means.__setitem__(2, 7.0),  # written to in place
        lambda: counts.add_(1),
        lambda: pooled.mul_(2),
    ]
    for change in changes:
        change()
        for own, fresh in zip(remembered(means, counts, pooled, 0.3), discriminant(means, counts, pooled, 0.3)):
            assert torch.equal(own, fresh)
    more = torch.cat([means, means[:1]])
    assert len(remembered(more, torch.arange(1, 7), pooled, 0.3)[0]) == 6
    torch.testing.assert_close(remembered(means, counts, pooled, 0.9), discriminant(means, counts, pooled, 0.9))


def test_threads_that_ask_while_it_is_solved_for_again_all_get_theirs():
    pooled, alphas = torch.eye(8), [0.1, 0.5]
    means, counts = torch.randn(300, 8), torch.ones(300)
    expected = {alpha: discriminant(means, counts, pooled, alpha)[0] for alpha in alphas}
    remembered, wrong = Remembered(), []

    def ask(alpha):
        for _ in range(200):
            if not torch.equal(remembered(means, counts, pooled, alpha)[0], expected[alpha]):
                wrong.append(alpha)

    threads = [threading.Thread(target=ask, args=(alphas[number % 2],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
