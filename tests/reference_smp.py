"""SMP written down a second time: slow, literal, float64, sharing no code with the package.

A transcription of the method (paper Eq. 1-18 and the released resolutions of what the paper leaves open) with dense ΔW
matrices, two separate trainings, loops over classes and samples, hand-written SGD and schedule, and
`torch.distributions.MultivariateNormal`. All randomness comes from the caller, so that another implementation can be
driven with the same batches and draws. Conventions:

* Labels number classes by arrival: base classes 0..C0-1, then each task's. Sessions count from 1 (0 is the base task),
  epochs, layers, views and steps from 0. A slot is (layer, "k") or (layer, "v").
* LoRA factors: one dict per layer with A_k, A_v (r, d) and B_k, B_v (d, r); ΔW = B A is (out, in), y = x (W + ΔW)^T.
  Both sets start from copies of the given factors, both heads from copies of the given weight (C0, d).
* `BaseTask.epochs[e]` is the list of (augmented images, labels) of epoch e, in step order. Rate of epoch e of E:
  lr/2 (1 + cos(π e / E)), constant within the epoch. Weight decay is on the LoRA factors and on the head.
* Fisher: the plain base images in the order given, cut into consecutive batches of `fisher_batch` (the last may be
  short); each batch counts once, whatever its size. "sample" is the same with batches of one. Own head, no margin.
* Density filter: of 2n draws the n with the largest log_prob stay, in ascending draw index.
* `draws(session, epoch, class, group, count)` gives standard normal z (count, d); x = mean + L z. Groups:
  "prototype" (every old class) and "classifier" (base classes). count is already the doubled number before the filter:
  features_per_class for each of a base class's two groups, 2 features_per_class for an earlier few-shot class.
* Feature set of an epoch, before the shuffle: base classes in order, each its prototype group then its Clf^d group;
  earlier few-shot classes in order; then the real features pass by pass: view 0 of all shots in task order, view 1, ...
  `shuffle(session, epoch, count)` gives the permutation p; row i of the shuffled set is row p[i] of the concatenation.
* Calibration steps per epoch = classes seen; step i takes rows [i n, (i + 1) n), n = features_per_class, the last step
  all the rest. Every loss is the mean over its batch. Momentum starts afresh in every training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn import Module

Slot = tuple[int, str]
Deltas = dict[Slot, Tensor]
Lora = list[dict[str, Tensor]]
Batch = tuple[Tensor, Tensor]
Draws = Callable[[int, int, int, str, int], Tensor]
Shuffle = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Hyper:
    """The released hyper-parameters; the number of base epochs is the number of epochs given."""

    scale: float = 16.0
    margin: float = 0.2
    base_lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    fisher: str = "batch"
    fisher_batch: int = 48
    covariance_jitter: float = 1e-3
    calibration_lr: float = 1e-3
    calibration_epochs: int = 5
    features_per_class: int = 256  # also the calibration mini-batch


@dataclass
class BaseTask:
    """Augmented batches per epoch, and the plain training images in the order of the Fisher pass."""

    epochs: list[list[Batch]]
    images: Tensor
    labels: Tensor


@dataclass
class FewShotTask:
    """Plain shots in task order, equally many per class, and `view(epoch, number)`: the same shots augmented."""

    images: Tensor
    labels: Tensor
    view: Callable[[int, int], Tensor]


@dataclass
class Base:
    """Everything the base task leaves behind; fisher[set] and weights[set] hold one number per slot."""

    lora: dict[str, Lora]
    heads: dict[str, Tensor]
    fisher: dict[str, dict[Slot, float]]
    weights: dict[str, dict[Slot, float]]
    deltas: Deltas
    prototypes: Tensor
    covariances: list[Tensor]
    rows: Tensor


@dataclass
class Session:
    """State after one task: classifier rows and raw prototypes of all classes seen, and, for every class,
    the base class whose covariance it uses (base classes: themselves)."""

    rows: Tensor
    prototypes: Tensor
    covariance_of: list[int]


# --- the frozen ViT with dense updates (Eq. 1-3)


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def attention(x: Tensor, attn: Module, delta_k: Tensor, delta_v: Tensor) -> Tensor:
    d = x.shape[-1]
    head_dim = d // attn.num_heads
    weight_q, weight_k, weight_v = attn.qkv.weight[:d], attn.qkv.weight[d : 2 * d], attn.qkv.weight[2 * d :]
    bias_q, bias_k, bias_v = attn.qkv.bias[:d], attn.qkv.bias[d : 2 * d], attn.qkv.bias[2 * d :]
    q = x @ weight_q.T + bias_q
    k = x @ (weight_k + delta_k).T + bias_k
    v = x @ (weight_v + delta_v).T + bias_v
    heads = []
    for h in range(attn.num_heads):
        part = slice(h * head_dim, (h + 1) * head_dim)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(head_dim)
        heads.append(torch.softmax(scores, dim=-1) @ v[..., part])
    return torch.cat(heads, dim=-1) @ attn.proj.weight.T + attn.proj.bias


def features(vit: Module, deltas: Deltas, images: Tensor) -> Tensor:
    """Class token after the final norm, (B, d)."""
    patches = vit.patch_embed.proj
    tokens = torch.nn.functional.conv2d(images, patches.weight, patches.bias, stride=patches.stride)
    tokens = tokens.flatten(2).transpose(1, 2)
    x = torch.cat([vit.cls_token.expand(len(images), -1, -1), tokens], dim=1) + vit.pos_embed
    for layer, block in enumerate(vit.blocks):
        x = x + attention(layer_norm(x, block.norm1), block.attn, deltas[layer, "k"], deltas[layer, "v"])
        hidden = layer_norm(x, block.norm2) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))  # exact GELU
        x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    return layer_norm(x, vit.norm)[:, 0]


def dense(lora: Lora) -> Deltas:
    return {(layer, p): f[f"B_{p}"] @ f[f"A_{p}"] for layer, f in enumerate(lora) for p in "kv"}


# --- loss, optimiser, schedule


def cosines(x: Tensor, rows: Tensor) -> Tensor:
    return (x @ rows.T) / (x.norm(dim=1)[:, None] * rows.norm(dim=1)[None, :])


def cosface(x: Tensor, rows: Tensor, labels: Tensor, scale: float, margin: float) -> Tensor:
    """Eq. 9 (margin 0: Eq. 10), mean over the batch, sample by sample."""
    cos = cosines(x, rows)
    losses = []
    for i, y in enumerate(labels.tolist()):
        true = scale * (cos[i, y] - margin)
        others = torch.cat([scale * cos[i, :y], scale * cos[i, y + 1 :]])
        losses.append(torch.logsumexp(torch.cat([true[None], others]), dim=0) - true)
    return torch.stack(losses).mean()


def cosine_rate(initial: float, epoch: int, epochs: int) -> float:
    return 0.5 * initial * (1 + math.cos(math.pi * epoch / epochs))


class Sgd:
    """b <- momentum b + (g + wd w), starting at b = g + wd w; w <- w - lr b."""

    def __init__(self, parameters: list[Tensor], momentum: float, weight_decay: float):
        self.parameters, self.momentum, self.weight_decay = parameters, momentum, weight_decay
        self.buffers: list[Tensor | None] = [None] * len(parameters)

    def step(self, loss: Tensor, lr: float) -> None:
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for i, (w, g) in enumerate(zip(self.parameters, gradients, strict=True)):
                g = g + self.weight_decay * w
                self.buffers[i] = g if self.buffers[i] is None else self.momentum * self.buffers[i] + g
                w -= lr * self.buffers[i]


# --- base task: train, Fisher, merge (Eq. 6-14)


def train_set(
    vit: Module, epochs: list[list[Batch]], lora: Lora, head: Tensor, margin: float, hyper: Hyper
) -> tuple[Lora, Tensor]:
    """One adapter set with its head, trained alone."""
    lora = [{name: factor.clone().requires_grad_() for name, factor in layer.items()} for layer in lora]
    head = head.clone().requires_grad_()
    sgd = Sgd([f for layer in lora for f in layer.values()] + [head], hyper.momentum, hyper.weight_decay)
    for epoch, batches in enumerate(epochs):
        for images, labels in batches:
            loss = cosface(features(vit, dense(lora), images), head, labels, hyper.scale, margin)
            sgd.step(loss, cosine_rate(hyper.base_lr, epoch, len(epochs)))
    return [{name: factor.detach() for name, factor in layer.items()} for layer in lora], head.detach()


def fisher_norms(
    vit: Module, deltas: Deltas, head: Tensor, images: Tensor, labels: Tensor, hyper: Hyper
) -> dict[Slot, float]:
    """Frobenius norm of the mean squared gradient of L^g with respect to each dense ΔW (Eq. 11)."""
    size = {"batch": hyper.fisher_batch, "sample": 1}[hyper.fisher]
    leaves = {slot: delta.clone().requires_grad_() for slot, delta in deltas.items()}
    sums = {slot: torch.zeros_like(delta) for slot, delta in deltas.items()}
    starts = range(0, len(images), size)
    for start in starts:
        batch = slice(start, start + size)
        loss = cosface(features(vit, leaves, images[batch]), head, labels[batch], hyper.scale, margin=0.0)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for slot, gradient in zip(leaves, gradients, strict=True):
            sums[slot] += gradient**2
    return {slot: math.sqrt(((total / len(starts)) ** 2).sum().item()) for slot, total in sums.items()}


def merge(g: Deltas, d: Deltas, norms_g: dict[Slot, float], norms_d: dict[Slot, float]) -> tuple[Deltas, dict, dict]:
    """(merged ΔW, weights of g, weights of d), Eq. 12-13."""
    weights_g = {slot: norms_g[slot] / (norms_g[slot] + norms_d[slot]) for slot in g}
    weights_d = {slot: 1 - weights_g[slot] for slot in g}
    return {slot: weights_d[slot] * d[slot] + weights_g[slot] * g[slot] for slot in g}, weights_g, weights_d


def prototype(x: Tensor) -> Tensor:
    return sum(x) / len(x)  # Eq. 5


def covariance(x: Tensor, jitter: float) -> Tensor:
    """Unbiased covariance of the rows of x, plus jitter I."""
    mean = prototype(x)
    scatter = sum(torch.outer(f - mean, f - mean) for f in x)
    return scatter / (len(x) - 1) + jitter * torch.eye(x.shape[1], dtype=x.dtype)


def unit(rows: Tensor) -> Tensor:
    return torch.stack([row / row.norm() for row in rows])


def reference_base(vit: Module, task: BaseTask, lora: Lora, head: Tensor, hyper: Hyper) -> Base:
    vit.requires_grad_(False)
    loras, heads, fisher = {}, {}, {}
    for name, margin in (("g", 0.0), ("d", hyper.margin)):
        loras[name], heads[name] = train_set(vit, task.epochs, lora, head, margin, hyper)
        fisher[name] = fisher_norms(vit, dense(loras[name]), heads[name], task.images, task.labels, hyper)
    merged, weights_g, weights_d = merge(dense(loras["g"]), dense(loras["d"]), fisher["g"], fisher["d"])
    x = features(vit, merged, task.images)
    prototypes = torch.stack([prototype(x[task.labels == c]) for c in range(len(head))])
    covariances = [covariance(x[task.labels == c], hyper.covariance_jitter) for c in range(len(head))]
    weights = {"g": weights_g, "d": weights_d}
    return Base(loras, heads, fisher, weights, merged, prototypes, covariances, unit(prototypes))


# --- few-shot tasks: margin penalty-based classifier calibration (Eq. 15-18)


def sample_gaussian(mean: Tensor, covariance: Tensor, z: Tensor) -> Tensor:
    """The denser half of the draws mean + L z, in draw order."""
    gaussian = MultivariateNormal(mean, covariance_matrix=covariance)
    x = torch.stack([mean + gaussian.scale_tril @ one for one in z])
    keep = gaussian.log_prob(x).topk(len(z) // 2).indices.sort().values
    return x[keep]


def nearest_base(prototype: Tensor, base_prototypes: Tensor) -> int:
    """Base class of largest cosine, the lowest number among equals (Eq. 16)."""
    similarity = [(prototype @ p / (prototype.norm() * p.norm())).item() for p in base_prototypes]
    return similarity.index(max(similarity))


def feature_set(
    vit: Module, base: Base, before: Session, task: FewShotTask, session: int, epoch: int, draws: Draws, hyper: Hyper
) -> Batch:
    """Features and labels of one calibration epoch, not yet shuffled."""
    n, base_classes = hyper.features_per_class, len(base.prototypes)
    x, y = [], []

    def add_gaussian(c: int, mean: Tensor, group: str, count: int) -> None:
        sigma = base.covariances[before.covariance_of[c]]
        x.append(sample_gaussian(mean, sigma, draws(session, epoch, c, group, count)))
        y.append(torch.full((len(x[-1]),), c))

    for c in range(base_classes):
        add_gaussian(c, before.prototypes[c], "prototype", n)
        add_gaussian(c, base.heads["d"][c], "classifier", n)
    for c in range(base_classes, len(before.prototypes)):
        add_gaussian(c, before.prototypes[c], "prototype", 2 * n)
    shots = len(task.labels) // len(task.labels.unique())
    for view in range(math.ceil(n / shots)):
        x.append(features(vit, base.deltas, task.view(epoch, view)))
        y.append(task.labels)
    return torch.cat(x), torch.cat(y)


def calibration_batches(x: Tensor, y: Tensor, classes: int, size: int) -> list[Batch]:
    """As many batches as classes seen; the last takes the remainder."""
    ends = [size * (step + 1) for step in range(classes - 1)] + [len(x)]
    return [(x[size * step : end], y[size * step : end]) for step, end in enumerate(ends)]


def reference_session(
    vit: Module,
    base: Base,
    before: Session,
    task: FewShotTask,
    session: int,
    draws: Draws,
    shuffle: Shuffle,
    hyper: Hyper,
) -> Session:
    plain = features(vit, base.deltas, task.images)
    new = range(len(before.rows), len(before.rows) + len(task.labels.unique()))
    new_prototypes = torch.stack([prototype(plain[task.labels == c]) for c in new])
    rows = torch.cat([before.rows, unit(new_prototypes)]).requires_grad_()  # Eq. 17
    sgd = Sgd([rows], hyper.momentum, hyper.weight_decay)
    for epoch in range(hyper.calibration_epochs):
        x, y = feature_set(vit, base, before, task, session, epoch, draws, hyper)
        order = shuffle(session, epoch, len(x))
        lr = cosine_rate(hyper.calibration_lr, epoch, hyper.calibration_epochs)
        for batch_x, batch_y in calibration_batches(x[order], y[order], len(rows), hyper.features_per_class):
            sgd.step(cosface(batch_x, rows, batch_y, hyper.scale, hyper.margin), lr)  # Eq. 18
    borrowed = [nearest_base(p, base.prototypes) for p in new_prototypes]
    return Session(rows.detach(), torch.cat([before.prototypes, new_prototypes]), before.covariance_of + borrowed)


def reference_smp(
    vit: Module,
    base_task: BaseTask,
    lora: Lora,
    head: Tensor,
    tasks: list[FewShotTask],
    draws: Draws,
    shuffle: Shuffle,
    hyper: Hyper,
) -> tuple[Base, list[Session]]:
    """The whole stream: the base task's result, and the states after the base task (index 0) and after each task."""
    base = reference_base(vit, base_task, lora, head, hyper)
    sessions = [Session(base.rows, base.prototypes, list(range(len(head))))]
    for number, task in enumerate(tasks, start=1):
        sessions.append(reference_session(vit, base, sessions[-1], task, number, draws, shuffle, hyper))
    return base, sessions


