"""Batched transforms against torchvision's PIL pipeline, and box statistics against RandomResizedCrop.get_params."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms
from torchvision.transforms import functional as TF

from fscil.data.pixels import DRAWS, ImageStore, Pixels, gather, keyed_uniform, random_boxes
from fscil.data.transforms import Transform


def photos(sizes, seed=0):
    """Smooth pictures with noise and hard edges, of the given (height, width)."""
    rng = np.random.default_rng(seed)
    pictures = []
    for height, width in sizes:
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
        picture = np.asarray(coarse).astype(int) + rng.integers(-30, 30, (height, width, 3))
        picture[height // 3 : height // 2] = 255 - picture[height // 3 : height // 2]
        pictures.append(picture.clip(0, 255).astype(np.uint8))
    return pictures


@pytest.mark.parametrize(
    "sizes", [[(32, 32)] * 4, [(300, 420), (64, 40), (256, 256), (500, 333)]], ids=["cifar", "photos"]
)
def test_augmentation_equals_torchvision_for_the_same_boxes(sizes):
    pictures = photos(sizes)
    transform = Transform(size=64, resize=72)
    pixels = Pixels(ImageStore.from_list(pictures), transform, seed=5)
    everything = torch.arange(len(pictures))
    for epoch in range(6):
        boxes, flips = random_boxes(keyed_uniform(5, epoch, everything, DRAWS), torch.tensor(sizes), transform)
        ours = pixels.augmented(everything, epoch)
        for index, picture in enumerate(pictures):
            top, left, height, width = boxes[index].tolist()
            expected = TF.resized_crop(
                Image.fromarray(picture), top, left, height, width, [64, 64], TF.InterpolationMode.BILINEAR
            )
            expected = TF.to_tensor(TF.hflip(expected) if flips[index] else expected)
            assert (ours[index] - expected).abs().max() <= 2 / 255


@pytest.mark.parametrize("sizes", [[(32, 32)] * 2, [(300, 420), (64, 40), (257, 999)]], ids=["cifar", "photos"])
def test_test_transform_equals_torchvision(sizes):
    pictures = photos(sizes, seed=1)
    pixels = Pixels(ImageStore.from_list(pictures), Transform(size=64, resize=72))
    reference = transforms.Compose(
        [transforms.Resize(72, TF.InterpolationMode.BICUBIC), transforms.CenterCrop(64), transforms.ToTensor()]
    )
    for ours, picture in zip(pixels.plain(), pictures, strict=True):
        assert (ours - reference(Image.fromarray(picture))).abs().max() <= 2 / 255


def test_normalisation_is_applied_last():
    pictures = photos([(16, 16)] * 2)
    plain = Pixels(ImageStore.from_list(pictures), Transform(size=16, resize=16)).plain()
    shifted = Pixels(
        ImageStore.from_list(pictures), Transform(size=16, resize=16, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 2.0))
    ).plain()
    expected = TF.normalize(plain, [0.5, 0.4, 0.3], [0.5, 0.25, 2.0])
    torch.testing.assert_close(shifted, expected)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (200, 90), (60, 400)])
def test_box_statistics_equal_get_params(height, width):
    count, transform = 4000, Transform()
    boxes, flips = random_boxes(
        keyed_uniform(1, 0, torch.arange(count), DRAWS), torch.tensor([[height, width]] * count), transform
    )
    torch.manual_seed(0)
    blank = torch.empty(3, height, width)
    theirs = torch.tensor(
        [transforms.RandomResizedCrop.get_params(blank, [0.05, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]
    )
    for axis in range(4):
        assert stats.ks_2samp(boxes[:, axis].numpy(), theirs[:, axis].numpy()).pvalue > 1e-3
    assert abs(flips.float().mean() - 0.5) < 0.03
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= height).all()
    assert (boxes[:, 1] + boxes[:, 3] <= width).all()


def test_augmentation_depends_on_seed_epoch_and_image_alone():
    store = ImageStore.from_list(photos([(40, 30)] * 6))
    pixels = Pixels(store, Transform(size=16, resize=18), seed=7)
    together = pixels.augmented(range(6), epoch=3)
    apart = torch.cat([pixels.select([i]).augmented([0], epoch=3) for i in range(6)])
    torch.testing.assert_close(together, apart)
    assert not torch.equal(together, pixels.augmented(range(6), epoch=4))
    assert not torch.equal(together, Pixels(store, pixels.transform, seed=8).augmented(range(6), epoch=3))
    mixed = pixels.augmented([0, 0], torch.tensor([3, 4]))
    torch.testing.assert_close(mixed, torch.cat([pixels.augmented([0], 3), pixels.augmented([0], 4)]))


def test_keyed_uniform_is_uniform_and_uncorrelated():
    draws = keyed_uniform(2023, 0, torch.arange(20_000), 4).numpy()
    for column in draws.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    neighbours = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert abs(neighbours) < 0.03
    assert abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.03


def test_store_holds_images_of_any_size_unchanged():
    pictures = photos([(3, 5), (8, 2), (1, 1)])
    store = ImageStore.from_list(pictures)
    for index, picture in enumerate(pictures):
        assert np.array_equal(store.image(index).numpy(), picture)
    padded = store.batch(torch.tensor([1, 0]))
    assert store.sizes_of(torch.tensor([1, 0])).tolist() == [[8, 2], [3, 5]]
    assert np.array_equal(padded[1, :3, :5].numpy(), pictures[0])


def test_images_are_gathered_in_one_read_with_their_border_repeated():
    """What a GPU does instead of copying image by image."""
    pictures = photos([(3, 5), (8, 2), (1, 1)])
    store, chosen = ImageStore.from_list(pictures), torch.tensor([1, 0, 2])
    batch = gather(store.flat, store.offsets[chosen], store.sizes[chosen], 8, 5)
    for found, index in zip(batch, chosen.tolist(), strict=True):
        height, width, _ = pictures[index].shape
        expected = np.pad(pictures[index], ((0, 8 - height), (0, 5 - width), (0, 0)), mode="edge")
        assert np.array_equal(found.numpy(), expected)


def test_fingerprint_names_what_a_view_yields():
    store = ImageStore.from_list(photos([(8, 8)] * 4))
    view = Pixels(store, Transform(size=8, resize=8), seed=1)
    same = Pixels(ImageStore.from_list(photos([(8, 8)] * 4)), Transform(size=8, resize=8), seed=1)
    assert view.fingerprint == same.fingerprint
    changed = [
        view.select([0, 1]),
        Pixels(store, Transform(size=4, resize=8), seed=1),
        Pixels(store, view.transform, seed=2),
    ]
    assert len({view.fingerprint, *(c.fingerprint for c in changed)}) == 4
