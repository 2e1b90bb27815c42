"""Layers, recipes, and configurations in files."""

import dataclasses
import re

import pytest
import yaml

from fscil import config as configuration
from fscil import recipes, registry
from fscil.config import DataConfig, RunConfig, differences, read_config, resolve, with_later_settings, write_config
from fscil.errors import UserError
from fscil.strict import build, types_of


@pytest.mark.parametrize(
    ("setting", "suggestion"),
    [
        ("sede=1", '"seed"'),
        ("epochs=3", '"options.epochs"'),
        ("options.epoch=3", '"options.epochs"'),
        ("precision=fp32", '"runtime.precision"'),
        ("transform.flipp=0", '"transform.flip"'),
    ],
)
def test_unknown_keys_suggest_the_nearest(setting, suggestion):
    with pytest.raises(UserError, match="unknown key") as caught:
        resolve(settings=[setting])
    assert f"Did you mean {suggestion}?" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"method": "smq"}, 'unknown method "smq". Did you mean "smp"?'),
        ({"dataset": "cifar10"}, 'unknown dataset "cifar10". Did you mean "cifar100"?'),
        ({"recipe": "glyphs/smp_ful"}, 'unknown recipe "glyphs/smp_ful". Did you mean "glyphs/smp_full"?'),
    ],
)
def test_unknown_names_suggest_the_nearest(names, message):
    with pytest.raises(UserError) as caught:
        resolve(**names)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "setting", ["seed=-1", "transform.scale=[0.5,2]", "transform.flip=2", "runtime.micro_batch=0", "data.shots=0"]
)
def test_values_out_of_range_are_refused(setting):
    with pytest.raises(UserError) as caught:
        resolve(settings=[setting])
    assert setting.split("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reader"), [("order_file", "data.class_order=file"), ("index_files", "data.sampler=index_files")]
)
def test_files_that_would_not_be_read_are_refused(name, reader):
    with pytest.raises(UserError) as caught:
        resolve(settings=[f"data.{name}=somewhere"])
    assert f'data.{name} "somewhere" is read with' in str(caught.value) and reader in str(caught.value)
    assert getattr(resolve(settings=[f"data.{name}=somewhere", reader]).data, name) == "somewhere"


def test_shots_are_chosen_in_one_way(tmp_path):
    listed = ["data.sampler=index_files", "data.index_files=lists"]
    with pytest.raises(UserError) as caught:
        resolve(settings=listed, data={"shots_file": "shots.json"})
    assert 'data.shots_file) "shots.json"' in str(caught.value) and "data.sampler=seeded" in str(caught.value)
    assert resolve(settings=listed).data.index_files == "lists"
    write_config(tmp_path / "config.yaml", RunConfig(data=DataConfig(sampler="index_files", shots_file="shots.json")))
    assert read_config(tmp_path / "config.yaml").data.shots_file == "shots.json"  # of a run that was stopped


@pytest.mark.parametrize(
    "command", [["run"], ["run", "--limit", "2"], ["compare"], ["compare", "--vary", "options.epochs=1,2"]]
)
def test_tasks_of_a_validation_stream_are_refused(command, fscil, tmp_path):
    given = ["--set", "data.tasks=2", "--set", "data.validation=true", "-o", tmp_path / "made"]
    status, _, err = fscil(*command, *given)
    assert status == 2 and "data.tasks=2 has no effect" in err and "data.validation_base" in err, err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("setting", "said"), [("data.tasks=2", "data.tasks=2 has no effect"), ("data.validation=false", "fscil compare")]
)
def test_a_stream_to_tune_on_cannot_be_another(setting, said, fscil, tmp_path):
    status, _, err = fscil("tune", "--vary", "head.correction=0.5", "--set", setting, "-o", tmp_path / "made")
    assert status == 2 and said in err and not (tmp_path / "made").exists()