# --- closed-form calibration


def reference_closed_form(
    base_features: list[Tensor],
    new_features: list[Tensor],
    queries: Tensor,
    shrinkage: float = 0.3,
    correction: float = 1.0,
    normalise: bool = False,
    new_views: list[Tensor] | None = None,
) -> Tensor:
    """Scores (queries, classes), base classes first; each list holds one (n_c, d) tensor of plain features per class.

    `new_views[i]` are features of augmented views of new class i: its mean is then half the plain mean and half theirs.
    `normalise` puts every feature on the unit sphere first. n counts the plain images.
    """
    views = new_views or new_features
    if normalise:
        base_features, new_features, views = (
            [unit(x) for x in group] for group in (base_features, new_features, views)
        )
        queries = unit(queries)
    d = queries.shape[1]
    scatter = sum(torch.outer(f - prototype(x), f - prototype(x)) for x in base_features for f in x)
    within = scatter / (sum(len(x) for x in base_features) - len(base_features))
    shrunk = (1 - shrinkage) * within + shrinkage * torch.trace(within) / d * torch.eye(d, dtype=within.dtype)
    inverse = torch.linalg.inv(shrunk)
    means = [prototype(x) for x in base_features]
    means += [(prototype(x) + prototype(v)) / 2 for x, v in zip(new_features, views, strict=True)]
    counts = [len(x) for x in base_features + new_features]
    scores = torch.empty(len(queries), len(means), dtype=queries.dtype)
    for i, x in enumerate(queries):
        for c, (mean, n) in enumerate(zip(means, counts, strict=True)):
            inflation = torch.trace(inverse @ within) / n
            scores[i, c] = x @ inverse @ mean - 0.5 * mean @ inverse @ mean + correction * 0.5 * inflation
    return scores
