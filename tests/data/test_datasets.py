"""Each dataset from a small stand-in with the layout of the real one; the CIFAR pickle is read and never run."""

import functools
import hashlib
import pickle
import struct
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fscil import registry
from fscil.config import DataConfig
from fscil.data import cache_dir, glyphs
from fscil.data.datasets import cifar100, common, load_dataset
from fscil.data.datasets.imagenet_r import read_coda_lists
from fscil.data.downloads import Archive
from fscil.data.manifests import Manifest
from fscil.data.picture_files import labelled_files
from fscil.data.plain_pickle import read_plain_pickle
from fscil.data.stream import make_stream
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.serving.bulk import pictures_at

CIFAR_NAMES = [f"thing_{i}" for i in range(100)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FSCIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() != tmp_path
    monkeypatch.setenv("FSCIL_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("FSCIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fscil"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "fscil"


def images_of(dataset, split):
    positions = [at for at, entry in enumerate(dataset.manifest.entries) if entry.split == split]
    store, kept = dataset.store(positions)
    assert kept == positions
    return [store.image(i).numpy() for i in range(len(store))], [dataset.manifest.entries[at].label for at in positions]


# ---- CIFAR-100 -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar():
    """{split: (planes uint8 (n, 3072), fine labels)} in a shuffled order, as the real files are."""
    rng = np.random.RandomState(0)
    return {
        split: (rng.randint(0, 256, (100 * n, 3072), np.uint8), rng.permutation(np.repeat(np.arange(100), n)).tolist())
        for split, n in (("train", 6), ("test", 2))
    }


def write_binary(folder, cifar):
    folder.mkdir(parents=True)
    for split, (planes, labels) in cifar.items():
        records = [bytes([0, label]) + plane.tobytes() for plane, label in zip(planes, labels)]
        (folder / f"{split}.bin").write_bytes(b"".join(records))
    (folder / "fine_label_names.txt").write_text("\n".join(CIFAR_NAMES) + "\n")
    return folder


def batch_dict(planes, labels, kind):
    return {
        kind("filenames"): [kind(f"f_{i}.png") for i in range(len(labels))],
        kind("batch_label"): kind("training batch 1 of 1"),
        kind("fine_labels"): labels,
        kind("coarse_labels"): [0] * len(labels),
        kind("data"): planes,
    }


def write_python3(folder, cifar, protocol=2):
    folder.mkdir(parents=True)
    for split, (planes, labels) in cifar.items():
        (folder / split).write_bytes(pickle.dumps(batch_dict(planes, labels, str.encode), protocol))
    meta = {b"fine_label_names": CIFAR_NAMES, b"coarse_label_names": ["x"]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol))
    return folder


def python2_pickle(value, memo=None):
    """What Python 2's cPickle writes (protocol 2) for dicts, lists, str, int and uint8 arrays of an old numpy."""
    memo = memo if memo is not None else [0]

    def put():
        memo[0] += 1
        return b"q" + bytes([memo[0]]) if memo[0] < 256 else b"r" + struct.pack("<I", memo[0])

    def text(data):
        short = len(data) < 256
        return (b"U" + bytes([len(data)]) if short else b"T" + struct.pack("<i", len(data))) + data + put()

    if isinstance(value, bytes):
        return text(value)
    if isinstance(value, int):
        small = b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
        return small if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"]" + put() + b"(" + b"".join(python2_pickle(item, memo) for item in value) + b"e"
    if isinstance(value, dict):
        items = b"".join(python2_pickle(key, memo) + python2_pickle(item, memo) for key, item in value.items())
        return b"}" + put() + b"(" + items + b"u"
    shape = b"".join(python2_pickle(size, memo) for size in value.shape) + b"\x86" + put()
    dtype = b"cnumpy\ndtype\n" + put() + text(b"u1") + b"K\x00K\x01\x87" + put() + b"R" + put()
    dtype += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t" + put() + b"b"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put() + b"K\x00\x85" + put()
    empty += text(b"b") + b"\x87" + put() + b"R" + put()
    return empty + b"(K\x01" + shape + dtype + b"\x89" + text(value.tobytes()) + b"t" + put() + b"b"


def write_python2(folder, cifar):
    folder.mkdir(parents=True)
    for split, (planes, labels) in cifar.items():
        (folder / split).write_bytes(b"\x80\x02" + python2_pickle(batch_dict(planes, labels, str.encode)) + b".")
    names = {b"fine_label_names": [name.encode() for name in CIFAR_NAMES]}
    (folder / "meta").write_bytes(b"\x80\x02" + python2_pickle(names) + b".")
    return folder


def test_the_stand_in_is_a_true_pickle(cifar):
    planes, labels = cifar["test"]
    written = b"\x80\x02" + python2_pickle(batch_dict(planes, labels, str.encode)) + b"."
    read = pickle.loads(written, encoding="bytes")
    assert np.array_equal(read[b"data"], planes) and read[b"fine_labels"] == labels and b"cnumpy.core.multi" in written


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("cifar-100-binary", write_binary),
        ("cifar-100-python", write_python2),
        ("cifar-100-python", write_python3),
        ("", write_binary),
    ],
)
def test_cifar100(cifar, tmp_path, name, write):
    write(tmp_path / "data" / name, cifar)
    dataset = load_dataset("cifar100", DataConfig(root=str(tmp_path / "data")))
    assert dataset.manifest.class_names == tuple(CIFAR_NAMES) and dataset.manifest.split == "official"
    assert (dataset.base, dataset.way, dataset.shots) == (60, 5, 5)
    for split, (planes, labels) in cifar.items():
        images, read_labels = images_of(dataset, split)
        assert read_labels == labels
        for image, plane in zip(images[::37], planes[::37]):
            assert image.shape == (32, 32, 3)
            assert image[5, 9].tolist() == [plane[1024 * channel + 32 * 5 + 9] for channel in range(3)]
    stream = make_stream(dataset, DataConfig(), Transform(size=8, resize=8), seed=2023)
    assert [len(task.labels) for task in stream.tasks] == [360] + [25] * 8