def test_layers_lie_in_the_stated_order(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("method: smp\nseed: 7\noptions: {epochs: 4, lr: 0.5, rank: 3}\nfast: {options: {epochs: 2}}\n")
    slow = resolve(recipe=str(recipe))
    assert (slow.seed, slow.options["epochs"], slow.options["momentum"]) == (7, 4, 0.9)
    quick = resolve(recipe=str(recipe), fast=True, settings=["options.lr=1e-2", "seed=8"], seed=9)
    assert (quick.seed, quick.options["epochs"], quick.options["lr"], quick.options["rank"]) == (9, 2, 0.01, 3)
    assert quick.recipe.endswith("+fast") and not slow.recipe.endswith("+fast")


def test_a_recipe_of_a_relative_does_not_undo_what_makes_the_method(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("method: smp\noptions: {calibration: mpcc, epochs: 4}\n")
    config = resolve(method="miam", recipe=str(recipe))
    assert (config.options["calibration"], config.options["epochs"]) == ("prototypes", 4)
    recipe.write_text("method: miam\noptions: {calibration: mpcc}\n")  # its own recipe may
    assert resolve(method="miam", recipe=str(recipe)).options["calibration"] == "mpcc"


def test_variants_follow_the_recipe_of_their_family():
    assert resolve(method="closed_form").recipe == "glyphs/smp"
    assert resolve(method="closed_form").options["calibration"] == "closed_form"
    assert resolve(method="baseline").options["learnable_scale"] is True


@pytest.mark.parametrize("name", recipes.names())
@pytest.mark.parametrize("fast", [False, True])
def test_every_recipe_loads_strictly_and_describes_itself(name, fast):
    recipe = recipes.load(name)
    text = (recipes.FOLDER / f"{name}.yaml").read_text()
    for heading in ("# Command:", "# Source:", "# Expected:", "# Time:"):
        assert heading in text
    assert recipe.values["dataset"] == name.split("/")[0]
    method = recipe.values.get("method")
    if method is not None and method not in registry.methods():
        pytest.skip(f"method {method} is not here")
    resolve(recipe=name, fast=fast)


@pytest.mark.parametrize(
    ("dataset", "batch", "decay"), [("cifar100", 48, 5e-4), ("imagenet_r", 24, 5e-3), ("cub200", 24, 5e-3)]
)
@pytest.mark.parametrize("method", ["smp", "baseline"])
def test_the_paper_s_recipes_hold_the_paper_s_values(dataset, batch, decay, method):
    config = resolve(dataset=dataset, method=method)
    options = config.options
    assert (options["batch_size"], options["weight_decay"], options["epochs"]) == (batch, decay, 20)
    assert (options["lr"], options["momentum"], options["rank"]) == (0.01, 0.9, 10)
    assert config.backbone == "vit_base_patch16_224.augreg_in21k_ft_in1k"
    assert (config.transform.scale, config.transform.flip, config.transform.normalize) == ((0.05, 1.0), 0.5, "auto")
    if method == "smp":
        assert (options["scale"], options["margin"], options["calibration_epochs"]) == (16, 0.2, 5)
        assert (options["calibration_lr"], options["views"], options["covariance_eps"]) == (1e-3, None, 1e-3)
    else:
        assert (options["scale"], options["learnable_scale"], options["margin"]) == (1, True, 0)


def test_the_full_glyph_recipe_cuts_nothing():
    full, paper = resolve(recipe="glyphs/smp_full").options, resolve(dataset="cifar100").options
    assert full == paper


def test_a_configuration_survives_its_file(tmp_path):
    config = resolve(method="miam", settings=["options.lr=0.5", "data.shots=3"])
    write_config(tmp_path / "config.yaml", config)
    assert read_config(tmp_path / "config.yaml") == config
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert set(content["options"]) == {f.name for f in dataclasses.fields(registry.method_class("miam").Options)}


def test_a_run_of_older_code_keeps_what_it_did_where_a_default_came_later(tmp_path):
    later = resolve(method="foster")
    values = later.to_dict()
    del values["options"]["evaluated"]  # its runs were evaluated by the student, and could not say so
    values["options"]["epochs"] = 7
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"format_version": 1, **values}))
    for options in (read_config(tmp_path / "config.yaml").options, with_later_settings(values)["options"]):
        assert (options["evaluated"], options["epochs"]) == ("student", 7)
    assert later.options["evaluated"] == "teacher"
    assert with_later_settings(later.to_dict()) == later.to_dict()


