"""A loss of the user's own: its value, its figures in metrics.jsonl, its rows, and its mistakes; and what sections
of methods say of their figures.
"""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.caches import new_cache
from tests.contracts.syntax import ROOT
from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.config.methods import CustomMethod, Examples
from tuner.config.recipe import UNIONS
from tuner.data.batches import StepBatches, collate
from tuner.data.prepared import Row
from tuner.errors import PluginError
from tuner.model.output_layer import LogitTransform, OutputLayer
from tuner.runtime.dist import RankInfo
from tuner.setup import build
from tuner.setup.build import Assembly
from tuner.train.methods.method import Method, build_method, logged
from tuner.train.progress import CLOCKED
from tuner.train.step import forward_backward

LOSS = """
import torch
def with_z_loss(weight=0.0):
    def objective(hidden, head, bias, targets):
        logits = (hidden @ head.to(hidden.dtype).T).float()
        z = logits.logsumexp(-1)
        loss = (z - logits.gather(1, targets[:, None])[:, 0]).sum() + weight * z.square().sum()
        return loss, {"accuracy": (logits.argmax(-1) == targets).sum(), "z2": z.square().sum()}
    return objective
def mean(): return lambda hidden, head, bias, targets: hidden.mean()
def vector(): return lambda hidden, head, bias, targets: (hidden.sum(-1), {})
def clash(): return lambda hidden, head, bias, targets: (hidden.sum(), {"lr": hidden.sum()})
def broken(): raise ValueError("no")
def nothing(): return None
def raises():
    def objective(hidden, head, bias, targets):
        return hidden @ targets
    return objective
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace that is copied."""
    directory = tmp_path_factory.mktemp("prepared")
    trainings.prepare(directory, 1)
    (directory / "my_loss.py").write_text(LOSS)
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The log of three steps with the loss that is there already."""
    directory = tmp_path_factory.mktemp("plain")
    trainings.prepare(directory, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(new_cache(directory / "cache")))
        return lines(launch(directory, train__stop_after="3 steps").run_dir)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """A small training with the loss that is there already."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return assembly_for(recipe_for(directory, train={"global_batch_size": 1}), [5], RankInfo())


def forward_with(assembly: Assembly, file: Path, use: str) -> None:
    """Build a method of a file and take its part of a step."""
    method = build_method(CustomMethod(kind="custom", use=f"{file}:{use}"))
    forward_backward(replace(assembly.train_state, method=method), 0, assembly.batches.step(0))


def custom(workplace: Path, name: str, use: str, **flags: str) -> list[dict[str, Any]]:
    wanted = {"train__stop_after": "3 steps", "method__kind": "custom", "method__use": f"my_loss.py:{use}"}
    return lines(launch(workplace, name=name, **(wanted | flags)).run_dir)


def test_the_same_loss_trains_the_same_and_logs_its_figures(workplace: Path, plain: list[dict[str, Any]]) -> None:
    own = custom(workplace, "own", "with_z_loss")
    for a, b in zip(plain, own, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert 0 <= b["accuracy"] <= 1
        assert list(b)[-len(CLOCKED) :] == list(CLOCKED)
    heavier = custom(workplace, "heavier", "with_z_loss", method__options="{weight: 0.1}", train__stop_after="1 steps")
    assert heavier[0]["loss"] == pytest.approx(own[0]["loss"] + 0.1 * own[0]["z2"], rel=1e-5)


def test_figures_are_means_over_the_global_batch_for_any_micro_batch(workplace: Path) -> None:
    flags = {"adapter__dropout": "0", "train__stop_after": "1 steps"}
    one = custom(workplace, "one", "with_z_loss", train__micro_batch_size="1", **flags)
    two = custom(workplace, "two", "with_z_loss", train__micro_batch_size="2", **flags)
    assert one[0]["z2"] == pytest.approx(two[0]["z2"], rel=1e-6)


def test_prepared_rows_are_those_of_the_method_that_it_names(workplace: Path) -> None:
    from tuner.config.load import Override, load_recipe
    from tuner.data.building.spec import keys_of, prepare_spec

    def key(**flags: str) -> str:
        overrides = [Override(f"method.{name}", text) for name, text in flags.items()]
        recipe = load_recipe(workplace / "r.yaml", overrides, cwd=workplace).recipe
        return keys_of(prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, 1)).prepared

    use = "my_loss.py:mean"
    assert key() == key(kind="custom", use=use) == key(kind="custom", use=use, options="{a: 1}")
    assert key(kind="custom", use=use, train_on="all") == key(train_on="all") != key()


