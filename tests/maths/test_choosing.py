"""Choosing what to label: each step against a naive search, and what the whole prefers."""

import torch

from fscil.maths.choosing import choose_diverse, groups_of, margin_worth


def test_each_choice_is_the_best_by_a_naive_search():
    generator = torch.Generator().manual_seed(0)
    points, worth = torch.randn(30, 4, generator=generator), torch.rand(30, generator=generator)
    chosen = choose_diverse(worth, points, 2.0, 8)
    assert len(set(chosen)) == 8
    for step in range(8):
        before = chosen[:step]
        values = {
            at: float(worth[at]) * min([1.0, *(float((points[at] - points[other]).norm()) / 2.0 for other in before)])
            for at in range(30)
            if at not in before
        }
        assert chosen[step] == max(values, key=values.get)


def test_alike_points_are_asked_about_once_and_all_are_given_when_asked_for():
    points = torch.tensor([[0.0, 0.0], [0.01, 0.0], [5.0, 0.0]])
    assert choose_diverse(torch.tensor([1.0, 0.99, 0.5]), points, 1.0, 2) == [0, 2]
    assert sorted(choose_diverse(torch.zeros(3), points, 1.0, 9)) == [0, 1, 2]


def test_groups_are_what_lies_together():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    truth = torch.arange(3).repeat(8)
    noise = 0.3 * torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    groups = groups_of(centres[truth] + noise, 2.0)
    same = groups[:, None] == groups[None]
    assert torch.equal(same, truth[:, None] == truth[None])
    assert groups_of(torch.zeros(1, 2), 1.0).tolist() == [0] and groups_of(torch.zeros(0, 2), 1.0).tolist() == []


def test_many_points_join_the_nearest_group(monkeypatch):
    monkeypatch.setattr("fscil.maths.choosing.GROUPED_AT_MOST", 4)
    points = torch.tensor([[0.0], [0.1], [9.0], [9.1], [0.2], [8.9]])
    groups = groups_of(points, 1.0)
    assert groups[4] == groups[0] == groups[1] and groups[5] == groups[2] == groups[3] != groups[0]


def test_one_class_has_no_margin():
    assert margin_worth(torch.ones(3, 1)).tolist() == [0, 0, 0]
