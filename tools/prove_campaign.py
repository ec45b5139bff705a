"""`tuner prove` against faults that are planted in sums over processes, and its matrix over models and layouts.

    python -m tools.prove_campaign [--faults] [--recipes] [--matrix] [--steps N] [--out DIR]
        [--models NAME ...] [--adapters none lora] [--accumulate 1 4] [--layouts NAME ...]

A fault is planted in the processes of a layout alone: each must be found, with words that name it. Recipes are
those that ship, on the published configs of their models, under their own layout and some others. The matrix is every
known layout of eight architectures, in full and with LoRA, with one micro-batch a step and with four; a table of it is
printed, with the reason of each cell that is refused. Exits with 1 where a fault passes, is named otherwise, or a cell
is not equal.
"""

import argparse
import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tools.commands import ROOT, asked, some, workplace
from tools.recipes_campaign import SHAPES, whole_model
from tuner.config.load import Override, load_recipe
from tuner.config.recipe import Recipe
from tuner.config.shipped import shipped_recipes
from tuner.parallel import fsdp
from tuner.parallel.expert import SpreadExperts
from tuner.parallel.sequence import CutOutputLayer
from tuner.parallel.tensor import split
from tuner.prove.compare import LayoutProof
from tuner.prove.layouts import KNOWN, own_layout, parse
from tuner.prove.prove import proofs_of, prove, refused, train_alone
from tuner.prove.training import Setting
from tuner.prove.twin import make_twin
from tuner.train import step
from tuner.train.optimizer import OptimizerSet

_QWEN3: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 8, "vocab_size": 128256}), "qwen3": ("qwen3", _QWEN3),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"num_hidden_layers": 32, "sliding_window": 4096}), "olmo2": ("olmo2", {}),
    "phi": ("phi", {}),
    "qwen3-moe": ("qwen3_moe", {"num_attention_heads": 32, "num_key_value_heads": 4, "output_router_logits": True}),
    "mixtral": ("mixtral", {"output_router_logits": True}),
}
"""Architectures with the sizes of published models, as far as a small model keeps anything of them."""