@pytest.mark.parametrize(("use", "said"), [("nothing", "not a loss function"), ("clash", "the name of another")])
def test_a_mistake_ends_a_launch(workplace: Path, use: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        custom(workplace, "bad", use)


def test_a_model_that_caps_its_logits_is_refused_before_it_is_loaded(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.LogitTransform, "of", staticmethod(lambda config: LogitTransform(1.0, 30.0)))
    monkeypatch.setattr(build, "load_training_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(PluginError, match="my_loss.py:with_z_loss: this model caps its logits"):
        custom(workplace, "bad", "with_z_loss")


def test_an_unknown_option_is_named(workplace: Path) -> None:
    with pytest.raises(PluginError, match="no option wait"):
        custom(workplace, "bad", "with_z_loss", method__options="{wait: 1}")


def test_evaluation_is_cross_entropy_whatever_the_loss(workplace: Path) -> None:
    flags = {"data__eval": "9 documents", "eval__samples": "0", "train__stop_after": "1 steps"}
    plain = lines(launch(workplace, name="plain", **flags).run_dir)
    own = custom(workplace, "own", "with_z_loss", method__options="{weight: 1}", **flags)
    assert json.dumps(own[0]["loss"]) == json.dumps(plain[0]["loss"])
    assert torch.tensor(own[0]["loss"]).isfinite()


def test_the_loss_in_the_docs_trains(workplace: Path) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    (workplace / "my_loss.py").write_text(text.split("```python\n")[1].split("```")[0])
    found = custom(workplace, "documented", "with_z_loss", method__options="{weight: 1e-4}")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert all("accuracy" in line for line in found)


def test_the_method_in_the_docs_is_the_mean_over_documents(workplace: Path, plain: list[dict[str, Any]]) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    (workplace / "my_loss.py").write_text(text.split("```python\n")[2].split("```")[0])
    own = custom(workplace, "documented", "DocumentMean")
    ours = lines(launch(workplace, name="ours", train__stop_after="3 steps", method__reduction="document").run_dir)
    assert [line["loss"] for line in own] == pytest.approx([line["loss"] for line in ours], rel=1e-5)
    assert [line["grad_norm"] for line in own] == pytest.approx([line["grad_norm"] for line in ours], rel=1e-4)
    assert own[0]["token_loss"] == pytest.approx(plain[0]["loss"], rel=1e-5)
    assert abs(plain[0]["loss"] - ours[0]["loss"]) > 1e-3


@pytest.mark.parametrize("kind", UNIONS["method"])
def test_a_kind_is_a_file_of_its_name_and_says_what_its_examples_are(kind: str) -> None:
    assert callable(import_module(f"tuner.train.methods.{kind}").build)
    required = {"custom": {"use": "a.py:b"}, "distill": {"teacher": "a"}}
    section = UNIONS["method"][kind].model_validate(required.get(kind, {}))
    assert isinstance(section.examples, Examples)  # type: ignore[attr-defined]
    assert kind == "custom" or isinstance(build_method(section), Method)  # type: ignore[arg-type]


METHODS = """
from tuner.train.methods.method import Sum, Terms
from tuner.train.methods.pretrain import TokenMean
class NotTerms(TokenMean):
    def terms(self, hidden, head, targets, columns):
        return hidden.sum()
class Clash(TokenMean):
    def terms(self, hidden, head, targets, columns):
        return Terms({"lr": Sum(hidden.sum(), "tokens"), "b": Sum(hidden.sum(), "tokens")}, {})
class Uncounted(TokenMean):
    def terms(self, hidden, head, targets, columns):
        return Terms({"loss": Sum(hidden.sum(), "pairs")}, {})
class Twice(TokenMean):
    def terms(self, hidden, head, targets, columns):
        return Terms({name: Sum(hidden.sum(), "tokens") for name in "ab"}, {"a": Sum(hidden.sum(), "tokens")})
class Miscounts(TokenMean):
    def counts(self, batches):
        return {"tokens": 1 // 0}
class Partial:
    by_document = False
    def counts(self, batches): return {}
"""


@pytest.mark.parametrize(
    ("code", "use", "said"),
    [
        (LOSS, "mean", "returned no pair"),
        (LOSS, "vector", "the loss is no scalar"),
        (LOSS, "clash", "the figure lr has the name of another"),
        (LOSS, "broken", r"ValueError: no \(.*my_loss.py:13\)"),
        (LOSS, "nothing", "gave a NoneType, not a loss function"),
        (LOSS, "raises", r"my_loss.py:raises failed: RuntimeError: .*my_loss.py:17\)"),
        (LOSS, "with_zloss", "did you mean with_z_loss|has no with_zloss"),
        (METHODS, "NotTerms", "returned a Tensor without losses"),
        (METHODS, "Clash", "the figure lr has the name of another"),
        (METHODS, "Uncounted", "loss is per pairs, of which there is no count"),
        (METHODS, "Twice", "the figure a has the name of another"),
        (METHODS, "Miscounts", r"my_loss.py:Miscounts failed: ZeroDivisionError: .*my_loss.py:18\)"),
        (METHODS, "Partial", "gave a Partial, not a loss function"),
    ],
)
def test_mistakes_are_named(assembly: Assembly, tmp_path: Path, code: str, use: str, said: str) -> None:
    (tmp_path / "my_loss.py").write_text(code)
    with pytest.raises(PluginError, match=said):
        forward_with(assembly, tmp_path / "my_loss.py", use)


HEADING = 7


def of_documents() -> list[str]:
    """Kinds over pairs or labelled documents that need nothing but their defaults."""
    found = []
    for kind, section in UNIONS["method"].items():
        try:
            built: Any = section()
        except ValidationError:
            continue
        found += [kind] if built.examples.kind in {"preference", "unpaired"} else []
    return found


@pytest.mark.parametrize("kind", of_documents())
def test_a_section_names_what_its_method_logs(kind: str) -> None:
    section: Any = UNIONS["method"][kind]()
    method = build_method(section)
    lengths = np.array([4, 5, 3, 6], dtype=np.int32)
    trained = np.concatenate([np.arange(n) >= n - 2 for n in lengths])
    ids = np.random.default_rng(0).integers(0, 11, int(lengths.sum()))
    batch = method.made_up(collate([Row(ids, trained, lengths, np.arange(4))]))
    columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
    columns |= {"kl": torch.zeros(())} if method.mismatched else {}
    at = method.positions(batch)
    targets = torch.as_tensor(batch.targets[at])
    terms = method.terms(torch.randn(len(at), 5), OutputLayer(torch.randn(11, 5)), targets, columns)
    assert set(section.figures) == set(logged(terms))
    assert all(len(figure.heading) <= HEADING for figure in section.figures.values())
    counts = method.counts(StepBatches(np.arange(1), len(at), len(ids), [batch], batch.trained_per_document, 4))
    assert {one.per for one in (*terms.losses.values(), *terms.figures.values())} <= set(counts)
