"""Whether the proof at the start, which runs a few decoder layers, comes to the verdict of one that runs all of them.

    python -m tools.proof_campaign [--only TYPE ...] [--layers 8] [--faults] [--out FILE]

Every causal type of transformers is built with so many layers at least, in full and with LoRA, and proven both ways on
the route it ends on and on those before. With ``--faults`` instead, faults are planted in layers of several families:
in masks, rotations, states, routers and all else that a layer computes by, in all layers, in the last, in one among
many. A fault of structure must be refused both ways; one in the values of a single layer may pass the short proof, and
is named. Prints a line for each and exits with 1 where a verdict differs, or where more than half of the layers ran.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from tools.causal_cases import DECODERS, TYPES, VOCAB, decoder_config, quiet, tiny_config, write_random
from tools.commands import asked, one_line, verdicts, workplace
from tools.proof_faults import FAULTS, Fault
from tuner.errors import RecipeError
from tuner.model import probe
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model
from tuner.model.few_layers import FewLayers
from tuner.model.root import CausalLM
from tuner.model.row_layout import route_of

COUNTS = (
    "num_layers_per_stack", "num_hidden_layers", "num_blocks", "n_layer", "n_layers", "num_layers", "decoder_layers",
)  # fmt: skip
NUMBERS_OF_LAYERS = ("hybrid_layer_ids", "attn_layer_indices", "mlp_only_layers", "moe_layers")
NOT_OF_LAYERS = ("architectures", "time_step_limit", "mlp_multipliers", "ssm_multipliers", *NUMBERS_OF_LAYERS)
"""Lists in configs that have nothing to do with layers."""
LONGEST = 24


@quiet()
def main() -> int:
    """Prove every type, or every fault, and print what each came to."""
    given = asked(__doc__, only=[*TYPES, *(f"{name}+decoder" for name in DECODERS)], layers=8, faults=False, out=Path)
    torch.set_num_threads(1)
    return verdicts(faults(given.layers) if given.faults else types(given.only, given.layers), given.out)


def types(names: list[str], layers: int) -> Iterator[tuple[str, str]]:
    """Each type, with what its two proofs said, in full and adapted."""
    for name in names:
        with workplace() as directory:
            try:
                config = deep_config(name, layers)
                write_random(config, directory)
            except Exception as error:  # noqa: BLE001 - whatever a class raises
                yield name, f"not made: {one_line(error)}"
                continue
            for adapter in (False, True):
                try:
                    yield f"{name}{' lora' if adapter else ''}", both(lambda: made(directory, adapter))  # noqa: B023
                except RecipeError as error:
                    yield f"{name}{' lora' if adapter else ''}", f"not built: {error}"


def faults(layers: int) -> Iterator[tuple[str, str]]:
    """Each planted fault, with what the two proofs said of it."""
    for fault in FAULTS:
        with workplace() as directory:
            write_random(deep_config(fault.model_type, layers), directory)
            yield fault.name, _of_fault(fault, directory)


def _of_fault(fault: Fault, directory: Path) -> str:
    def planted() -> CausalLM:
        root = made(directory, fault.adapter)
        fault.plant(root)
        return root

    with fault.around():
        every, few = verdict(planted(), True)[0], verdict(planted(), False)[0]
    if every == "passes":
        return "differs: the whole proof does not find it"
    if few == "passes" and fault.of_values:
        return f"values: left to `tuner prove --weights` ({every[:60]})"
    if few == "passes":
        return f"differs: missed; {every}"
    return f"refused: {few[:90]}"


def made(directory: Path, adapter: bool) -> CausalLM:
    """The model as training builds it. Raises RecipeError."""
    model = build_model(ModelSpec(str(directory)), torch.float32, 0)
    if adapter:
        torch.manual_seed(2)
        add_lora(model, LoraSpec(4, 8, 0.0, "all-linear"), seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    root = CausalLM(model.eval())
    root.layout.set_route(route_of(model)[0])
    return root


def both(build: Callable[[], CausalLM]) -> str:
    """``equal``, with the verdicts by route and how many layers ran, or ``differs``. Raises RecipeError."""
    said = []
    for route in ("flat", "batch", "calls"):
        root = build()
        if ("flat", "batch", "calls").index(root.layout.route) > ("flat", "batch", "calls").index(route):
            continue
        root.layout.set_route(route)
        every, _ = verdict(root, True)
        root = build()
        root.layout.set_route(route)
        few, ran = verdict(root, False)
        if few != every:
            return f"differs: on {route}, all layers: {every}; few: {few}"
        said.append(f"{route}: {few[:70]} ({ran})")
        if few == "passes":
            return f"passes: {'; '.join(said)}"
    return f"refused: {'; '.join(said)}"


def verdict(root: CausalLM, every_layer: bool) -> tuple[str, str]:
    """What a proof says of a model, and how many of its layers ran: all of them, where few did not do."""
    before = {name: parameter.detach().clone() for name, parameter in root.model.named_parameters()}
    with _noted() as runs:
        try:
            probe.require_isolation(root, VOCAB, longest=LONGEST, every_layer=every_layer)
            said = "passes"
        except RecipeError as error:
            said = error.message
    if changed := [name for name, parameter in root.model.named_parameters() if not parameter.equal(before[name])]:
        said = f"changes {changed[0]}"
    return said, runs[-1] if runs else "-"


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Within, how many layers each forward of a proof had."""
    runs: list[str] = []
    kept: Any = probe._isolation

    def isolation(root: Any, plain: Any, few: FewLayers | None, *rest: Any) -> Any:
        runs.append("all" if few is None else f"{len(few.chosen)} of {few.total}")
        return kept(root, plain, few, *rest)

    probe._isolation = isolation
    try:
        yield runs
    finally:
        probe._isolation = kept


def deep_config(name: str, layers: int) -> PretrainedConfig:
    """The tiny config of a type with so many layers or more: its pattern of layers several times over."""
    model_type, _, decoder = name.partition("+")
    config = decoder_config(model_type) if decoder else tiny_config(model_type)
    return _deepened(config, layers)


def _deepened(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    values = config.to_dict()
    count = next((values[key] for key in COUNTS if isinstance(values.get(key), int)), None)
    count = len(values["layers_block_type"]) if "layers_block_type" in values else count
    for key in config.sub_configs:
        if isinstance(getattr(config, key, None), PretrainedConfig):
            values[key] = _deepened(getattr(config, key), layers).to_dict()
    if count:
        times = math.ceil(layers / count)
        values |= {key: values[key] * times for key in COUNTS if isinstance(values.get(key), int)}
        lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 1}
        values |= {key: value * times for key, value in lists.items() if key not in NOT_OF_LAYERS}
        for key in NUMBERS_OF_LAYERS:
            if isinstance(values.get(key), list):
                values[key] = [number + turn * count for turn in range(times) for number in values[key]]
        if isinstance(values.get("attention_types"), list):
            values["attention_types"] = [[kinds, repeats * times] for kinds, repeats in values["attention_types"]]
    values.pop("architectures", None)
    return type(config).from_dict({key: value for key, value in values.items() if key != "model_type"})


if __name__ == "__main__":
    raise SystemExit(main())