def test_cifar_versions_have_one_split_hash(cifar, tmp_path):
    roots = [write(tmp_path / write.__name__, cifar) for write in (write_binary, write_python2, write_python3)]
    assert len({load_dataset("cifar100", DataConfig(root=str(root))).manifest.hash for root in roots}) == 1


class Attack:
    ran = False

    def __reduce__(self):
        return (setattr, (Attack, "ran", True))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_hostile_pickles_are_refused_and_not_run(tmp_path, protocol):
    path = tmp_path / "train"
    path.write_bytes(pickle.dumps({b"data": Attack()}, protocol))
    Attack.ran = False
    with pytest.raises(UserError, match="refused as a CIFAR python file"):
        read_plain_pickle(path)
    assert not Attack.ran
    pickle.loads(path.read_bytes())
    assert Attack.ran  # the file was a working attack


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b"plain text",
        b"\x80\x02K\x01.",  # no dict
        b"\x80\x02]q\x00.",
        b"\x80\x02}q\x00(U\x01a.",  # a mark left open
        b"\x80\x02}s.",  # pops what is not there
        b"\x80\x02h\x07.",  # a memo that was never made
        b"\x80\x02cos\nsystem\nU\x02ls\x85R.",
        b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.",  # a dtype that holds objects
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\n\x85R.",
        b"\x80\x02}cnumpy\ndtype\nb.",
        pickle.dumps({b"data": np.zeros(3, np.float32)}, 2),
        pickle.dumps({b"data": np.zeros((2, 2), np.uint8, order="F")}, 2),
        pickle.dumps({b"data": np.array([Attack()], object)}, 2),
    ],
)
def test_malformed_pickles_are_one_error(tmp_path, content):
    path = tmp_path / "train"
    path.write_bytes(content)
    with pytest.raises(UserError, match="refused as a CIFAR python file"):
        read_plain_pickle(path)


def test_damaged_cifar_binary(cifar, tmp_path):
    folder = write_binary(tmp_path / "cifar-100-binary", cifar)
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-1])
    with pytest.raises(UserError, match="train.bin.*multiple of 3074"):
        load_dataset("cifar100", DataConfig(root=str(tmp_path)))


def cifar_archive(tmp_path, cifar):
    write_binary(tmp_path / "made" / "cifar-100-binary", cifar)
    path = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-100-binary", "cifar-100-binary")
    return Archive(path.as_uri(), path.name, hashlib.md5(path.read_bytes()).hexdigest())


