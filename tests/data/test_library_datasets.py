"""Datasets of torchvision and Tiny ImageNet, from small stand-ins with the layout of the real ones."""

import csv
import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets as library

from fscil.config import DataConfig
from fscil.data.datasets import load_dataset
from fscil.data.datasets.common import place_of
from fscil.data.stream import make_stream
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.files import digest_file
from stored_images import stored


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FSCIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(number, size=(12, 16)):
    return np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)


@pytest.fixture
def flowers(tmp_path, monkeypatch):
    """Flowers102 with four classes: 5 training, 2 validation and 3 test images each. PNG content: exact pixels."""
    folder = tmp_path / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    labels = np.repeat(np.arange(1, 5), 10)
    for number in range(1, 41):
        Image.fromarray(picture(number)).save(folder / "jpg" / f"image_{number:05d}.jpg", format="PNG")
    within = (np.arange(40) % 10)[None]
    ids = np.arange(1, 41)[None]
    savemat(folder / "imagelabels.mat", {"labels": labels[None]})
    savemat(
        folder / "setid.mat",
        {"trnid": ids[within < 5], "valid": ids[(within >= 5) & (within < 7)], "tstid": ids[within >= 7]},
    )
    monkeypatch.setattr(library.Flowers102, "_check_integrity", lambda self: True)  # of the real files
    return DataConfig(root=str(tmp_path))


def test_a_dataset_with_split_names(flowers):
    dataset = load_dataset("torchvision:Flowers102", flowers)
    names = library.Flowers102.classes
    assert dataset.manifest.class_names == tuple(names[:4]) and dataset.manifest.split == "train/test"
    assert (dataset.base, dataset.way, dataset.shots) == (3, 1, 5)
    train, test = stored(dataset, "train"), stored(dataset, "test")
    assert len(train) == 20 and len(test) == 12
    label, pixels = train["train/7"]  # the eighth: the third training image of the second class, number 13
    assert label == names[1] and (pixels == picture(13)).all()
    label, pixels = test["test/11"]
    assert label == names[3] and (pixels == picture(40)).all()


def test_its_parts_can_be_joined(flowers):
    dataset = load_dataset("torchvision:Flowers102", replace(flowers, split="train+val/test"))
    assert len(stored(dataset, "train")) == 28 and (stored(dataset, "train")["val/1"][1] == picture(7)).all()
    assert dataset.manifest.split == "train+val/test"
    for wrong, said in (("train", "TRAIN/TEST"), ("train/tests", 'no part "tests"'), ("/", "TRAIN/TEST")):
        with pytest.raises(UserError, match=said):
            load_dataset("torchvision:Flowers102", replace(flowers, split=wrong))
    with pytest.raises(UserError, match="leave split_file out"):
        load_dataset("torchvision:Flowers102", replace(flowers, split_file="split.json"))