def test_a_file_of_a_newer_version_or_with_a_foreign_key_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    write_config(path, resolve())
    text = path.read_text()
    path.write_text(text.replace("format_version: 1", "format_version: 99"))
    with pytest.raises(UserError, match="format version 99.*Upgrade"):
        read_config(path)
    path.write_text(text + "colour: red\n")
    with pytest.raises(UserError, match="colour"):
        read_config(path)
    path.write_text("- 1\n- 2\n")
    with pytest.raises(UserError, match="mapping"):
        read_config(path)


def test_only_what_changes_results_counts_as_a_difference():
    config = resolve()
    moved = resolve(settings=["data.root=/elsewhere", "runtime.device=cpu", "runtime.eval_batch=7"])
    assert differences(config, moved) == [] and config.fingerprint() == moved.fingerprint()
    other = resolve(settings=["options.rank=4"])
    assert differences(config, other) == ["options.rank: 10 -> 4"] and config.fingerprint() != other.fingerprint()


def test_entries_of_other_packages_are_found(monkeypatch):
    entry = registry.MethodEntry("fscil.methods.smp.method:SMP", "Mine", "a method of another package", {"rank": 3})
    monkeypatch.setattr(registry, "_third_party", lambda group: {"mine": entry} if group == "fscil.methods" else {})
    assert "mine" in registry.methods()
    assert resolve(method="mine").options["rank"] == 3


def test_every_method_s_options_are_its_own():
    for name, entry in registry.methods().items():
        fields = {item.name for item in dataclasses.fields(registry.method_class(name).Options)}
        assert set(entry.options) <= fields, name


ANY_NUMBER = {"margin", "margin_g", "margin_average", "margin_upper", "mapped_average", "mapped_upper"}
OWN_ERROR = {"calibration_margin", "expected_classes", "virtual_classes"}  # a margin; FACT counts them together


def test_every_number_of_a_method_or_head_has_bounds():
    classes = [registry.method_class(name) for name in registry.methods()]
    classes += [registry.head_class(name) for name in registry.heads()]
    for options in {cls.Options for cls in classes}:
        for name, hint in types_of(options).items():
            if (
                re.search(r"\b(int|float)\b", str(hint))
                and "tuple" not in str(hint)
                and name not in ANY_NUMBER | OWN_ERROR
            ):
                with pytest.raises(UserError, match=name):
                    build(options, {name: -1})


def test_known_keys_cover_the_dataclasses():
    keys = configuration.known_keys()
    assert {"seed", "data.shots", "runtime.checkpointing", "transform.scale", "evaluation.hacc"} <= set(keys)
    assert build(RunConfig, {}) == RunConfig()


def test_an_entry_that_cannot_be_used_names_its_package(tmp_path, monkeypatch):
    """A package made for another version of fscil, say."""
    (tmp_path / "birds-1.dist-info").mkdir()
    (tmp_path / "birds-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1\n")
    points = "[fscil.heads]\nnearest = birds:NEAREST\n[fscil.datasets]\nbirds = birds:BIRDS\n"
    points += "[fscil.methods]\ngone = birds_of_old:GONE\n"
    (tmp_path / "birds-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "birds.py").write_text("NEAREST = 'birds:nearest'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._third_party.cache_clear()
    try:
        for entries, said in (
            (registry.heads, '"nearest" (birds:NEAREST) of fscil.heads is a str, not a HeadEntry'),
            (registry.datasets, '"birds" (birds:BIRDS) of fscil.datasets cannot be loaded (AttributeError'),
            (registry.methods, '"gone" (birds_of_old:GONE) of fscil.methods cannot be loaded (ModuleNotFoundError'),
        ):
            with pytest.raises(UserError, match=re.escape(said)) as problem:
                entries()
            assert str(problem.value).endswith('repair or uninstall "birds"')
    finally:
        registry._third_party.cache_clear()


@pytest.mark.parametrize("target", ["fscil.nowhere:Method", "fscil.methods.frozen:Nobody"])
def test_a_target_that_is_not_there_is_one_line(target):
    with pytest.raises(UserError, match=f'"{target}" cannot be loaded'):
        registry.load_target(target)