def test_download_into_the_cache(cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "ARCHIVES", (cifar_archive(tmp_path, cifar),))
    dataset = load_dataset("cifar100", DataConfig())
    assert len(dataset.manifest.entries) == 800
    assert [path.name for path in (cache_dir() / "datasets" / "cifar100").iterdir()] == ["cifar-100-binary"]
    (tmp_path / "cifar-100-binary.tar.gz").unlink()
    assert load_dataset("cifar100", DataConfig()).manifest == dataset.manifest  # no second download


def test_archive_in_the_data_root_is_unpacked_there(cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "ARCHIVES", (cifar_archive(tmp_path, cifar),))
    assert len(load_dataset("cifar100", DataConfig(root=str(tmp_path), download=False)).manifest.entries) == 800


def test_offline_the_error_says_what_to_put_where(tmp_path, monkeypatch):
    gone = Archive((tmp_path / "gone.tar").as_uri(), "gone.tar", "0" * 32)
    monkeypatch.setattr(cifar100, "ARCHIVES", (gone,))
    with pytest.raises(UserError, match=r"cannot download.*without a network, put into .*cifar-100-binary"):
        load_dataset("cifar100", DataConfig())
    with pytest.raises(UserError, match=r"not there: put into .*cifar-100-binary.*leave --data-root out"):
        load_dataset("cifar100", DataConfig(root=str(tmp_path)))
    with pytest.raises(UserError, match=r"mini_imagenet is not there: put into .*train.csv"):
        load_dataset("mini_imagenet", DataConfig())


# ---- image folders ---------------------------------------------------------------------------------------------------


