"""Heads chosen for a run: the same numbers as the named methods, a label of their own, and heads of other packages."""

import json

import pytest
import torch

from fscil import registry
from fscil.config import resolve
from fscil.errors import UserError
from fscil.evaluation.results import load_results
from fscil.evaluation.tables import group_runs, paper_numbers
from fscil.experiments.api import run
from fscil.files import load_tensors
from fscil.methods.represented import Represented

SMALL = {"data.base": 6, "data.way": 2, "data.tasks": 2, "options.epochs": 1, "options.rank": 2, "runtime.keep": "all"}


def small_run(folder, method, weights, head=None, **settings):
    chosen = {**SMALL, **{key.replace("__", "."): value for key, value in settings.items()}}
    if method == "frozen":
        chosen = {key: value for key, value in chosen.items() if not key.startswith("options.")}
    return run(
        method, head=head, settings=chosen, folder=folder, limit=4, weights=weights, device="cpu", precision="fp32"
    )


def figures(results):
    keys = ("session", "seen", "accuracy", "base_accuracy", "new_accuracy", "hacc", "fnr", "fpr")
    return [{key: session[key] for key in keys} for session in results.sessions]


def test_a_head_on_miam_is_the_method_of_that_name(tmp_path, weights):
    """`--method miam --head closed_form` is `--method closed_form`, and with `mpcc` it is SMP."""
    for head, name in (("closed_form", "closed_form"), ("mpcc", "smp")):
        settings = {"head__views": 2} if head == "mpcc" else {}
        chosen = small_run(tmp_path / head, "miam", weights, head=head, **settings)
        named = small_run(tmp_path / name / "named", name, weights, **({"options__views": 2} if name == "smp" else {}))
        assert figures(chosen) == figures(named)
        for session in range(3):
            one, other = (
                load_tensors(result.folder / "predictions" / f"session_{session}.safetensors")[0]
                for result in (chosen, named)
            )
            assert torch.equal(one["top"], other["top"])


def test_a_run_with_a_head_says_so_and_goes_on_where_it_stopped(tmp_path, weights, monkeypatch):
    whole = small_run(tmp_path / "whole", "frozen", weights, head="plda", head__shrinkage=0.5)
    assert whole.config["head"] == {
        "name": "plda", "shrinkage": 0.5, "between_shrinkage": 0.5, "between_scale": 1.0
    }  # fmt: skip
    assert "frozen + plda" in whole.title and "+ PLDA" in next(iter(group_runs([whole.to_dict()])))
    assert paper_numbers(whole.to_dict()) == {}
    stopped, learn = tmp_path / "stopped", Represented.learn

    def stop_at_the_second_task(self, task):
        if task.index == 2:
            raise KeyboardInterrupt
        learn(self, task)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Represented, "learn", stop_at_the_second_task)
        small_run(stopped, "frozen", weights, head="plda", head__shrinkage=0.5)
    run(folder=stopped, resume=True)
    assert figures(load_results(stopped)) == figures(whole)


def test_runs_without_a_chosen_head_are_the_runs_they_were():
    """Their configuration has no new key, so fingerprints of older runs stay."""
    assert "head" not in resolve(method="smp").to_dict()
    assert resolve(method="smp", settings=["head.name=mpcc"]).fingerprint() != resolve(method="smp").fingerprint()


@pytest.mark.parametrize(
    "settings, message",
    [
        (["head.shrinkage=0.2"], "no head is chosen; add --head NAME"),
        (["head.name=closed_from"], 'unknown head "closed_from". Did you mean "closed_form"'),
        (["head.name=closed_form", "head.shrinkge=1"], 'unknown key "head.shrinkge". Did you mean "head.shrinkage"'),
        (["head.name=closed_form", "head.shrinkage=much"], '"head.shrinkage" must be a number'),
    ],
)
def test_wrong_settings_of_a_head_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        resolve(method="miam", settings=settings)


def test_methods_whose_features_move_refuse_a_head(tmp_path, weights):
    with pytest.raises(UserError, match="features that stay as they are.*L2P"):
        run("l2p", head="plda", folder=tmp_path / "run", limit=2, weights=weights, device="cpu")


def test_a_head_of_another_package_is_found_and_run(tmp_path, weights, monkeypatch):
    """Through the entry points `fscil.heads`, as CONTRIBUTING shows."""
    entry = registry.HeadEntry("fscil.heads.prototypes:Prototypes", "mine", "prototypes of another package")
    monkeypatch.setattr(registry, "_third_party", lambda group: {"mine": entry} if group == "fscil.heads" else {})
    results = small_run(tmp_path / "run", "frozen", weights, head="mine")
    assert results.title.startswith("frozen + mine") and json.dumps(results.config["head"])
    assert figures(results) == figures(small_run(tmp_path / "own", "frozen", weights))
