"""Later flash attentions: taken where installed, on their devices, once they give the second one's results; and the
fastest way that is right, of a table of stand-ins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, MambaConfig, PretrainedConfig

from tests.fixtures import tables
from tests.model.cuda_branch import config_of, triton_stand_in
from tests.model.flash4_stand_in import StandIn, flash4_stand_in
from tests.model.varlen_stand_in import CALLS
from tuner.config.load import load_recipe
from tuner.model import cuda_attention, flash4_attention, flash_attention
from tuner.model import fastest as module
from tuner.model.fastest import FLASH_3, FLASH_4, Candidate, Heads, Version, fastest, fastest_version
from tuner.runtime.device import traced_for
from tuner.runtime.dist import RankInfo

CPU, NOWHERE = torch.device("cpu"), Path("cache")
FA2_OF_4 = f"flash attention 2 (for this device there is flash attention 4: {module.WAY_TO_FLASH_4})"
FA3, FA4 = "flash attention 3: flash-attn-3 is installed", "flash attention 4: flash-attn-4 is installed"


@dataclass
class Torch:
    """What torch would have activated, and how it computes."""

    package: StandIn
    """Of flash attention 4."""
    active: str | None = None
    changes: list[str] = field(default_factory=list)
    factor: float = 1.0
    problem: str | None = None

    def activate(self, name: str) -> None:
        self.active = name
        self.changes.append(name)

    def restore(self) -> None:
        self.active = None
        self.changes.append("restored")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    """Both packages are installed; what is active computes with the stand-in's numbers times a factor, or fails."""
    with flash4_stand_in(is_taken=False) as package:
        found = Torch(package)
        plain = flash_attention.varlen_attn

        def varlen_attn(*given: Any, **options: Any) -> Any:
            output, normaliser = plain(*given, **options)
            if found.active is not None and found.problem is not None:
                raise RuntimeError(found.problem)
            return output * (found.factor if found.active else 1.0), normaliser

        monkeypatch.setattr(flash_attention, "varlen_attn", varlen_attn)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", found.activate)
        monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", found.restore)
        monkeypatch.setattr(module, "_is_there", lambda module: True)
        module._tried.cache_clear()
        monkeypatch.setattr(module, "_ours", [None])
        CALLS.clear()
        with triton_stand_in():
            yield found


