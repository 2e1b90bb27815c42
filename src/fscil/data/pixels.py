"""Decoded images held once as uint8, and the two image pipelines of the field run batched next to the compute.

Cropping and resizing are linear and separable, so a random resized crop (or a resize and centre crop) of one image is
two small matrix products,  out = R_y · image · R_xᵀ,  where row i of R holds the weights of Pillow's antialiased filter
for output pixel i. A batch with a different box per image is then two batched products; a flip reverses the rows of
R_x.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from fscil.data.transforms import Transform

BOX_ATTEMPTS = 10  # as torchvision's RandomResizedCrop.get_params
DRAWS = 2 * BOX_ATTEMPTS + 3  # (area, ratio) per attempt, then top, left, flip
BOX_TABLE = 500_000  # views up to this size draw an epoch's boxes in one go


class ImageStore:
    """Images of any sizes as one flat uint8 buffer: image i is `flat[offsets[i] :]` read as (height, width, 3).

    >>> store = ImageStore.from_array(np.zeros((2, 4, 6, 3), np.uint8))
    >>> len(store), tuple(store.image(1).shape)
    (2, (4, 6, 3))
    """

    def __init__(self, flat: Tensor, offsets: Tensor, sizes: Tensor):
        self.flat, self.offsets, self.sizes = flat, offsets.to(torch.int64), sizes.to(torch.int64)
        uniform = len(self.sizes) > 0 and bool((self.sizes == self.sizes[0]).all())
        height, width = (int(n) for n in self.sizes[0]) if uniform else (0, 0)
        packed = uniform and bool((self.offsets == torch.arange(len(self.sizes)) * height * width * 3).all())
        self._array = flat.view(-1, height, width, 3) if packed else None  # (N, H, W, 3) when every image has one size
        # Where indices live: beside the pixels when all have one size (no batch waits for the device), else on the
        # CPU, which pads batches.
        self.index_device = flat.device if packed else torch.device("cpu")
        self._sizes = self.sizes[:1].to(self.index_device) if packed else self.sizes
        self._fingerprint: str | None = None

    @classmethod
    def from_array(cls, images: np.ndarray | Tensor) -> ImageStore:
        images = torch.as_tensor(
            np.ascontiguousarray(images) if isinstance(images, np.ndarray) else images
        ).contiguous()
        count, height, width, _ = images.shape
        offsets = torch.arange(count, dtype=torch.int64) * (height * width * 3)
        return cls(images.reshape(-1), offsets, torch.tensor([[height, width]]).expand(count, 2).contiguous())

    @classmethod
    def from_list(cls, images: Sequence[np.ndarray | Tensor]) -> ImageStore:
        arrays = [torch.as_tensor(np.ascontiguousarray(image)) for image in images]
        sizes = torch.tensor([tuple(a.shape[:2]) for a in arrays], dtype=torch.int64).view(-1, 2)
        lengths = sizes.prod(1) * 3
        flat = torch.cat([a.reshape(-1) for a in arrays]) if arrays else torch.empty(0, dtype=torch.uint8)
        return cls(flat, lengths.cumsum(0) - lengths, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.flat.numel()

    @property
    def fingerprint(self) -> str:
        """Identity of the content: a hash of the sizes and of at most 64 MiB of evenly spaced bytes."""
        if self._fingerprint is None:
            digest = hashlib.sha256(self.sizes.cpu().numpy().tobytes())
            stride = max(1, math.ceil(self.nbytes / 2**26))
            digest.update(self.flat[::stride].cpu().numpy().tobytes())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def image(self, index: int) -> Tensor:
        height, width = (int(n) for n in self.sizes[index])
        start = int(self.offsets[index])
        return self.flat[start : start + height * width * 3].view(height, width, 3)

    def to(self, device: torch.device | str) -> ImageStore:
        """The store with its pixels on `device` (the index stays on the CPU)."""
        if torch.device(device).type == self.flat.device.type:
            return self
        moved = ImageStore(self.flat.to(device), self.offsets, self.sizes)
        moved._fingerprint = self._fingerprint
        return moved

    def sizes_of(self, indices: Tensor) -> Tensor:
        """(height, width) of images, on `index_device`."""
        return self._sizes.expand(len(indices), 2) if self._array is not None else self._sizes[indices]

    def batch(self, indices: Tensor) -> Tensor:
        """Images `indices` (on `index_device`), padded at bottom and right to one size: uint8 (B, H, W, 3)."""
        if self._array is not None:
            return self._array[indices]
        sizes, place = self.sizes[indices], self.flat.device
        height, width = (int(n) for n in sizes.amax(0))
        if place.type == "cpu":  # a hundred times faster than gathering, and without an index of 24 bytes per pixel
            padded = self.flat.new_zeros(len(indices), height, width, 3)
            for row, index in zip(padded, indices.tolist()):
                image = self.image(index)
                row[: image.shape[0], : image.shape[1]] = image
            return padded
        return gather(self.flat, self.offsets[indices].to(place), sizes.to(place), height, width)


def gather(flat: Tensor, offsets: Tensor, sizes: Tensor, height: int, width: int) -> Tensor:
    """Images of `sizes` (B, 2) that begin at `offsets` of a flat uint8 buffer, as (B, height, width, 3) in one read, by
    an index of 8 bytes a pixel. Beyond its border an image repeats its last row and column, whose weights are zero."""
    h, w = (n.view(-1, 1, 1) for n in sizes.unbind(1))
    rows = torch.arange(height, device=flat.device).view(1, -1, 1).minimum(h - 1)
    columns = torch.arange(width, device=flat.device).view(1, 1, -1).minimum(w - 1)
    pixel = (offsets // 3).view(-1, 1, 1) + rows * w + columns  # offsets are multiples of 3: whole pixels
    return flat.view(-1, 3)[pixel]


class Pixels:
    """A view on some images of a store that gives plain (test) or augmented (training) batches on the compute device.

    >>> pixels = Pixels(ImageStore.from_array(np.zeros((4, 32, 32, 3), np.uint8)), Transform(size=16, resize=18))
    >>> tuple(pixels.plain().shape), tuple(pixels.select([3]).augmented([0], epoch=1).shape)
    ((4, 3, 16, 16), (1, 3, 16, 16))
    """

    def __init__(
        self,
        store: ImageStore,
        transform: Transform,
        seed: int = 0,
        indices: Tensor | Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.store, self.transform, self.seed = store, transform, seed
        self.indices = torch.arange(len(store)) if indices is None else torch.as_tensor(indices, dtype=torch.int64)
        self.device = torch.device(device)
        self._where = self.indices.to(store.index_device)
        self._boxes: tuple[int, Tensor] | None = None  # boxes and flips of one epoch, drawn for all images at once
        norm = torch.tensor([transform.mean, transform.std], dtype=torch.float32).view(2, 1, 3, 1, 1)
        self._mean, self._std = norm.to(self.device)

    def __len__(self) -> int:
        return len(self.indices)

    def select(self, positions: Tensor | Sequence[int]) -> Pixels:
        """The images at these positions of this view; nothing is copied."""
        positions = torch.as_tensor(positions, dtype=torch.int64).cpu()
        return Pixels(self.store, self.transform, self.seed, self.indices[positions], self.device)

    @property
    def fingerprint(self) -> str:
        """Identity of what this view yields: pixels, selection, transform and seed."""
        digest = hashlib.sha256(self.store.fingerprint.encode())
        digest.update(self.indices.numpy().tobytes())
        digest.update(repr((sorted(asdict(self.transform).items()), self.seed)).encode())
        return digest.hexdigest()[:16]

    @property
    def key(self) -> str:
        return self.fingerprint

    def raw(self, position: int) -> Tensor:
        return self.store.image(int(self.indices[position])).cpu()

    @property
    def index_device(self) -> torch.device:
        """Where positions should live so that no batch waits for a transfer."""
        return self.store.index_device

    def plain(self, positions: Tensor | Sequence[int] | None = None) -> Tensor:
        """The test transform: (B, 3, size, size) float32, normalised."""
        chosen = self._where if positions is None else self._where[self._positions(positions)]
        sizes = self.store.sizes_of(chosen)
        short, resize = sizes.amin(1, keepdim=True), self.transform.resize
        resized = torch.where(sizes == short, resize, resize * sizes // short)
        # torchvision's CenterCrop rounds half to even, as torch.round does.
        offset = torch.round((resized - self.transform.size) / 2)
        boxes = torch.cat([torch.zeros_like(sizes), sizes], 1)  # the whole image
        return self._resample(chosen, boxes.float(), resized.float(), offset, None, "bicubic")

    def augmented(self, positions: Tensor | Sequence[int], epoch: int | Tensor) -> Tensor:
        """The training transform; box and flip of an image depend on (seed, epoch, image index) alone. `epoch` may
        differ per image."""
        positions = self._positions(positions)
        chosen = self._where[positions]
        if isinstance(epoch, int) and len(self) <= BOX_TABLE:
            if self._boxes is None or self._boxes[0] != epoch:
                self._boxes = epoch, self._draw_boxes(self._where, epoch)
            drawn = self._boxes[1][positions]
        else:
            drawn = self._draw_boxes(chosen, epoch if isinstance(epoch, int) else epoch.to(chosen.device))
        size = torch.full_like(drawn[:, :2], self.transform.size)
        return self._resample(chosen, drawn[:, :4], size, torch.zeros_like(size), drawn[:, 4].bool(), "bilinear")

    def _positions(self, positions: Tensor | Sequence[int]) -> Tensor:
        return torch.as_tensor(positions, dtype=torch.int64).to(self.index_device)

    def _draw_boxes(self, indices: Tensor, epoch: int | Tensor) -> Tensor:
        """(top, left, height, width, flip) of images, float32 (B, 5)."""
        uniform = keyed_uniform(self.seed, epoch, indices, DRAWS)
        boxes, flips = random_boxes(uniform, self.store.sizes_of(indices), self.transform)
        return torch.cat([boxes, flips[:, None]], 1).float()

    def _resample(
        self, chosen: Tensor, boxes: Tensor, resized: Tensor, offset: Tensor, flips: Tensor | None, kind: str
    ) -> Tensor:
        """Crops `boxes` (top, left, height, width), resizes each to `resized` and keeps the `size` pixels after
        `offset`."""
        place, size = self.device, self.transform.size
        images = self.store.batch(chosen).to(place, non_blocking=True)
        boxes, resized, offset = boxes.to(place), resized.to(place), offset.to(place)
        rows = resampling_matrix(boxes[:, 0], boxes[:, 2], images.shape[1], resized[:, 0], offset[:, 0], size, kind)
        columns = resampling_matrix(boxes[:, 1], boxes[:, 3], images.shape[2], resized[:, 1], offset[:, 1], size, kind)
        if flips is not None:
            columns = torch.where(flips.to(place).view(-1, 1, 1), columns.flip(1), columns)
        levels = images.permute(0, 3, 1, 2).float()  # (B, 3, H, W)
        levels = (levels @ columns.transpose(1, 2).unsqueeze(1)).clamp_(
            0, 255
        )  # Pillow resizes rows first, clips, then columns
        levels = (rows.unsqueeze(1) @ levels).clamp_(0, 255)
        normalised: Tensor = (levels / 255 - self._mean) / self._std
        return normalised


def resampling_matrix(
    start: Tensor, length: Tensor, in_size: int, out_length: Tensor, skip: Tensor, out_size: int, kind: str
) -> Tensor:
    """Weights (B, out_size, in_size) that resize the pixels [start, start + length) to out_length and keep out_size
    of them after skip.

    Follows Pillow's antialiased resampling: a filter of radius 1 (bilinear) or 2 (bicubic, a = −1/2), stretched by
    the scale when shrinking.
    """
    radius = 1.0 if kind == "bilinear" else 2.0
    scale = (length / out_length).view(-1, 1, 1)
    stretch = scale.clamp(min=1.0)
    centre = (torch.arange(out_size, device=start.device).view(1, -1, 1) + skip.view(-1, 1, 1) + 0.5) * scale
    pixel = torch.arange(in_size, device=start.device).view(1, 1, -1) - start.view(-1, 1, 1)  # position inside the box
    low = torch.floor(centre - radius * stretch + 0.5).clamp(min=0)
    high = torch.minimum(torch.floor(centre + radius * stretch + 0.5), length.view(-1, 1, 1))
    distance = ((pixel + 0.5 - centre) / stretch).abs()
    if kind == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
        weights = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))
    weights = weights * ((pixel >= low) & (pixel < high))
    return weights / weights.sum(-1, keepdim=True)


def random_boxes(uniform: Tensor, sizes: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """Crop boxes (top, left, height, width) distributed as RandomResizedCrop.get_params, and flips, from uniform
    draws (B, DRAWS)."""
    height, width = sizes.double().unbind(1)
    tries = uniform[:, : 2 * BOX_ATTEMPTS].view(-1, BOX_ATTEMPTS, 2)
    low, high = transform.scale
    area = (height * width)[:, None] * (low + (high - low) * tries[..., 0])
    log_low, log_high = (math.log(r) for r in transform.ratio)
    ratio = torch.exp(log_low + (log_high - log_low) * tries[..., 1])
    widths, heights = torch.round(torch.sqrt(area * ratio)), torch.round(torch.sqrt(area / ratio))
    fits = (widths > 0) & (widths <= width[:, None]) & (heights > 0) & (heights <= height[:, None])
    first = fits.int().argmax(1, keepdim=True)
    box_width, box_height = widths.gather(1, first).squeeze(1), heights.gather(1, first).squeeze(1)
    # No attempt fits: the central crop of the nearest allowed ratio.
    whole = width / height
    fallback_width = torch.where(whole > transform.ratio[1], torch.round(height * transform.ratio[1]), width)
    fallback_height = torch.where(whole < transform.ratio[0], torch.round(width / transform.ratio[0]), height)
    found = fits.any(1)
    box_width, box_height = (
        torch.where(found, box_width, fallback_width),
        torch.where(found, box_height, fallback_height),
    )
    spare_y, spare_x = height - box_height, width - box_width
    top = torch.where(found, torch.floor(uniform[:, -3] * (spare_y + 1)), torch.floor(spare_y / 2))
    left = torch.where(found, torch.floor(uniform[:, -2] * (spare_x + 1)), torch.floor(spare_x / 2))
    return torch.stack([top, left, box_height, box_width], 1).long(), uniform[:, -1] < transform.flip


def keyed_uniform(seed: int, epoch: int | Tensor, indices: Tensor, draws: int) -> Tensor:
    """Uniform draws in [0, 1), float64 (B, draws), a function of (seed, epoch, index, draw) alone: a SplitMix64
    counter generator."""
    step = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: the golden-ratio increment
    start = _mix(torch.full((1,), seed, dtype=torch.int64, device=indices.device))
    key = _mix(_mix(start + epoch * 0x1000193) + indices * step)
    bits = _mix(key[:, None] + torch.arange(1, draws + 1, device=indices.device) * step)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (logical shifts written for signed integers)."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
    return z ^ ((z >> 31) & (2**33 - 1))
