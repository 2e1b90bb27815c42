"""Decoded images held once as uint8, and the two image pipelines of the field run batched next to the compute.

Cropping and resizing are linear and separable, so a random resized crop (or a resize and centre crop) of one image is two small matrix
products,  out = R_y · image · R_xᵀ,  where row i of R holds the weights of Pillow's antialiased filter for output pixel i. A batch with a
different box per image is then two batched products; a flip reverses the rows of R_x.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

BOX_ATTEMPTS = 10  # as torchvision's RandomResizedCrop.get_params
DRAWS = 2 * BOX_ATTEMPTS + 3  # (area, ratio) per attempt, then top, left, flip


@dataclass(frozen=True)
class Transform:
    """Training: RandomResizedCrop(size, scale, ratio), bilinear, then flip. Test: Resize(resize, bicubic), CenterCrop(size). Both: normalise."""

    size: int = 224
    scale: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    resize: int = 256
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


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

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images `indices` (on the CPU), padded at bottom and right to one size: uint8 (B, H, W, 3), and their sizes (B, 2)."""
        sizes = self.sizes[indices]
        if self._array is not None:
            return self._array[indices.to(self.flat.device)], sizes
        height, width = (int(n) for n in sizes.amax(0))
        place = self.flat.device
        h, w = (n.to(place).view(-1, 1, 1) for n in sizes.unbind(1))
        rows, columns = (
            torch.arange(height, device=place).view(1, -1, 1),
            torch.arange(width, device=place).view(1, 1, -1),
        )
        # Padding re-reads the border pixel; its filter weight is zero.
        pixel = self.offsets[indices].to(place).view(-1, 1, 1) + 3 * (rows.minimum(h - 1) * w + columns.minimum(w - 1))
        return self.flat[pixel.unsqueeze(-1) + torch.arange(3, device=place)], sizes


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

    def plain(self, positions: Tensor | Sequence[int] | None = None) -> Tensor:
        """The test transform: (B, 3, size, size) float32, normalised."""
        images, sizes = self._fetch(positions)
        boxes = torch.cat([torch.zeros_like(sizes), sizes], 1)  # the whole image
        short = sizes.amin(1)
        resized = torch.where(
            sizes == short[:, None], self.transform.resize, self.transform.resize * sizes // short[:, None]
        )
        # torchvision's CenterCrop rounds half to even, as Python's round does.
        offset = torch.round((resized - self.transform.size) / 2).to(torch.int64)
        return self._resample(images, boxes, resized, offset, None, "bicubic")

    def augmented(self, positions: Tensor | Sequence[int], epoch: int | Tensor) -> Tensor:
        """The training transform; the box and flip of an image depend on (seed, epoch, image index) alone. `epoch` may differ per image."""
        images, sizes = self._fetch(positions)
        indices = self.indices[torch.as_tensor(positions, dtype=torch.int64).cpu()]
        boxes, flips = random_boxes(keyed_uniform(self.seed, epoch, indices, DRAWS), sizes, self.transform)
        size = torch.full_like(sizes, self.transform.size)
        return self._resample(images, boxes, size, torch.zeros_like(sizes), flips, "bilinear")

    def _fetch(self, positions: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor]:
        chosen = (
            self.indices if positions is None else self.indices[torch.as_tensor(positions, dtype=torch.int64).cpu()]
        )
        images, sizes = self.store.batch(chosen)
        return images.to(self.device, non_blocking=True), sizes

    def _resample(
        self, images: Tensor, boxes: Tensor, resized: Tensor, offset: Tensor, flips: Tensor | None, kind: str
    ) -> Tensor:
        """Crops `boxes` (top, left, height, width), resizes each to `resized` and keeps the `size` pixels after `offset`."""
        place, size = self.device, self.transform.size
        packed = torch.cat([boxes, resized, offset], 1)  # one transfer to the device
        if flips is not None:
            packed = torch.cat([packed, flips[:, None].long()], 1)
        packed = packed.to(place, non_blocking=True)
        top, left, height, width, new_height, new_width, skip_y, skip_x = packed[:, :8].float().unbind(1)
        rows = resampling_matrix(top, height, images.shape[1], new_height, skip_y, size, kind)
        columns = resampling_matrix(left, width, images.shape[2], new_width, skip_x, size, kind)
        if flips is not None:
            columns = torch.where(packed[:, 8].bool().view(-1, 1, 1), columns.flip(1), columns)
        levels = images.permute(0, 3, 1, 2).float()  # (B, 3, H, W)
        levels = (levels @ columns.transpose(1, 2).unsqueeze(1)).clamp_(
            0, 255
        )  # Pillow resizes rows first, clips, then columns
        levels = (rows.unsqueeze(1) @ levels).clamp_(0, 255)
        return (levels / 255 - self._mean) / self._std


def resampling_matrix(
    start: Tensor, length: Tensor, in_size: int, out_length: Tensor, skip: Tensor, out_size: int, kind: str
) -> Tensor:
    """Weights (B, out_size, in_size) that resize the pixels [start, start + length) to out_length and keep out_size of them after skip.

    Follows Pillow's antialiased resampling: a filter of radius 1 (bilinear) or 2 (bicubic, a = −1/2), stretched by the scale when shrinking.
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
    """Crop boxes (top, left, height, width) distributed as RandomResizedCrop.get_params, and flips, from uniform draws (B, DRAWS)."""
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
    """Uniform draws in [0, 1), float64 (B, draws), a function of (seed, epoch, index, draw) alone: a SplitMix64 counter generator."""
    step = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer: the golden-ratio increment
    key = _mix(_mix(_mix(torch.tensor([seed], dtype=torch.int64)) + epoch * 0x1000193) + indices * step)
    bits = _mix(key[:, None] + torch.arange(1, draws + 1) * step)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (logical shifts written for signed integers)."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
    return z ^ ((z >> 31) & (2**33 - 1))