def only(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.setattr(module, "_is_there", lambda module: module in modules)


def changed(kind: str, **changes: Any) -> PretrainedConfig:
    config = config_of(kind)
    for name, value in {"num_attention_heads": 2, "num_key_value_heads": 1, **changes}.items():
        setattr(config, name, value)
    return config


def use(kind: str, generation: int, wanted: str | None = None, **changes: Any) -> str:
    config = changed(kind, **changes)
    with traced_for("cuda", generation=generation):
        module.use_flash_version(config, CPU, NOWHERE, wanted)
        return module.kernel_and_reason(config, generation, "bf16", is_here=True)


@pytest.mark.parametrize(
    ("generation", "width", "installed", "taken"),
    [
        (9, 256, (FLASH_3, FLASH_4), FA4), (9, 256, (FLASH_3,), FA3), (10, 128, (FLASH_3, FLASH_4), FA4),
        (10, 256, (FLASH_4,), FA4), (10, 320, (FLASH_4,), "tuner's Triton kernel: heads have 320 channels"),
        (12, 64, (FLASH_4,), FA4), (12, 256, (FLASH_4,), "flash attention 2"), (10, 64, (FLASH_3,), FA2_OF_4),
        (8, 64, (FLASH_3, FLASH_4), "flash attention 2"),
    ],
)
def test_each_is_for_its_devices_and_heads(
    generation: int, width: int, installed: tuple[Version, ...], taken: str, there: Torch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    only(monkeypatch, *(version.module for version in installed))
    monkeypatch.setattr(cuda_attention, "_triton_problem", lambda: None)
    assert use("llama", generation, head_dim=width) == taken
    assert there.active == ("FA3" if taken == FA3 else None)
    assert flash4_attention.is_taken() == (taken == FA4)


def test_what_is_right_is_tried_once_and_stays(there: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, FLASH_3.module)
    use("llama", 9)
    assert (there.active, there.changes) == ("FA3", ["FA3", "restored", "FA3"])
    tried = len(CALLS)
    assert tried == 8, "with a window and without, forward and backward, by both"
    use("llama", 9)
    assert len(CALLS) == tried and there.active == "FA3"
    monkeypatch.setattr(cuda_attention, "_triton_problem", lambda: None)
    assert use("gemma2", 9).startswith("tuner's Triton kernel: scores have a soft cap (for this device there is")
    assert there.active is None, "a model that it does not serve has torch's own again"
    only(monkeypatch, FLASH_4.module)
    assert use("gemma2", 9) == FA4
    tried = len(there.package.launches)
    assert {one.cap for one in there.package.launches} == {50.0} and tried == 4
    assert use("gpt_oss", 9) == FA4
    assert {one.has_sink for one in there.package.launches[tried:] if one.which == "forward"} == {True}


@pytest.mark.parametrize(
    ("factor", "problem", "said"),
    [
        (1.1, None, r"its results differ by \d+\.\d%"), (float("nan"), None, "its results differ by nan%"),
        (1.0, "no kernel image", "no kernel image"),
    ],
)
@pytest.mark.parametrize("version", [FLASH_3, FLASH_4])
def test_what_is_wrong_or_fails_is_not_used_and_that_is_said(
    version: Version, factor: float, problem: str | None, said: str, there: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, version.module)
    for one in (there, there.package):
        one.factor, one.problem = factor, problem
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"{version.package} is installed, and flash attention 2 is used: {said}"):
            use("llama", 9)
        assert there.active is None and not flash4_attention.is_taken()
    assert there.changes == (["FA3", "restored"] if version is FLASH_3 else []), "tried once"
    assert len(there.package.launches) <= 4


def test_a_run_keeps_the_version_that_it_has_and_a_lack_is_named(there: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    use("llama", 9, FLASH_3.name)
    assert (there.active, flash4_attention.is_taken()) == ("FA3", False)
    use("llama", 9, "flash attention 2")
    assert (there.active, flash4_attention.is_taken()) == (None, False)
    only(monkeypatch)
    with pytest.warns(UserWarning, match="trained with flash attention 4, which is not here: results may round"):
        use("llama", 9, FLASH_4.name)
    assert not flash4_attention.is_taken()


@pytest.mark.parametrize(("times", "factor", "name"), tables.cases(__file__, "the_fastest_right_one_is_found"))
def test_the_fastest_right_one_is_found(
    times: dict[str, float], factor: float, name: str, there: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.package.factor = factor
    launches = there.package.launches

    def seconds(work: Any) -> float:
        launches.clear()
        there.changes.clear()
        work()
        assert {one.longest for one in launches} <= {300}, "documents that are timed are bounded"
        return times.get(FLASH_4.name if launches else FLASH_3.name if there.changes else "usual", 1.0)

    monkeypatch.setattr(module, "MOST_TOKENS", 300)
    monkeypatch.setattr(module, "seconds_on", lambda device: seconds)
    with traced_for("cuda", generation=9):
        found = fastest_version(changed("llama"), CPU, NOWHERE, 10**6)
    assert found is not None and found.name == name
    assert list(found.passed_over) == (["flash attention 4"] if factor != 1.0 else [])
    assert there.active is None and not flash4_attention.is_taken(), "nothing is taken yet"


def test_nothing_is_measured_where_there_is_one_way(there: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    with traced_for("cuda", generation=9):
        assert fastest_version(changed("llama"), CPU, NOWHERE, 300) is None
    assert not CALLS


def test_layers_of_several_kinds_are_told_apart(there: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's layers with a window have heads of 256 channels, the others of 512; a model without heads has none."""
    config = Gemma4TextConfig(num_attention_heads=2, num_key_value_heads=1)
    assert {heads.widest for heads in Heads.of(config)} == {256, 512}
    words = "tuner's Triton kernel: heads have 512 channels"
    assert set(module.kernel_and_reason(config, 8, "bf16", is_here=False).split("; ")) == {"flash attention 2", words}
    only(monkeypatch, FLASH_3.module)
    with traced_for("cuda", generation=9):
        module.use_flash_version(config, CPU, NOWHERE)
    assert there.active == "FA3"
    assert Heads.of(MambaConfig()) == []
    assert module.kernel_and_reason(MambaConfig(), 9, "bf16", True) == "the model's own"


def test_layers_that_a_version_does_not_take_are_named(there: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's heads of 256 channels on Blackwell: with a window they go by the second, without one by the fourth."""
    only(monkeypatch, FLASH_4.module)
    why = "it takes no window with heads of 256 channels here"
    assert use("gemma3", 10, head_dim=256) == f"{FA4}, but for layers with a window: {why}"
    assert use("gemma3", 9, head_dim=256) == use("gemma3", 10, head_dim=128) == FA4
    assert {(one.window, one.widths) for one in there.package.launches} >= {(0, (256, 256)), (64, (128, 128))}


def test_attention_with_dropout_keeps_torchs_own(there: Torch) -> None:
    assert use("llama", 9, attention_dropout=0.1) == "torch's, document by document: attention has dropout"
    assert there.active is None and not flash4_attention.is_taken()


def test_without_a_package_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", pytest.fail)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: pytest.fail("restored"))
    assert use("llama", 8) == "flash attention 2"
    assert use("llama", 9) == use("llama", 10) != "flash attention 2"
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    only(monkeypatch, FLASH_3.module)
    assert use("llama", 9).startswith("flash attention 2")


def test_a_package_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "later_flash_attention.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("later_flash_attention", "no_flash_attention", "no_flash_attention.cute.interface")
    assert [module._is_there(name) for name in names] == [True, False, False]


def test_it_is_chosen_where_a_model_is_built_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from tuner.setup import model
    from tuner.setup.resolve import resolve

    config_of("llama").save_pretrained(tmp_path)
    recipe = load_recipe({"model": {"name_or_path": str(tmp_path), "init": "random"}, "data": {"train": "r.jsonl"}})
    resolved, chosen = resolve(recipe.recipe, 64, RankInfo()), []
    monkeypatch.setattr(model, "_device", lambda facts, rank_info: torch.device("cuda", 0))
    take = "use_flash_version"
    monkeypatch.setattr(module, take, lambda config, device, *_: chosen.append((config.model_type, device)))
    monkeypatch.setattr(model, "load_model", lambda *args: None)
    model.load_training_model(resolved, RankInfo())
    assert chosen == [("llama", torch.device("cuda", 0))]


RIGHT = [torch.tensor([1.0, -2.0]), torch.tensor([3.0])]
OFF = [torch.tensor([1.0, -2.0]), torch.tensor([3.2])]
NAN = [torch.tensor([1.0, torch.nan]), torch.tensor([3.0])]


def candidate(name: str, results: Sequence[torch.Tensor] | str, took: float | str) -> Candidate:
    def given(value: Any) -> Any:
        if isinstance(value, str):
            raise RuntimeError(f"{value}\nand more")
        return value

    return Candidate(name, lambda: given(results), lambda: given(took))


def seconds(work: Any) -> float:
    took: float = work()
    return took


@pytest.mark.parametrize(
    ("others", "taken", "passed_over"),
    [
        ([("a", RIGHT, 0.5), ("b", RIGHT, 0.4)], "b", {}),
        ([("a", RIGHT, 0.98)], "usual", {}),
        ([("a", RIGHT, 2.0)], "usual", {}),
        ([("a", OFF, 0.01), ("b", RIGHT, 0.9)], "b", {"a": "its results differ by 6.7%"}),
        ([("a", NAN, 0.01)], "usual", {"a": "its results differ by nan%"}),
        ([("a", "no kernel image", 0.01), ("b", RIGHT, 0.5)], "b", {"a": "no kernel image"}),
        ([("a", RIGHT, "out of memory"), ("b", RIGHT, 0.5)], "b", {"a": "out of memory"}),
        ([("a", "", 0.01)], "usual", {"a": "and more"}),
        ([], "usual", {}),
    ],
)
def test_the_fastest_right_one_is_taken(others: list[tuple[Any, ...]], taken: str, passed_over: dict[str, str]) -> None:
    given = [candidate(*other) for other in others]
    found = fastest(candidate("usual", RIGHT, 1.0), given, 2e-2, seconds)
    assert (found.name, found.passed_over) == (taken, passed_over)
    right = {name: took for name, results, took in others if name not in passed_over}
    assert found.milliseconds == pytest.approx({"usual": 1e3, **{name: took * 1e3 for name, took in right.items()}})


def test_what_the_usual_way_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        fastest(candidate("usual", "out of memory", 1.0), [], 2e-2, seconds)


def test_it_is_said_in_a_few_words() -> None:
    found = module.Fastest("b", {"usual": 9.71, "b": 8.0}, {"a": "no kernel image"})
    assert str(found) == "b 8 ms, usual 9.71 ms, a passed over: no kernel image"


def test_work_is_timed_some_rounds_and_the_first_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times, calls = iter([9.0, 9.0, 0.3, 0.1, 0.2, 9.0, 0.2]), []
    clock = iter(value for took in times for value in (100.0, 100.0 + took))
    monkeypatch.setattr("tuner.model.fastest.time.perf_counter", lambda: next(clock))
    assert module.seconds_on(torch.device("cpu"))(lambda: calls.append(1)) == pytest.approx(0.2)
    assert len(calls) == 7
