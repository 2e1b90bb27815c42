"""L2P, DualPrompt, CODA-Prompt, their + forms, and ASP on a tiny ViT: formulas, special cases, mechanisms off."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn import functional as F

from fscil.backbones.prompts import as_prefix, insert_prompts, lookup, run_deep
from fscil.backbones.vit import Backbone
from fscil.config import resolve
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.maths import prompting
from fscil.methods.asp import ASP
from fscil.methods.coda import CodaPrompt
from fscil.methods.dualprompt import DualPrompt
from fscil.methods.l2p import L2P
from fscil.runtime import Runtime, Shelf
from tiny_world import make_vit

DIM, DEPTH, PATCHES = 16, 3, 4
SMALL = {
    L2P: dict(epochs=2, batch_size=8, pool_size=4, length=2, top=2),
    DualPrompt: dict(epochs=2, batch_size=8, expert_blocks=(1, 2), general_blocks=(0,), expected_tasks=3),
    CodaPrompt: dict(epochs=2, batch_size=8, components=6, expected_tasks=3, length=4, blocks=(0, 2)),
    ASP: dict(epochs=2, batch_size=8, tokens=4, hidden=8, lr=0.1),
}
PROMPTED = [L2P, DualPrompt, CodaPrompt]


class Box(Shelf):
    """A shelf in memory that counts what it gave."""

    def __init__(self):
        self.kept, self.given = {}, 0

    def get(self, key):
        found = self.kept.get(repr(key))
        self.given += found is not None
        return found

    def put(self, key, tensors):
        self.kept[repr(key)] = {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    vit = make_vit(embed_dim=DIM, depth=DEPTH)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in vit.parameters():  # timm starts biases and positions at zero, which would hide mistakes
            torch.nn.init.normal_(parameter, std=0.3)
    return Backbone(vit, "tiny").prepare(Runtime(dtype=torch.float64))


def make_store(classes: int = 9, images: int = 6) -> tuple[ImageStore, torch.Tensor]:
    random = np.random.default_rng(0)
    colours = random.integers(0, 200, (classes, 1, 16, 16, 3))
    pictures = (colours + random.integers(0, 55, (classes, images, 16, 16, 3))).astype(np.uint8)
    return ImageStore.from_array(pictures.reshape(-1, 16, 16, 3)), torch.arange(classes).repeat_interleave(images)


STORE, LABELS = make_store()
ALL = Pixels(STORE, Transform(size=16, resize=16))


def make_task(index: int, classes: tuple[int, ...], shots: int = 6) -> Task:
    positions = torch.cat([(LABELS == label).nonzero().squeeze(1)[:shots] for label in classes])
    return Task(index, classes, ALL.select(positions), LABELS[positions])


BASE = make_task(0, (0, 1, 2))
NEW = [make_task(1, (3, 4), 3), make_task(2, (5, 6), 3), make_task(3, (7, 8), 3)]


def make(cls, backbone, runtime=None, **options):
    runtime = runtime or Runtime(dtype=torch.float64)
    return cls(backbone, cls.Options(**{**SMALL[cls], **options}), runtime)


def copied(method) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in method.state().items()}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# ---- formulas ------------------------------------------------------------------------------------------------------


def test_masked_cross_entropy_is_cross_entropy_of_the_current_columns_alone():
    features, rows, labels = random(5, 4), random(7, 4).requires_grad_(), torch.tensor([2, 3, 2, 5, 5])
    current = torch.zeros(7, dtype=torch.bool)
    current[[2, 3, 5]] = True
    loss = prompting.masked_cross_entropy(features @ rows.T, labels, current)
    small = F.cross_entropy(features @ rows[[2, 3, 5]].T, torch.tensor([0, 1, 0, 2, 2]))
    torch.testing.assert_close(loss, small)
    loss.backward()
    assert torch.equal(rows.grad[~current], torch.zeros(4, 4, dtype=torch.float64))  # exactly zero, not nearly
    assert (rows.grad[current].abs().sum(1) > 0).all()


def test_key_pull_and_component_weights_equal_their_loops():
    query, keys, attention = random(3, 5), random(3, 2, 5), random(4, 5)
    sums = [sum(F.cosine_similarity(query[b], key, dim=0) for key in keys[b]) for b in range(3)]
    torch.testing.assert_close(prompting.key_pull(query, keys), sum(sums) / 3)
    component_keys = random(2, 4, 5)
    weights = prompting.component_weights(query, attention.expand(2, -1, -1), component_keys)
    for block in range(2):
        for b in range(3):
            for k in range(4):
                expected = F.cosine_similarity(query[b] * attention[k], component_keys[block, k], dim=0)
                torch.testing.assert_close(weights[block, b, k], expected)


def test_gram_schmidt_is_the_textbook_loop_and_survives_lack_of_room():
    earlier, draws = torch.linalg.qr(random(8, 3))[0].T, random(2, 8)
    expected = []
    for draw in draws:
        residual = draw - sum((u @ draw) * u for u in [*earlier, *expected])
        expected.append(residual / residual.norm())
    torch.testing.assert_close(prompting.gram_schmidt(earlier, draws), torch.stack(expected))
    skewed = random(3, 8)  # trained components are not orthogonal to one another
    torch.testing.assert_close(prompting.gram_schmidt(skewed, draws) @ skewed.T, torch.zeros(2, 3, dtype=torch.float64))
    crowded = prompting.gram_schmidt(random(6, 8), random(5, 8))
    torch.testing.assert_close(crowded.norm(dim=1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(crowded[2:], F.normalize(random(5, 8)[2:], dim=1))
    assert prompting.gram_schmidt(random(9, 8), random(2, 8)).shape == (2, 8)


def test_orthogonality_kl_and_anchor_distance_equal_independent_forms():
    rows = random(2, 3, 5)
    expected = sum(((x @ x.T - torch.eye(3, dtype=torch.float64)) ** 2).mean() for x in rows)
    torch.testing.assert_close(prompting.orthogonality(rows), expected)
    mean, std = random(4, 3, 5), random(5, 3, 4).transpose(0, 2).abs() + 0.1
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(prompting.kl_to_standard_normal(mean, std), kl.sum(-1).mean())
    features, labels = random(5, 4), torch.tensor([0, 3, 0, 0, 3])
    anchors = random(4, 4)[labels].requires_grad_()
    # as released: each image of the batch brings its class once more, and with it the mean distance of that class
    distance = 1 - F.cosine_similarity(features, anchors)
    expected = sum(distance[labels == label].mean() for label in labels) / len(labels)
    features.requires_grad_()
    value = prompting.anchor_distance(features, anchors)
    torch.testing.assert_close(value, expected)
    value.backward()
    assert anchors.grad is None and features.grad.abs().sum() > 0  # no gradient into the anchors


def test_lookup_takes_the_nearest_keys_and_votes_by_frequency():
    keys = torch.eye(4)
    query = torch.tensor([[3.0, 2.0, 0.1, 0.0], [3.0, 0.1, 2.0, 0.0], [0.1, 2.0, 3.0, 0.0]])
    assert lookup(query, keys, 2).tolist() == [[0, 1], [0, 2], [2, 1]]
    # ballots: 0 twice, 1 twice, 2 twice, 3 never; ties go to the lowest number
    assert lookup(query, keys, 2, vote=True).tolist() == [[0, 1]] * 3
    assert lookup(query[1:], keys, 1, vote=True).tolist() == [[0]] * 2


# ---- prompts inside the ViT ----------------------------------------------------------------------------------------


def naive_block(block, tokens, prefix=None):
    """A pre-norm block written out, with explicit softmax attention."""
    x, attn = block.norm1(tokens), block.attn
    qkv = x @ attn.qkv.weight.T + attn.qkv.bias
    heads = [part.reshape(*part.shape[:2], attn.num_heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1)]
    q, k, v = heads
    if prefix is not None:
        k, v = torch.cat([prefix[0], k], 2), torch.cat([prefix[1], v], 2)
    weights = ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5).softmax(-1)
    tokens = tokens + attn.proj((weights @ v).transpose(1, 2).flatten(2))
    return tokens + block.mlp(block.norm2(tokens))


def naive_features(backbone, images, prompts):
    """Features with prefixes {block: (2, B, length, d)} by the naive block."""
    tokens = backbone.embed(images)
    for number, block in enumerate(backbone.vit.blocks):
        prefix = None
        if number in prompts:
            prefix = [p.reshape(*p.shape[:2], backbone.heads, -1).transpose(1, 2) for p in prompts[number]]
        tokens = naive_block(block, tokens, prefix)
    return backbone.vit.norm(tokens)[:, 0]


def test_prefix_tuning_equals_attention_written_out(backbone):
    images, prompts = random(2, 3, 16, 16), {0: random(2, 2, 3, DIM), 2: random(2, 2, 5, DIM)}
    features = backbone(images, prefix=as_prefix(backbone, prompts))
    torch.testing.assert_close(features, naive_features(backbone, images, prompts))
    assert not torch.allclose(features, backbone(images))


def test_l2p_sequence_is_class_token_prompts_patches(backbone):
    method, images = make(L2P, backbone), random(2, 3, 16, 16)
    lengths = []
    hooks = [b.norm1.register_forward_hook(lambda m, i, o: lengths.append(i[0].shape[1])) for b in backbone.vit.blocks]
    query = backbone(images)
    lengths.clear()
    feature = method.embed(images, query)
    for hook in hooks:
        hook.remove()
    count = 2 * 2  # N prompts of length L
    assert lengths == [1 + count + PATCHES] * DEPTH
    chosen = lookup(query, method.keys, 2)
    prompts = torch.stack([torch.cat([method.prompts[k] for k in row]) for row in chosen])
    plain = backbone.embed(images)
    position = backbone.vit.pos_embed[0, 0]
    tokens = torch.cat([plain[:, :1], prompts + position, plain[:, 1:]], 1)
    torch.testing.assert_close(insert_prompts(backbone, plain, prompts), tokens)
    for block in backbone.vit.blocks:
        tokens = naive_block(block, tokens)
    torch.testing.assert_close(feature, backbone.vit.norm(tokens)[:, 1 : 1 + count].mean(1))


def test_deep_prompts_join_every_block_and_leave_after_it(backbone):
    images, prompts = random(2, 3, 16, 16), random(2, DEPTH, 4, DIM)
    tokens = backbone.embed(images)
    for number, block in enumerate(backbone.vit.blocks):
        tokens = naive_block(block, torch.cat([tokens, prompts[:, number]], 1))[:, : 1 + PATCHES]
    expected = backbone.vit.norm(tokens)[:, 0]
    torch.testing.assert_close(run_deep(backbone, backbone.embed(images), prompts), expected)


# ---- L2P, DualPrompt and CODA-Prompt -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", PROMPTED)
def test_few_shot_tasks_train_new_rows_and_leave_old_rows_exactly(cls, backbone):
    method = make(cls, backbone)  # batch 8 of 6 shots: a loader that drops short batches would do nothing
    method.fit_base(BASE)
    before = copied(method)
    method.learn(NEW[0])
    assert method.head_rows.shape == (5, DIM)
    assert torch.equal(method.head_rows[:3], before["head_rows"]) and torch.equal(
        method.head_bias[:3], before["head_bias"]
    )
    untrained = make(cls, backbone)
    untrained.class_counts = method.class_counts[:3]
    untrained._grow_head()
    untrained.class_counts = method.class_counts
    untrained._grow_head()
    assert (method.head_rows[3:] - untrained.head_rows[3:]).abs().amin() > 0
    assert method.logits(ALL).shape == (len(ALL), 5)


@pytest.mark.parametrize("cls", PROMPTED)
def test_loss_is_masked_and_its_gradient_spares_old_rows(cls, backbone):
    method = make(cls, backbone)
    method.fit_base(BASE)
    method.count_classes(NEW[0])
    method._grow_head()
    method.open_task(1)
    current = torch.tensor([False, False, False, True, True])
    method.loss(NEW[0].images.plain().double(), NEW[0].labels, current, 1).backward()
    assert torch.equal(method.head_rows.grad[:3], torch.zeros(3, DIM, dtype=torch.float64))
    assert method.head_rows.grad[3:].abs().sum() > 0
    assert all(parameter.grad is None for parameter in backbone.parameters())


@pytest.mark.parametrize("cls", PROMPTED)
def test_plus_form_is_class_means_on_the_parents_base_model(cls, backbone):
    shelf = Box()
    runtime = Runtime(dtype=torch.float64, shelf=shelf)
    parent = make(cls, backbone, runtime)
    parent.fit_base(BASE)
    plus = make(cls, backbone, runtime, prototypes=True)
    plus.fit_base(BASE)
    assert shelf.given == 1 and len(shelf.kept) == 1 and plus.features_fixed and not parent.features_fixed
    alone = make(cls, backbone, prototypes=True)
    alone.fit_base(BASE)
    for name, tensor in plus.state().items():
        assert torch.equal(tensor, alone.state()[name]), name
        assert name == "means" or torch.equal(tensor, parent.state()[name]), name
    features, before = plus.features(ALL), copied(plus)
    plus.learn(NEW[0])
    assert torch.equal(plus.features(ALL), features)  # promised by features_fixed
    changed = {name for name, tensor in plus.state().items() if not torch.equal(tensor, before[name])}
    assert changed == {"means", "class_counts", "tasks_seen"}
    own = plus.features(NEW[0].images)
    means = [plus.features(BASE.images)[BASE.labels == c].mean(0) for c in (0, 1, 2)] + [
        own[:3].mean(0),
        own[3:].mean(0),
    ]
    torch.testing.assert_close(plus.means, torch.stack(means))
    cosines = F.cosine_similarity(features[:, None], torch.stack(means)[None], dim=-1)
    assert torch.equal(plus.logits_from(features).argmax(1), cosines.argmax(1))


def test_images_of_known_classes_refine_their_means(backbone):
    method = make(L2P, backbone, prototypes=True, epochs=1)
    method.fit_base(make_task(0, (0, 1), shots=4))
    more = (LABELS < 3).nonzero().squeeze(1)
    more = more[(LABELS[more] == 2) | (more % 6 >= 4)]  # the last two images of classes 0 and 1, and class 2
    method.learn(Task(1, (2,), ALL.select(more), LABELS[more]))
    features = method.features(ALL)
    for label in range(3):
        torch.testing.assert_close(method.means[label], features[LABELS == label].mean(0))


@pytest.mark.parametrize("cls", [*PROMPTED, ASP])
def test_prompt_free_features_of_test_images_are_computed_once(cls, backbone):
    method = make(cls, backbone, epochs=1)
    method.fit_base(BASE)
    passed = []
    hook = backbone.vit.patch_embed.register_forward_hook(lambda m, i, o: passed.append(len(o)))
    first = method.logits(ALL.select(torch.arange(18, 28)))  # none of them seen in training
    assert sum(passed) == 20  # query and prompted pass
    passed.clear()
    grown = method.logits(ALL.select(torch.arange(18, 32)))
    hook.remove()
    assert sum(passed) == 14 + 4  # queries of the four new images only
    torch.testing.assert_close(grown[:10], first)


def test_selection_by_batch_vote_is_off_at_test_time_unless_asked_for(backbone):
    for vote in (False, True):
        method = make(L2P, backbone, vote_at_test=vote, pool_size=6, top=1, epochs=1)
        method.fit_base(BASE)
        queries = method.query_features(ALL)
        with torch.no_grad():
            method.keys.copy_(queries[::9][:6])  # keys that spread the images over the pool
        alone = torch.cat([method.logits(ALL.select([i])) for i in range(len(ALL))])
        assert torch.allclose(method.logits(ALL), alone) is not vote


def test_vote_in_training_and_pull_change_the_loss(backbone):
    images, labels, current = BASE.images.plain().double(), BASE.labels, torch.ones(3, dtype=torch.bool)
    losses = {}
    for name, options in {"as published": {}, "no vote": {"vote_in_training": False}, "no pull": {"pull": 0.0}}.items():
        method = make(L2P, backbone, top=1, **options)
        method.count_classes(BASE)
        method._grow_head()
        with torch.no_grad():
            method.keys.copy_(method.query_features(BASE.images)[::5])
        losses[name] = method.loss(images, labels, current, 0).item()
    assert len(set(losses.values())) == 3


def test_dualprompt_uses_its_own_prompt_then_falls_back_to_key_lookup(backbone):
    method = make(DualPrompt, backbone, expected_tasks=2, vote_in_training=False)
    query = method.keys.detach()[[1, 0, 1, 0]] + 0.1 * random(4, DIM)
    assert method.choose(query, 0).tolist() == [0] * 4 and method.choose(query, 1).tolist() == [1] * 4
    nearest = (F.normalize(query, dim=1) @ F.normalize(method.keys, dim=1).T).argmax(1)
    assert torch.equal(method.choose(query, 2), nearest) and torch.equal(method.choose(query, None), nearest)
    assert nearest.tolist() == [1, 0, 1, 0]  # neither fixed prompt
    for task in [BASE, *NEW]:
        (method.learn if task.index else method.fit_base)(task)
    assert method.logits(ALL).shape == (len(ALL), 9) and method.expert.shape[0] == 2


def test_dualprompt_trains_only_the_tasks_prompt_and_starts_it_from_the_previous_one(backbone):
    method = make(DualPrompt, backbone)
    method.fit_base(BASE)
    before = copied(method)
    method.open_task(1)
    assert torch.equal(method.expert[1], before["expert"][0]) and torch.equal(method.keys, before["keys"])
    method.learn(NEW[0])
    assert torch.equal(method.expert[0], before["expert"][0]) and torch.equal(method.expert[2], before["expert"][2])
    assert torch.equal(method.keys[[0, 2]], before["keys"][[0, 2]])
    pull = F.cosine_similarity(method.query_features(NEW[0].images), method.keys[1:2]).mean()
    assert pull > F.cosine_similarity(method.query_features(NEW[0].images), before["keys"][1:2]).mean()
    other = make(DualPrompt, backbone, copy_previous=False)
    other.fit_base(BASE)
    other.open_task(1)
    assert torch.equal(other.expert[1], before["expert"][1])


def test_coda_with_one_component_of_weight_one_is_plain_prefix_tuning(backbone):
    method = make(CodaPrompt, backbone, components=1, expected_tasks=1)
    method.open_task(0)
    images = random(1, 3, 16, 16)
    query = backbone(images)
    with torch.no_grad():
        method.attention.fill_(1.0)
        method.keys.copy_(3 * query.expand(2, 1, DIM))  # cos(q ∘ 1, 3 q) = 1
    component = method.components.view(2, 2, 1, 2, DIM)  # block, (key, value), image, rows
    expected = naive_features(backbone, images, {0: component[0], 2: component[1]})
    torch.testing.assert_close(method.embed(images, query), expected)


def test_coda_freezes_earlier_components_and_adds_orthogonal_ones(backbone):
    method, loose = make(CodaPrompt, backbone), make(CodaPrompt, backbone, freeze_earlier=False)
    for model in (method, loose):
        model.fit_base(BASE)
    before = copied(method)
    names = ("components", "keys", "attention")
    assert all(before[name].shape[1] == 2 for name in names)  # 6 components over 3 tasks
    method.open_task(1)
    for name in names:
        rows = getattr(method, name).detach()
        products = rows[:, 2:] @ rows.transpose(1, 2)
        expected = torch.cat([torch.zeros(2, 2), torch.eye(2)], 1).double().expand(2, -1, -1)
        torch.testing.assert_close(products, expected)
    opened = copied(method)
    method.load_state({name: before[name] for name in names})
    method.learn(NEW[0])
    loose.learn(NEW[0])
    for name in names:
        after = getattr(method, name)
        assert torch.equal(after[:, :2], before[name]) and not torch.equal(after[:, 2:], opened[name][:, 2:])
        assert not torch.equal(getattr(loose, name)[:, :2], before[name])


def test_coda_beyond_its_expected_tasks_trains_the_head_alone(backbone):
    method = make(CodaPrompt, backbone, expected_tasks=1)
    method.fit_base(BASE)
    before = copied(method)
    method.learn(NEW[0])
    assert all(torch.equal(method.state()[name], before[name]) for name in ("components", "keys", "attention"))
    assert method.head_rows.shape == (5, DIM)


def test_coda_orthogonality_penalty_enters_the_loss(backbone):
    losses = []
    for weight in (0.0, 2.0):
        method = make(CodaPrompt, backbone, orthogonality=weight)
        method.count_classes(BASE)
        method._grow_head()
        method.open_task(0)
        with torch.no_grad():
            method.keys.mul_(2)  # X Xᵀ − I = 3 I for the two keys of each of two blocks
        losses.append(method.loss(BASE.images.plain().double(), BASE.labels, torch.ones(3, dtype=torch.bool), 0))
    torch.testing.assert_close(losses[1] - losses[0], torch.tensor(2.0 * 2 * (9 * 2 / 4), dtype=torch.float64))


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda", "l2p_plus", "dualp_plus", "codap_plus"])
def test_prompt_methods_train_alike_on_cifar100_and_coda_sees_images_its_own_way(name):
    config = resolve(dataset="cifar100", method=name)
    assert config.options["epochs"] == 20 and config.options.get("vote_at_test", False) is False
    crop, resize = ((0.08, 1.0), 224) if "coda" in name else ((0.05, 1.0), None)
    assert (config.transform.scale, config.transform.resize) == (crop, resize)
    plain = resolve(dataset="imagenet_r", method=name).transform
    assert (plain.scale, plain.resize) == (crop, None)


def test_options_that_cannot_work_are_refused():
    for cls, options in [
        (L2P, dict(top=11)),
        (DualPrompt, dict(expected_tasks=0)),
        (CodaPrompt, dict(expected_tasks=101)),
        (CodaPrompt, dict(length=3)),
        (ASP, dict(tokens=5)),
    ]:
        with pytest.raises(UserError, match=next(iter(options))):
            cls.Options(**options)


# ---- ASP -----------------------------------------------------------------------------------------------------------


def test_asp_has_the_published_number_of_parameters():
    vit_b = SimpleNamespace(depth=12, dim=768)
    for tokens, published in ((6, 1_998_848), (20, 4_826_624)):
        method = ASP(vit_b, ASP.Options(tokens=tokens), Runtime())
        assert method.trainable_parameters() - 1 == published  # the scale belongs to the head
        assert method.invariant.abs().sum() == 0 and method.scale == 1


def prompts_of(method, encoded):
    """Noise-free specific prompts (n, blocks, n/2, d), image by image as the release computes them."""
    rows = []
    for feature in encoded:
        joined = torch.stack([torch.cat([tip[0], feature]) for tip in method.invariant])
        first, second = method.mean_map
        hidden = joined @ first.weight.T + first.bias
        rows.append((hidden @ second.weight.T + second.bias).view(DEPTH, -1, DIM))
    return torch.stack(rows)


def test_asp_average_prompt_is_the_mean_over_images_and_moves_with_each_task(backbone):
    method = make(ASP, backbone)
    method.fit_base(BASE)
    assert method.invariant.abs().sum() > 0
    base = prompts_of(method, method.encoder_features(BASE.images)).mean(0)
    torch.testing.assert_close(method.average, base)
    before, old_features, old_means = copied(method), method.features(ALL), method.means.clone()
    method.learn(NEW[0])
    shots = prompts_of(method, method.encoder_features(NEW[0].images)).mean(0)
    torch.testing.assert_close(method.average, 0.99 * base + 0.01 * shots)
    assert "average" in method.state() and not torch.equal(method.features(ALL), old_features)
    changed = {name for name, tensor in method.state().items() if not torch.equal(tensor, before[name])}
    assert changed == {"average", "means", "class_counts", "tasks_seen"}  # no gradient step in a later task
    assert torch.equal(method.means[:3], old_means)
    torch.testing.assert_close(method.means[3], method.features(NEW[0].images)[:3].mean(0))


def test_asp_feature_is_deep_prompting_with_the_blended_prompt(backbone):
    method = make(ASP, backbone)
    method.fit_base(BASE)
    images = ALL.plain([1, 20]).double()
    encoded = backbone(images)
    specific = 0.8 * method.average + 0.2 * prompts_of(method, encoded)
    prompts = torch.cat([method.invariant.expand(2, -1, -1, -1), specific], 2)
    tokens = backbone.embed(images)
    for number, block in enumerate(backbone.vit.blocks):
        tokens = naive_block(block, torch.cat([tokens, prompts[:, number]], 1))[:, : 1 + PATCHES]
    torch.testing.assert_close(method.embed(images, encoded), backbone.vit.norm(tokens)[:, 0])


def test_asp_anchors_are_the_images_nearest_to_their_class_mean(backbone):
    method = make(ASP, backbone)
    method.count_classes(BASE)
    features = method.features(BASE.images)
    anchors = method.find_anchors(BASE, method.encoder_features(BASE.images))
    for label in range(3):
        own = (BASE.labels == label).nonzero().squeeze(1)
        cosines = F.cosine_similarity(features[own], features[own].mean(0, keepdim=True))
        assert int(anchors[label]) == int(own[cosines.argmax()])


def test_asp_passes_each_class_of_the_batch_once_as_anchor(backbone):
    method = make(ASP, backbone)
    method.count_classes(BASE)
    encoded, anchors = method.encoder_features(BASE.images), torch.tensor([2, 7, 13])
    positions = torch.tensor([12, 0, 1, 13, 2])  # classes 2, 0, 0, 2, 0
    passed = []
    hook = backbone.vit.patch_embed.register_forward_hook(lambda m, i, o: passed.append(len(o)))
    features = method._anchor_features(BASE, encoded, anchors, positions, 0, 0)
    hook.remove()
    assert passed == [2] and not features.requires_grad
    assert torch.equal(features[1], features[2]) and torch.equal(features[0], features[3])
    noise = method._noise("anchor 0", 0, torch.tensor([0, 2]))
    chosen = torch.tensor([2, 13])
    expected = method.embed(BASE.images.plain(chosen).double(), encoded[chosen], noise)
    torch.testing.assert_close(features, expected[[1, 0, 0, 1, 0]])


def test_asp_noise_is_standard_normal_and_does_not_depend_on_the_batch(backbone):
    method = make(ASP, backbone, tokens=20)
    noise = method._noise("image", 3, torch.arange(60))
    assert noise.shape == (60, DEPTH, 10 * DIM)
    _, p = scipy.stats.kstest(noise.flatten().numpy(), "norm")
    assert p > 1e-3  # keyed draws: the same on every run
    pairs = np.corrcoef(noise.flatten(1).numpy()) - np.eye(60)
    assert abs(pairs).max() < 6 / noise[0].numel() ** 0.5  # images do not share draws
    assert torch.equal(method._noise("image", 3, torch.tensor([41, 7])), noise[[41, 7]])
    assert not torch.equal(method._noise("image", 4, torch.arange(60)), noise)


def test_asp_s_loss_is_the_sum_of_its_parts_written_out(backbone):
    method = make(ASP, backbone)
    method.fit_base(BASE)
    images, labels = ALL.plain([1, 7, 13]).double(), [0, 1, 2]
    noise, anchors = random(3, DEPTH, 2 * DIM), random(3, DIM)
    encoded, scale = backbone(images), float(method.scale.detach())
    inputs = torch.cat([method.invariant[:, 0].expand(3, -1, -1), encoded[:, None].expand(-1, DEPTH, -1)], -1)
    mean, std = method.mean_map(inputs), (1 + (method.std_map(inputs) - 5).exp()).log()
    specific = 0.8 * method.average + 0.2 * (mean + std * noise).unflatten(-1, (2, DIM))
    prompts = torch.cat([method.invariant.expand(3, -1, -1, -1), specific], 2)
    total = 0.0
    for feature, label, anchor in zip(run_deep(backbone, backbone.embed(images), prompts), labels, anchors):
        logits = torch.stack([scale * (feature @ row) / (feature.norm() * row.norm()) for row in method.rows])
        total += (logits.logsumexp(0) - logits[label]) / 3
        total += 0.1 * (1 - (feature @ anchor) / (feature.norm() * anchor.norm())) / 3
    for m, s in zip(mean.flatten(0, 1), std.flatten(0, 1)):  # a row of each image and block
        total += 0.001 * 0.5 * sum(a**2 + b**2 - 2 * b.log() - 1 for a, b in zip(m, s)) / (3 * DEPTH)
    torch.testing.assert_close(method.loss(images, torch.tensor(labels), noise, anchors), total)


@pytest.mark.parametrize(
    "off", [{"anchor_weight": 0.0}, {"kl_weight": 0.0}, {"average_weight": 0.0}, {"perturbation": 0.0}], ids=str
)
def test_each_mechanism_of_asp_changes_what_is_learned(off, backbone):
    method, without = make(ASP, backbone), make(ASP, backbone, **off)
    method.fit_base(BASE)
    without.fit_base(BASE)
    assert (method.mean_map[0].weight - without.mean_map[0].weight).abs().max() > 1e-9
    assert not torch.equal(method.features(ALL), without.features(ALL))


@pytest.mark.parametrize(
    ("cls", "options"),
    [(L2P, {"vote_in_training": False}), (DualPrompt, {}), (CodaPrompt, {}), (ASP, {})],
)
def test_micro_batches_give_the_same_model(cls, options, backbone):
    whole = make(cls, backbone, **options)
    split = make(cls, backbone, Runtime(dtype=torch.float64, micro_batch=3), **options)
    for method in (whole, split):
        method.fit_base(BASE)
    for name, tensor in whole.state().items():
        torch.testing.assert_close(split.state()[name], tensor, rtol=1e-6, atol=1e-8, msg=name)