def picture(path, shade, size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


def shades(dataset, split):
    images, labels = images_of(dataset, split)
    return [int(image[0, 0, 0]) for image in images], labels


@pytest.fixture
def cub(tmp_path):
    """Three species of ten pictures; the shade is the species, every third picture tests officially."""
    root = tmp_path / "birds" / "CUB_200_2011"
    names = ["001.Albatross", "002.Bunting", "003.Crow"]
    lines = {"images": [], "image_class_labels": [], "train_test_split": []}
    number = 0
    for label, name in enumerate(names):
        for i in range(10):
            number += 1
            picture(root / "images" / name / f"{name[4:]}_{9 - i:04d}_7.jpg", 10 * label)
            lines["images"].append(f"{number} {name}/{name[4:]}_{9 - i:04d}_7.jpg")
            lines["image_class_labels"].append(f"{number} {label + 1}")
            lines["train_test_split"].append(f"{number} {int(i % 3 != 0)}")
    lines["classes"] = [f"{label + 1} {name}" for label, name in enumerate(names)]
    for name, text in lines.items():
        (root / f"{name}.txt").write_text("\n".join(text) + "\n")
    return root


def test_cub200_official(cub):
    dataset = load_dataset("cub200", DataConfig(root=str(cub.parent), split="official"))
    assert dataset.manifest.class_names == ("001.Albatross", "002.Bunting", "003.Crow")
    tests = {e.image for e in dataset.manifest.entries if e.split == "test" and e.label == 1}
    assert tests == {f"002.Bunting/Bunting_{9 - i:04d}_7.jpg" for i in (0, 3, 6, 9)}
    colours, labels = shades(dataset, "train")
    assert colours == [10 * label for label in labels] and len(colours) == 18
    assert (dataset.base, dataset.way, dataset.shots) == (100, 10, 5)


def test_cub200_default_is_80_20(cub):
    dataset = load_dataset("cub200", DataConfig(root=str(cub)))
    assert dataset.manifest.split == "80-20"
    assert [sum(e.split == "test" and e.label == c for e in dataset.manifest.entries) for c in range(3)] == [2, 2, 2]


def test_cub200_with_the_lists_of_cec(cub, tmp_path):
    by_class = [sorted(path.name for path in folder.iterdir()) for folder in sorted((cub / "images").iterdir())]
    official = DataConfig(
        root=str(cub), split="official", base=2, way=1, sampler="index_files", index_files=str(tmp_path)
    )
    train = {e.image for e in load_dataset("cub200", official).manifest.entries if e.split == "train"}
    names = ["001.Albatross", "002.Bunting", "003.Crow"]
    listed = [
        [f"CUB_200_2011/images/{name}/{file}" for file in files if f"{name}/{file}" in train]
        for name, files in zip(names, by_class)
    ]
    (tmp_path / "session_1.txt").write_text("\n".join(listed[0] + listed[1]))
    (tmp_path / "session_2.txt").write_text("\n".join(listed[2][:2]))
    stream = make_stream(load_dataset("cub200", official), official, Transform(size=4, resize=4), seed=0)
    assert stream.shots == {1: {"003.Crow": [line.removeprefix("CUB_200_2011/images/") for line in listed[2][:2]]}}
    other = replace(official, split="80-20")
    with pytest.raises(UserError, match="no training image of this split.*official"):
        make_stream(load_dataset("cub200", other), other, Transform(), seed=0)


def test_cub200_files_that_do_not_fit(cub):
    path = cub / "image_class_labels.txt"
    whole = path.read_text()
    path.write_text("\n".join(whole.splitlines()[:-1]))
    with pytest.raises(UserError, match="do not fit together"):
        load_dataset("cub200", DataConfig(root=str(cub)))
    path.write_text("1\n")
    with pytest.raises(UserError, match="image_class_labels.txt.*damaged"):
        load_dataset("cub200", DataConfig(root=str(cub)))
    with pytest.raises(UserError, match='no split "oficial".*Did you mean "official"'):
        load_dataset("cub200", DataConfig(root=str(cub), split="oficial"))


@pytest.fixture
def renditions(tmp_path):
    """200 WordNet folders of five pictures, as ImageNet-R but small; file names repeat across classes."""
    root = tmp_path / "imagenet-r"
    for label in range(200):
        for i in range(5):
            path = root / f"n{10_000_000 + 7 * label}" / f"art_{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(TINY)
    (root / "README.txt").write_text("about")
    return root


TINY = b"not decoded by these tests"


def test_imagenet_r_80_20(renditions):
    dataset = load_dataset("imagenet_r", DataConfig(root=str(renditions.parent)))
    assert len(dataset.manifest.class_names) == 200 and dataset.manifest.class_names[1] == "n10000007"
    assert sum(e.split == "test" for e in dataset.manifest.entries) == 200
    assert (dataset.base, dataset.way, dataset.shots) == (100, 10, 5)


@pytest.mark.parametrize("given", ["", "imagenet-r_train.yaml", "imagenet-r_test.yaml"])
def test_imagenet_r_by_coda_lists(renditions, tmp_path, given):
    lists = tmp_path / "lists"
    lists.mkdir()
    files = sorted(path.relative_to(renditions).as_posix() for path in renditions.rglob("*.jpg"))
    tests = [file for file in files if file.endswith("art_3.jpg")]
    trains = [file for file in files if not file.endswith(("art_3.jpg", "art_4.jpg"))]
    for split, chosen in (("train", trains[::-1]), ("test", tests)):
        data = "".join(f"- data/imagenet-r/{file}\n" for file in chosen)
        (lists / f"imagenet-r_{split}.yaml").write_text(f"data:\n{data}targets:\n" + "- 0\n" * len(chosen))
    config = DataConfig(root=str(renditions), split_file=str(lists / given))
    dataset = load_dataset("imagenet_r", config)
    assert dataset.manifest.split == "list"
    assert [
        e.image for e in dataset.manifest.entries if e.split == "train"
    ] == trains  # sorted, whatever the list's order
    assert [e.image for e in dataset.manifest.entries if e.split == "test"] == tests
    (renditions / tests[0]).unlink()
    with pytest.raises(UserError, match=f"1 of the 800 images.*{tests[0]}"):
        load_dataset("imagenet_r", config)


def test_coda_lists_that_are_none(tmp_path):
    for name in ("a_train.yaml", "a_test.yaml"):
        (tmp_path / name).write_text("data: 3\n")
    with pytest.raises(UserError, match="is not a CODA list"):
        read_coda_lists(tmp_path / "a_train.yaml")
    with pytest.raises(UserError, match="cannot read"):
        read_coda_lists(tmp_path / "b_train.yaml")
    with pytest.raises(UserError, match='"train" or "test" in its name'):
        read_coda_lists(tmp_path / "list.yaml")


def test_imagenet_r_must_be_whole(renditions):
    for file in (renditions / "n10000007").iterdir():
        file.unlink()
    (renditions / "n10000007").rmdir()
    with pytest.raises(UserError, match="199 WordNet folders, not the 200"):
        load_dataset("imagenet_r", DataConfig(root=str(renditions)))


@pytest.mark.parametrize("layout", ["images/{name}", "{split}/{label}/{name}"])
def test_mini_imagenet(tmp_path, layout):
    """Classes are numbered by first appearance in train.csv, not by name."""
    root = tmp_path / "miniimagenet"
    (root / "split").mkdir(parents=True)
    for split, per_class in (("train", 4), ("test", 2)):
        rows = ["filename,label"]
        for shade, label in enumerate(["n09", "n01", "n05"]):
            for i in range(per_class):
                name = f"{label}{split}{i}.jpg"
                picture(root / layout.format(name=name, label=label, split=split), 20 * shade)
                rows.append(f"{name},{label}" + (",a further column" if split == "test" else ""))
        (root / "split" / f"{split}.csv").write_text("\n".join(rows) + "\n")
    dataset = load_dataset("mini_imagenet", DataConfig(root=str(tmp_path)))
    assert dataset.manifest.class_names == ("n09", "n01", "n05") and dataset.manifest.split == "cec"
    for split, count in (("train", 12), ("test", 6)):
        colours, labels = shades(dataset, split)
        assert colours == [20 * label for label in labels] and len(labels) == count


@pytest.fixture
def pets(tmp_path):
    root = tmp_path / "pets"
    for shade, name in enumerate(["cat", "dog", "Owl", "été"]):
        for i in range(5):
            picture(root / name / ("deep" if i == 4 else ".") / f"{i}.{'png' if i % 2 else 'JPG'}", 30 * shade)
    (root / "cat" / "notes.txt").write_text("not a picture")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    (root / ".git").mkdir()
    return root


def test_folder(pets):
    dataset = load_dataset("folder", DataConfig(root=str(pets), test_fraction=0.4))
    assert dataset.manifest.class_names == ("Owl", "cat", "dog", "été")
    assert [sum(e.split == "test" and e.label == c for e in dataset.manifest.entries) for c in range(4)] == [2] * 4
    shade = {0: 60, 1: 0, 2: 30, 3: 90}
    for split in ("train", "test"):
        colours, labels = shades(dataset, split)
        assert all(abs(colour - shade[label]) <= 2 for colour, label in zip(colours, labels))
    assert (dataset.base, dataset.way) == (3, 1)
    config = DataConfig(base=2, way=2, shots=3)
    stream = make_stream(dataset, config, Transform(size=4, resize=4), seed=1)
    assert [len(task.labels) for task in stream.tasks] == [6, 6]
    with pytest.raises(UserError, match='shots is 5, but class "dog" of task 1 has only 3'):
        make_stream(dataset, replace(config, shots=5), Transform(), seed=1)


def test_folder_with_train_and_test(pets, tmp_path):
    pets.rename(tmp_path / "train")
    for shade, name in enumerate(["cat", "dog", "Owl", "été"]):
        picture(tmp_path / "test" / name / "only.png", 30 * shade)
    dataset = load_dataset("folder", DataConfig(root=str(tmp_path)))
    assert dataset.manifest.split == "pack"
    assert [e.image for e in dataset.manifest.entries if e.split == "test"][0] == "test/Owl/only.png"
    assert len(shades(dataset, "train")[0]) == 20


@pytest.mark.parametrize(
    "header",
    ["path,label,split\n", "image , label, split\n", "filepath,label,split\n", "", "\n,,\r\npath,class,Usage\r\n"],
)
def test_csv_with_a_split(pets, header):
    rows = [
        (f"{name}/{i}.{'png' if i % 2 else 'JPG'}", name, "test" if i == 0 else "Train")
        for name in ("dog", "cat")
        for i in range(4)
    ]
    path = pets / "list.csv"
    path.write_text(header + "\n".join(",".join(row) for row in rows))
    dataset = load_dataset("folder", DataConfig(root=str(path)))
    assert dataset.manifest.split == "csv" and dataset.manifest.class_names == ("cat", "dog")
    assert [e.image for e in dataset.manifest.entries if e.split == "test"] == ["cat/0.JPG", "dog/0.JPG"]
    assert len(shades(dataset, "train")[0]) == 6


def test_csv_without_a_split_and_bad_ones(pets):
    path = pets / "list.csv"
    path.write_text("path,label\n" + "".join(f"dog/{i}.{'png' if i % 2 else 'JPG'},hound\n" for i in range(4)))
    dataset = load_dataset("folder", DataConfig(root=str(path), test_fraction=0.5))
    assert dataset.manifest.class_names == ("hound",) and dataset.manifest.split == "50-50"
    for text, message in (
        ("path,label\n", "names no pictures"),
        ("dog/1.png\n", "line 1 of .* has no label"),
        ("dog/1.png,\n", "line 1 of .* has no label"),
        ("dog/1.png,dog,train\ndog/3.png,dog,maybe\n", "'maybe', neither train nor test"),
        ("dog/1.png,dog,train\ndog/3.png,dog\n", "'', neither train nor test"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_dataset("folder", DataConfig(root=str(path)))


def test_a_class_may_be_called_as_a_column_is(tmp_path):
    for name in ("file", "mallet"):
        for number in range(2):
            picture(tmp_path / name / f"{number}.png", 0)
    table = tmp_path / "tools.csv"
    table.write_text("file/0.png,file\nfile/1.png,file\nmallet/0.png,mallet\nmallet/1.png,mallet\n")
    assert load_dataset("folder", DataConfig(root=str(table))).manifest.class_names == ("file", "mallet")


NAMES_OF_PATHS = ("path", "file", "filename", "filepath", "file_name", "file_path", "image", "image_path", "url")


@pytest.mark.parametrize("name", NAMES_OF_PATHS)
def test_a_column_of_paths_has_the_same_names_wherever_a_table_is_read(pets, name):
    files = [f"{kind}/{i}.{'png' if i % 2 else 'JPG'}" for kind in ("dog", "cat") for i in range(4)]
    table = pets / "list.csv"
    table.write_text(f"note;Label; {name.upper()}\n" + "".join(f"x;{file.split('/')[0]};{file}\n" for file in files))
    assert labelled_files(table) == ([pets / file for file in files], ["dog"] * 4 + ["cat"] * 4)
    assert pictures_at(str(table)) == sorted(files)
    entries = load_dataset("folder", DataConfig(root=str(table))).manifest.entries
    assert sorted(entry.image for entry in entries) == sorted(files)


def test_of_several_columns_of_paths_one_counts_everywhere(pets):
    table = pets / "list.csv"
    table.write_text("url,label,path\nhttp://x/1.jpg,dog,dog/1.png\nhttp://x/3.jpg,dog,dog/3.png\n")
    assert labelled_files(table)[0] == [pets / "dog/1.png", pets / "dog/3.png"]
    assert pictures_at(str(table)) == ["dog/1.png", "dog/3.png"]
    entries = load_dataset("folder", DataConfig(root=str(table))).manifest.entries
    assert {entry.image for entry in entries} == {"dog/1.png", "dog/3.png"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\ndog/1.png,dog\n,dog\n", 'line 3 of ".*list.csv" has no path; add it or delete the line.'),
        ("path,label\n", '"[^"]*list.csv" names no pictures.'),
    ],
)
def test_a_table_is_refused_in_the_same_words_wherever_it_is_read(pets, text, message):
    table = pets / "list.csv"
    table.write_text(text)
    for read in (labelled_files, pictures_at, lambda source: load_dataset("folder", DataConfig(root=source))):
        with pytest.raises(UserError, match=message):
            read(str(table))


def test_folder_mistakes(tmp_path):
    with pytest.raises(UserError, match="needs --data-root"):
        load_dataset("folder", DataConfig())
    with pytest.raises(UserError, match="does not exist"):
        load_dataset("folder", DataConfig(root=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="no class folders"):
        load_dataset("folder", DataConfig(root=str(tmp_path)))


def test_a_saved_split_is_used_as_it_is(pets, tmp_path):
    first = load_dataset("folder", DataConfig(root=str(pets), test_fraction=0.4))
    first.manifest.save(tmp_path / "split.json")
    picture(pets / "cat" / "new.png", 0)
    again = load_dataset("folder", DataConfig(root=str(pets), split_file=str(tmp_path / "split.json")))
    assert again.manifest == first.manifest == Manifest.load(tmp_path / "split.json")
    with pytest.raises(UserError, match="a split of folder, not of cub200"):
        common.saved_split("cub200", DataConfig(split_file=str(tmp_path / "split.json")))


def test_a_split_file_that_would_not_be_read_is_refused(pets, tmp_path):
    (tmp_path / "split.txt").write_text("{}")
    (pets / "list.csv").write_text("dog/1.png,dog\n")
    for root in (pets, pets / "list.csv"):
        with pytest.raises(UserError, match='split.txt": of dataset folder it is the split.json of a run'):
            load_dataset("folder", DataConfig(root=str(root), split_file=str(tmp_path / "split.txt")))
        with pytest.raises(UserError, match="nowhere.json"):
            load_dataset("folder", DataConfig(root=str(root), split_file=str(tmp_path / "nowhere.json")))


def test_lists_of_imagenet_r_do_not_split_a_pack(tmp_path):
    for split in ("train", "test"):
        picture(tmp_path / split / "n01443537" / "art.png", 0)
    with pytest.raises(UserError, match="split.json of a run"):
        load_dataset("imagenet_r", DataConfig(root=str(tmp_path), split_file=str(tmp_path)))


def test_decoded_pixels_are_cached_until_a_file_changes(pets):
    config = DataConfig(root=str(pets), store=4)
    dataset = load_dataset("folder", config)
    store, _ = dataset.store(range(4))
    assert min(store.sizes[0].tolist()) == 4
    packs = cache_dir() / "pixels"
    assert len(list(packs.glob("*.bin"))) == 1 and dataset.manifest.short_hash in next(packs.glob("*.bin")).name
    dataset.store(range(4))
    assert len(list(packs.glob("*.bin"))) == 1
    changed = pets / dataset.manifest.entries[0].image
    picture(changed, 250, size=(12, 12))
    assert abs(int(dataset.store(range(4))[0].image(0)[0, 0, 0]) - 250) <= 2
    assert load_dataset("folder", replace(config, store="full")).store(range(4))[0].sizes[0].tolist() == [12, 12]


def test_unreadable_pictures_of_a_dataset(pets):
    (pets / "dog" / "1.png").write_bytes(b"damaged")
    config = DataConfig(root=str(pets), base=3, way=1, shots=1)
    with pytest.raises(UserError, match=r"1 of .* images cannot be read.*dog/1.png"):
        make_stream(load_dataset("folder", config), config, Transform(), seed=0)
    config = replace(config, skip_bad=True)
    stream = make_stream(load_dataset("folder", config), config, Transform(), seed=0)
    assert stream.about["skipped"] == ["dog/1.png"]
    assert stream.about["base_images"] + stream.about["test_images"] == 15  # of 3 x 4 in the base task and 4 x 1 tested


def test_unknown_dataset_and_fixed_splits():
    with pytest.raises(UserError, match='unknown dataset "cifar10".*Did you mean "cifar100"'):
        load_dataset("cifar10", DataConfig())
    with pytest.raises(UserError, match="one fixed split"):
        load_dataset("glyphs", DataConfig(split="80-20"))


def test_glyphs_stream(monkeypatch):
    monkeypatch.setattr(glyphs, "glyph_images", functools.partial(glyphs.glyph_images, per_class=5))  # fewer: faster
    dataset = load_dataset("glyphs", DataConfig())
    stream = make_stream(dataset, DataConfig(limit=2), Transform(size=48, resize=48), seed=2023)
    assert [len(task.classes) for task in stream.tasks] == [60] + [5] * 8
    assert [len(task.labels) for task in stream.tasks] == [120] + [25] * 8
    assert len(stream.test_labels) == 200 and tuple(stream.test.plain([0]).shape) == (1, 3, 48, 48)


@pytest.mark.parametrize("name", registry.DATASETS)
def test_every_entry_names_the_function_that_reads_it(name):
    assert registry.load_target(registry.DATASETS[name].target).__name__ == name


def test_datasets_of_other_packages(monkeypatch, pets):
    """An entry of the group fscil.datasets names a function from DataConfig to Dataset."""
    entry = registry.DatasetEntry("Pets", "", "some_backbone", target="fscil.data.datasets.folder:folder")
    monkeypatch.setattr(registry, "_third_party", lambda group: {"pets": entry} if group == "fscil.datasets" else {})
    assert len(load_dataset("pets", DataConfig(root=str(pets))).manifest.class_names) == 4