def recipe_of(model: str, directory: Path, adapter: str = "none", accumulate: int = 4) -> Recipe:
    """A recipe of an architecture, with so many micro-batches in a step."""
    from transformers import AutoConfig

    kind, shape = MODELS[model]
    place = directory / model
    AutoConfig.for_model(kind, **shape).save_pretrained(place)
    train = {"global_batch_size": 8, "micro_batch_size": 8 // accumulate}
    return load_recipe({
        "model": {"name_or_path": str(place), "init": "random"}, "tokenizer": {"name_or_path": "byte"},
        "data": {"train": "rows.jsonl", "max_length": 64}, "adapter": {"kind": adapter}, "train": train,
    }).recipe  # fmt: skip


# ---- faults ----


Instead = Callable[..., Any]
"""What is called in place of a function of the product's, which it is given first."""


@dataclass(frozen=True)
class Fault:
    """What is planted in a layout of a model, and what the cause that is named must match."""

    layout: str
    owner: Any
    name: str
    instead: Instead
    cause: str
    model: str = "llama"

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """For the length of the block, the fault is in the processes of layouts; alone, a process has the function."""
        own = getattr(self.owner, self.name)

        def chosen(*args: Any) -> Any:
            return self.instead(own, *args) if dist.is_initialized() else own(*args)

        with patch.object(self.owner, self.name, chosen):
            yield


def _nothing(own: Any, *given: Any) -> None:
    """Sums that are left out; of norms over a process's own heads, which keep the gradient of these heads alone."""


def _twice(own: Any, parameters: Any, *given: Any) -> None:
    some = list(parameters)
    own(some, *given)
    own(some, *given)


def _shifted_target(own: Any, batch: Any, at: Any, step_config: Any) -> Any:
    """On the second process, the first target of each micro-batch is the next one's."""
    found = own(batch, at, step_config)
    if dist.get_rank() == 1 and len(found.targets) > 1:
        found.targets[0] = found.targets[1]
    return found


_UPDATES = itertools.count(1)
"""Of the process of a layout."""


def _stale_replica(own: Any, optimizer: Any, *given: Any) -> None:
    """The second process leaves a norm out of the second update."""
    kept = next(one for name, one in optimizer._parameters.items() if name.endswith("layernorm.weight"))
    before = kept.detach().clone()
    own(optimizer, *given)
    if next(_UPDATES) == 2 and dist.get_rank() == 1:
        with torch.no_grad():
            kept.copy_(before)


def _held_by_fewer(own: Any, tensor: Any, mesh: Any) -> int:
    """What processes that compute a layer together all have counts once for each in the norm."""
    holders = int(own(tensor, mesh))
    return holders // mesh.tensor if holders % mesh.tensor == 0 else holders


def _target_shifted_at_a_cut(own: Any, layer: Any, of_positions: torch.Tensor) -> torch.Tensor:
    """The first position of a process's share of a row has the next one's target."""
    found: torch.Tensor = own(layer, of_positions)
    if dist.get_rank() == 0 or found.dtype != torch.int64 or len(found) < 2:
        return found
    return torch.cat([found[1:2], found[1:]])


def _expert_skipped(own: Any, layer: Any, weights: Any, rows: Any, experts: torch.Tensor, shares: torch.Tensor) -> Any:
    """The first expert of the second process gives nothing."""
    return own(layer, weights, rows, experts, shares * (experts != 0) if dist.get_rank() == 1 else shares)


_OUTPUT, _UPSTREAM = r"output of \S+: ", r"gradient of the output of \S+"
FAULTS: dict[str, Fault] = {
    "all-reduce dropped": Fault(
        "none2", step, "sum_whole_gradients", _nothing, r"gradient of \S+: .* apart on rank \d"
    ),
    "all-reduce doubled": Fault("none2", step, "sum_whole_gradients", _twice, r"gradient of \S+: .*, 2 times it"),
    "shards averaged": Fault(
        "fsdp2", FSDPModule, "set_gradient_divide_factor", lambda own, module, factor: own(module, 2 * factor),
        r"gradient of \S+: .*, 0.5 times it",
    ),
    "norm counted twice": Fault(
        "fsdp2", step, "squared_norm", lambda own, gradients, mesh: 2 * own(gradients, mesh),
        r"gradient norm of step 1: .*, 1.414 times it",
    ),
    "target shifted": Fault(
        "fsdp2", step, "on_device", _shifted_target, r"gradient of the output of \S+, where the output layer"
    ),
    "all-reduce dropped in a layer": Fault(
        "tp2", split, "entered", lambda own, given, group: given, _UPSTREAM
    ),
    "all-reduce doubled in a layer": Fault(
        "tp2", split, "summed", lambda own, part, group: own(part, group) + own(part.detach(), group), _OUTPUT
    ),
    "gradient of a norm over own heads": Fault(
        "tp2", split, "_sum_gradients", _nothing, r"gradient of \S+_norm.weight: ", "qwen3"
    ),
    "whole weights counted twice": Fault("tp2", fsdp, "holders", _held_by_fewer, r"gradient norm of step 1: "),
    "target shifted at a cut": Fault(
        "sp2", CutOutputLayer, "share", _target_shifted_at_a_cut, f"{_UPSTREAM}, where the output layer"
    ),
    "expert skipped": Fault(
        "ep2", SpreadExperts, "_computed", _expert_skipped, r"output of \S+experts: ", "qwen3-moe"
    ),
    "stale replica": Fault(
        "none2", OptimizerSet, "step", _stale_replica, r"rank 1 has another \S+layernorm.weight than rank 0"
    ),
}  # fmt: skip


def setting_of(recipe: Recipe, directory: Path, steps: int) -> Setting:
    """A proof of which one process has taken its steps."""
    (directory / "model").mkdir(parents=True)
    setting = Setting(make_twin(recipe, directory / "model"), steps, directory)
    train_alone(setting)
    return setting


def found_with(fault: Fault, setting: Setting) -> LayoutProof:
    """What is found of a layout that a fault is planted in."""
    layout = parse(fault.layout)
    known = refused(setting.twin, layout)
    if known is not None:
        return known
    with fault.planted():
        return next(proof for _, proof in proofs_of(setting, [layout]))


def problem(fault: Fault, proof: LayoutProof) -> str | None:
    """What is wrong with what was found of a fault; None where it is named."""
    if proof.verdict != "unequal":
        return f"the verdict is {proof.verdict}: {proof.cause}"
    return None if re.search(fault.cause, proof.cause or "") else f"it is named otherwise: {proof.cause}"


def faults(steps: int, place: Path) -> bool:
    """Plant each fault; prints what was said of it. Returns whether all were named."""
    settings: dict[str, Setting] = {}
    good = True
    for number, (name, fault) in enumerate(FAULTS.items()):
        if fault.model not in settings:
            recipe = recipe_of(fault.model, place / "configs")
            settings[fault.model] = setting_of(recipe, place / f"setting-{number}", steps)
        proof = found_with(fault, settings[fault.model])
        wrong = problem(fault, proof)
        good &= wrong is None
        print(
            f"{'NOT ' if wrong else ''}named  {name} in {fault.layout} of {fault.model}: {wrong or proof.cause}",
            flush=True,
        )
    return good


# ---- the matrix ----


def matrix(options: argparse.Namespace) -> bool:
    """Prove every layout of every model; prints a line for each and writes all as JSON. Whether none is wrong."""
    good, all_found = True, []
    for model, adapter, accumulate in product(options.models, options.adapters, options.accumulate):
        began = time.monotonic()
        recipe = recipe_of(model, options.out / "configs", adapter, accumulate)
        found = prove(recipe, options.steps, options.layouts, lambda line: None)
        about = {"model": model, "adapter": adapter, "accumulate": accumulate}
        all_found += [about | proof.as_json() for proof in found.proofs]
        good &= not found.wrong
        print(f"{model}, {adapter}, {accumulate} micro-batches, {time.monotonic() - began:.0f} s", flush=True)
        for proof in found.proofs:
            figures = " ".join(f"{name} {figure:.0e}" for name, figure in proof.figures.items())
            print(f"  {proof.layout:12} {proof.verdict:8} {proof.cause or figures}", flush=True)
        (options.out / "matrix.json").write_text(json.dumps(all_found, indent=1), encoding="utf-8")
    cells = len(all_found)
    counts = {v: sum(one["verdict"] == v for one in all_found) for v in ("equal", "unequal", "failed", "refused")}
    print(f"{cells} cells: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    return good


# ---- recipes that ship ----


OF_RECIPES = ("fsdp2", "tp2", "sp2", "fsdp2+tp2")
"""Layouts of each, besides its own."""


def of_shape(path: Path, directory: Path) -> Recipe:
    """A shipped recipe on the published config of its model, without weights."""
    recipe = load_recipe(path).recipe
    words = {}
    if recipe.model.name_or_path in SHAPES:
        words = {"model.name_or_path": str(whole_model(recipe.model.name_or_path, directory)), "model.init": "random"}
    return load_recipe(path, [Override(key, text) for key, text in words.items()]).recipe


def recipes(options: argparse.Namespace) -> bool:
    """Prove every shipped recipe under its own layout and others; prints a line for each. Whether none is wrong."""
    good = True
    for name, path in shipped_recipes().items():
        recipe = of_shape(path, options.out)
        own = own_layout(recipe.parallel)
        layouts = dict.fromkeys([*([] if own is None else [own.name]), *OF_RECIPES])
        found = prove(recipe, min(options.steps, 6), list(layouts), lambda line: None)
        good &= not found.wrong
        said = ", ".join(f"{proof.layout} {proof.verdict}" for proof in found.proofs)
        causes = "".join(f"\n  {proof.layout}: {proof.cause}" for proof in found.proofs if proof.cause)
        print(f"{name}: {said}{causes}", flush=True)
    return good


def main() -> int:
    """Plant the faults, then go through the recipes that ship and the matrix; or some of them."""
    options = asked(
        __doc__, faults=False, recipes=False, matrix=False, models=some(MODELS), adapters=some(("none", "lora")),
        accumulate={"nargs": "+", "type": int, "choices": (1, 2, 4), "default": [1, 4]}, layouts=list(KNOWN), steps=20,
        out=ROOT / ".demo" / "prove",
    )
    options.out.mkdir(parents=True, exist_ok=True)
    good, every = True, not (options.faults or options.recipes or options.matrix)
    if options.faults or every:
        with workplace() as place:
            good &= faults(min(options.steps, 4), place)
    if options.recipes or every:
        good &= recipes(options)
    if options.matrix or every:
        good &= matrix(options)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
