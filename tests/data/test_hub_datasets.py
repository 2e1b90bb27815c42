"""Tables of images from local folders, read as those of the hub are."""

import io
import socket
import time

import numpy as np
import pytest
from PIL import Image

from fscil.config import DataConfig, resolve
from fscil.data.datasets import load_dataset
from fscil.errors import UserError
from stored_images import stored

pytestmark = pytest.mark.extra("hf")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FSCIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(number):
    return np.random.default_rng(number).integers(0, 255, (12, 16, 3), dtype=np.uint8)


def encoded(number):
    stream = io.BytesIO()
    Image.fromarray(picture(number)).save(stream, format="PNG")
    return {"bytes": stream.getvalue(), "path": None}


def write_table(folder, part, numbers, labels, extra=None, names=("cat", "dog", "emu")):
    """A parquet file of pictures with class labels, as repositories of the hub hold it."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    columns = {"picture": [encoded(number) for number in numbers], "kind": list(labels)}
    features = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=list(names))}
    for name, (values, feature) in (extra or {}).items():
        columns[name], features[name] = values, feature
    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pydict(columns, schema=datasets.Features(features).arrow_schema)
    parquet.write_table(table, folder / f"{part}-00000-of-00001.parquet")


def test_its_columns_are_found_and_its_pictures_are_those_of_the_table(tmp_path):
    write_table(tmp_path / "pets", "train", range(9), [0, 1, 2] * 3)
    write_table(tmp_path / "pets", "test", range(20, 26), [2, 1, 0] * 2)
    dataset = load_dataset(f"hf:{tmp_path / 'pets'}", DataConfig())
    assert dataset.manifest.class_names == ("cat", "dog", "emu") and dataset.manifest.split == "train/test"
    assert (dataset.base, dataset.way) == (2, 1)
    train, test = stored(dataset, "train"), stored(dataset, "test")
    assert len(train) == 9 and len(test) == 6
    assert train["train/4"][0] == "dog" and (train["train/4"][1] == picture(4)).all()
    assert test["test/3"][0] == "emu" and (test["test/3"][1] == picture(23)).all()


def test_columns_that_leave_a_choice_are_named(tmp_path):
    import datasets

    breeds = ([0, 1, 0, 1, 0, 1] * 2, datasets.ClassLabel(names=["long", "short"]))
    for part in ("train", "test"):
        write_table(tmp_path / "pets", part, range(12), [0, 1, 2] * 4, {"fur": breeds})
    name = f"hf:{tmp_path / 'pets'}"
    with pytest.raises(UserError, match=r"several label columns \(kind, fur\); name it with --set data.label_column"):
        load_dataset(name, DataConfig())
    assert load_dataset(name, DataConfig(label_column="fur")).manifest.class_names == ("long", "short")
    with pytest.raises(UserError, match='no column "furr".*Did you mean "fur"'):
        load_dataset(name, DataConfig(label_column="furr"))
    with pytest.raises(UserError, match='no column "photo"'):
        load_dataset(name, DataConfig(label_column="fur", image_column="photo"))


def test_a_table_without_a_part_to_test_on_is_split_by_class(tmp_path):
    write_table(tmp_path / "pets", "train", range(30), [0, 1, 2] * 10)
    dataset = load_dataset(f"hf:{tmp_path / 'pets'}", DataConfig(test_fraction=0.2))
    test = stored(dataset, "test")
    assert sorted(name for name, _ in test.values()) == ["cat"] * 2 + ["dog"] * 2 + ["emu"] * 2
    assert all((pixels == picture(int(image.split("/")[1]))).all() for image, (_, pixels) in test.items())
    assert dataset.manifest.split == "80-20"


def test_a_folder_of_images_and_unlabelled_rows(tmp_path):
    for part in ("train", "test"):
        for number, name in enumerate(("ash", "oak")):
            (tmp_path / "trees" / part / name).mkdir(parents=True)
            for at in range(2):
                Image.fromarray(picture(10 * number + at)).save(tmp_path / "trees" / part / name / f"{at}.png")
    dataset = load_dataset(f"hf:{tmp_path / 'trees'}", DataConfig())
    assert dataset.manifest.class_names == ("ash", "oak") and len(stored(dataset, "train")) == 4
    write_table(tmp_path / "hidden", "train", range(6), [0, 1, 2] * 2)
    write_table(tmp_path / "hidden", "test", range(6), [-1] * 6)
    with pytest.raises(UserError, match="images without a class"):
        load_dataset(f"hf:{tmp_path / 'hidden'}", DataConfig())


def test_what_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        load_dataset(f"hf:{tmp_path / 'nowhere'}", DataConfig())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="could not be read.*fscil fetch hf:") as problem:
        load_dataset(f"hf:{tmp_path / 'empty'}", DataConfig())
    assert "\n" not in str(problem.value)


def test_without_a_network_it_is_said_at_once(monkeypatch, caplog, capfd):
    """The hub's client would try six times and print a line each time."""
    import datasets

    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("fscil.data.datasets.from_hub.getproxies", dict)
    began = time.monotonic()
    with pytest.raises(UserError, match="could not be read.*without a network, copy") as problem:
        load_dataset("hf:nobody/nothing", DataConfig())
    assert "\n" not in str(problem.value) and time.monotonic() - began < 10
    assert not caplog.records and capfd.readouterr() == ("", "")
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_run_names_its_columns_only_where_they_are_chosen():
    assert "label_column" not in resolve("smp").to_dict()["data"]
    chosen = resolve("smp", settings=["data.label_column=fur"])
    assert chosen.to_dict()["data"]["label_column"] == "fur"
    assert chosen.fingerprint() != resolve("smp").fingerprint()


def write_labels(folder, labels):
    """A table whose labels are of no declared class."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    label = pyarrow.array(labels)
    features = datasets.Features({"picture": datasets.Image()})
    pictures = pyarrow.array([encoded(number) for number in range(len(labels))], features.arrow_schema.field(0).type)
    table = pyarrow.table({"picture": pictures, "label": label})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")


@pytest.mark.parametrize("labels", [["cat", "dog"] * 3 + [None], [1.0, 2.0] * 3 + [float("nan")]])
def test_rows_whose_text_or_number_is_missing_are_without_a_class(tmp_path, labels):
    write_labels(tmp_path / "pets", labels)
    with pytest.raises(UserError, match="part train has images without a class"):
        load_dataset(f"hf:{tmp_path / 'pets'}", DataConfig(image_column="picture"))


def test_a_column_of_lists_is_no_label(tmp_path):
    write_labels(tmp_path / "pets", [["cat"], ["dog", "emu"]] * 3)
    with pytest.raises(UserError, match='column "label" holds no single number or text for each image'):
        load_dataset(f"hf:{tmp_path / 'pets'}", DataConfig(image_column="picture"))


def test_a_folder_below_the_home_folder(tmp_path, monkeypatch):
    write_table(tmp_path / "pets", "train", range(9), [0, 1, 2] * 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert load_dataset("hf:~/pets", DataConfig()).manifest.class_names == ("cat", "dog", "emu")