def test_a_stream_is_cut_from_it_and_says_its_protocol(flowers):
    dataset = load_dataset("torchvision:Flowers102", flowers)
    config = dataset.complete(replace(flowers, base=2, shots=2))
    stream = make_stream(dataset, config, Transform(size=8, resize=8), 1)
    assert stream.protocol == "2 + 2 x (1-way 2-shot)" and stream.class_names == library.Flowers102.classes[:4]
    assert [len(task.images) for task in stream.tasks] == [10, 2, 2] and len(stream.test) == 12


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """CIFAR-10 with two batches; its pickles are what the real ones are, and a class in one would be refused."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [f"thing {number}" for number in range(10)]

    def write(file, content):
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))
        return file, digest_file(folder / file, "md5")

    def batch(seed, count):
        rng = np.random.RandomState(seed)
        labels = rng.permutation(np.arange(count) % 10).tolist()
        return {"data": rng.randint(0, 256, (count, 3072)).astype(np.uint8), "labels": labels}

    batches = {"data_batch_1": batch(1, 30), "data_batch_2": batch(2, 20), "test_batch": batch(3, 20)}
    lists = [list(write(file, content)) for file, content in batches.items()]
    meta, md5 = write("batches.meta", {"label_names": names})
    monkeypatch.setattr(library.CIFAR10, "train_list", lists[:2])
    monkeypatch.setattr(library.CIFAR10, "test_list", lists[2:])
    monkeypatch.setattr(library.CIFAR10, "meta", {"filename": meta, "key": "label_names", "md5": md5})
    return DataConfig(root=str(tmp_path)), batches, folder


def test_a_dataset_with_a_train_flag_whose_pickles_are_not_run(cifar10, monkeypatch):
    config, batches, folder = cifar10
    monkeypatch.setattr(pickle, "load", None)
    dataset = load_dataset("torchvision:CIFAR10", config)
    assert (dataset.base, dataset.way) == (6, 4)
    train, test = stored(dataset, "train"), stored(dataset, "test")
    assert len(train) == 50 and len(test) == 20
    planes = batches["data_batch_2"]["data"][4].reshape(3, 32, 32).transpose(1, 2, 0)
    assert (train["train/34"][1] == planes).all()
    assert train["train/34"][0] == f"thing {batches['data_batch_2']['labels'][4]}"
    (folder / "test_batch").write_bytes(b"damaged")
    with pytest.raises(UserError, match='test_batch" is damaged: its md5'):
        load_dataset("torchvision:CIFAR10", config)


def test_a_dataset_of_class_folders(tmp_path):
    for part, count in (("train", 3), ("valid", 2), ("test", 2)):
        for number, name in enumerate(("AD", "FR", "JP")):
            folder = tmp_path / "country211" / part / name
            folder.mkdir(parents=True)
            for at in range(count):
                Image.fromarray(picture(10 * number + at)).save(folder / f"{at}.png")
    dataset = load_dataset("torchvision:Country211", DataConfig(root=str(tmp_path)))
    assert dataset.manifest.class_names == ("AD", "FR", "JP")
    train = stored(dataset, "train")
    assert len(train) == 9 and train["train/5"][0] == "FR" and (train["train/5"][1] == picture(12)).all()


def test_a_dataset_whose_labels_are_in_a_table(tmp_path):
    """GTSRB: folders to train on, a CSV to test on; both as (path, label) pairs of torchvision."""
    for name in ("00000", "00001"):
        folder = tmp_path / "gtsrb" / "GTSRB" / "Training" / name
        folder.mkdir(parents=True)
        for at in range(2):
            Image.fromarray(picture(at)).save(folder / f"{at}.ppm")
    images = tmp_path / "gtsrb" / "GTSRB" / "Final_Test" / "Images"
    images.mkdir(parents=True)
    with open(tmp_path / "gtsrb" / "GT-final_test.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["Filename", "ClassId"], delimiter=";")
        table.writeheader()
        for at, label in enumerate((1, 0, 1)):
            Image.fromarray(picture(50 + at)).save(images / f"{at:05d}.ppm")
            table.writerow({"Filename": f"{at:05d}.ppm", "ClassId": label})
    test = stored(load_dataset("torchvision:GTSRB", DataConfig(root=str(tmp_path))), "test")
    assert [test[f"test/{at}"][0] for at in range(3)] == ["1", "0", "1"]
    assert (test["test/2"][1] == picture(52)).all()


def test_what_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    here = DataConfig(root=str(tmp_path))
    for name, said in (
        ("Flower102", 'Did you mean "Flowers102"'),
        ("Caltech256", "has no training and test images of its own; use --dataset folder"),
        ("EMNIST", "--dataset folder"),
        ("PhotoTour", "needs name"),
        ("Food101", "To have it downloaded, leave --data-root out"),
    ):
        with pytest.raises(UserError, match=said) as problem:
            load_dataset(f"torchvision:{name}", here)
        assert "\n" not in str(problem.value)

    def unreachable(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(library.food101, "download_and_extract_archive", unreachable)
    with pytest.raises(UserError, match="Network is unreachable.*fscil fetch torchvision:Food101"):
        load_dataset("torchvision:Food101", DataConfig())
    assert place_of("torchvision:Food101", DataConfig()).name == "torchvision-Food101"


def test_labels_that_are_no_classes_are_refused(tmp_path, monkeypatch):
    class Boxes:
        def __init__(self, root, split="train"):
            self.targets = [[1, 2], [3, 4]]

        def __len__(self):
            return 2

        def __getitem__(self, at):
            return Image.new("RGB", (4, 4)), self.targets[at]

    monkeypatch.setattr(library, "Boxes", Boxes, raising=False)
    with pytest.raises(UserError, match="do not have one class number each"):
        load_dataset("torchvision:Boxes", DataConfig(root=str(tmp_path)))


# ---- Tiny ImageNet ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for number, name in enumerate(("n01443537", "n01629819", "n03444034")):
        (root / "train" / name / "images").mkdir(parents=True)
        (root / "train" / name / f"{name}_boxes.txt").write_text("n_0.JPEG\t0\t0\t1\t1\n")
        for at in range(3):
            Image.fromarray(picture(10 * number + at)).save(
                root / "train" / name / "images" / f"{name}_{at}.JPEG", format="PNG"
            )
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for at, name in enumerate(("n03444034", "n01443537", "n01629819")):
        Image.fromarray(picture(90 + at)).save(root / "val" / "images" / f"val_{at}.JPEG", format="PNG")
        lines.append(f"val_{at}.JPEG\t{name}\t0\t32\t44\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return tmp_path


def test_tiny_imagenet_as_it_is_released(tiny):
    dataset = load_dataset("tiny_imagenet", DataConfig(root=str(tiny)))
    assert dataset.manifest.class_names == ("n01443537", "n01629819", "n03444034")
    assert (dataset.base, dataset.way) == (100, 10)
    train, test = stored(dataset, "train"), stored(dataset, "test")
    assert len(train) == 9 and (train["train/n01629819/images/n01629819_2.JPEG"][1] == picture(12)).all()
    assert test["val/images/val_0.JPEG"][0] == "n03444034" and (test["val/images/val_0.JPEG"][1] == picture(90)).all()


def test_tiny_imagenet_that_is_not_there_or_damaged(tiny, tmp_path):
    with pytest.raises(UserError, match="tiny-imagenet-200 of the released zip"):
        load_dataset("tiny_imagenet", DataConfig(root=str(tmp_path / "nowhere")))
    path = tiny / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    path.write_text(path.read_text() + "\n")
    assert len(stored(load_dataset("tiny_imagenet", DataConfig(root=str(tiny))), "test")) == 3
    path.write_text(path.read_text() + "val_3.JPEG\tn99999999\t0\n")
    with pytest.raises(UserError, match="one of the classes in train/"):
        load_dataset("tiny_imagenet", DataConfig(root=str(tiny)))
    path.write_bytes(b"val_3.JPEG\tn0\xe9\t0\n")
    with pytest.raises(UserError, match="is not a text file"):
        load_dataset("tiny_imagenet", DataConfig(root=str(tiny)))
