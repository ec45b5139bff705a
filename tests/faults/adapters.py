"""Adapters made to do harm, and pickles under every name by which some library would open one."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.artifacts import GENERATE, TRAIN, Artifact, Place, bomb, byte_tokenizer, overwrite, torch_bomb
from tests.fixtures.tables import cases

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _adapter(place: Place, **config: Any) -> Path:
    """An adapter on the base model that loads, but for what `config` says."""
    import torch
    from safetensors.torch import save_file

    adapter = place.inputs / "adapter"
    adapter.mkdir()
    byte_tokenizer(adapter)
    byte_tokenizer(place.model)
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file({f"{layer}A.weight": torch.zeros(2, 16), f"{layer}B.weight": torch.zeros(16, 2)}, adapter / WEIGHTS)
    plain = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
        "base_model_name_or_path": str(place.model),
    }  # fmt: skip
    (adapter / CONFIG).write_text(json.dumps({**plain, **config}))
    return adapter


LOADED = ("generate", "{inputs}/adapter", "--prompt", "a", "--max-new-tokens", "2")


def _begun(place: Place, plant: Callable[[Place], object]) -> None:
    """The adapter is what the model begins with."""
    plant(place)
    place.replace("model: {", f"model: {{init_from: [{place.inputs / 'adapter'}], ")


CONFIGS: dict[str, tuple[dict[str, Any], bool | None]] = {
    name: (row["config"], row.get("refused"))
    for name, row in cases(__file__, "configs").items()
} | {
    "layers without end": ({"layer_replication": [[0, 1]] * 10**5}, True),
    "tokens to train without end": ({"trainable_token_indices": list(range(10**6))}, None),
    "modules to save of all": ({"modules_to_save": ["", "a" * 10**6]}, None),
}
"""What an adapter's config says, and whether it must be refused."""


def _bare(place: Place, name: str) -> None:
    """An adapter whose weights are a pickle of this name."""
    adapter = _adapter(place)
    (adapter / WEIGHTS).unlink()
    (adapter / name).write_bytes(bomb(place))


def _configured(place: Place, data: bytes) -> None:
    overwrite(_adapter(place) / CONFIG, data)


def _elsewhere(place: Place, name: str, target: str, of_adapter: bool = False) -> None:
    """A file of a model, or of an adapter, is a link to a device, a pipe, 600 MB of blanks or nothing."""
    path = (_adapter(place) if of_adapter else place.model) / name
    byte_tokenizer(place.model)
    place.outside.mkdir()
    if target == "fifo":
        os.mkfifo(place.outside / target)
    if target == "large":
        (place.outside / target).write_bytes(b" " * 600_000_000 + b"{}")
    path.unlink(missing_ok=True)
    path.symlink_to(target if target.startswith("/") else place.outside / target)


def adapters() -> Iterator[Artifact]:
    """Configs, weights and links of adapters: loaded by `generate`, and given to a model before it trains."""
    for words, (config, refused) in CONFIGS.items():
        plant, named = partial(_adapter, **config), "adapter" if refused else ""
        yield Artifact(f"adapter with {words}, generate", plant, LOADED, named, refused)
        begun = partial(_begun, plant=plant)
        yield Artifact(f"adapter with {words}, init_from", begun, TRAIN, named, refused and None)
    for name in ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"):
        bare = partial(_bare, name=name)
        yield Artifact(f"adapter of {name} alone, generate", bare, LOADED, WEIGHTS)
        yield Artifact(f"adapter of {name} alone, init_from", partial(_begun, plant=bare), TRAIN, WEIGHTS)
    for data in (b"\x80\x04.", b'{"a":' * 10**5 + b"1" + b"}" * 10**5, b" " * 300_000_000 + b"{}", b"[]"):
        yield Artifact(f"adapter_config.json of {data[:4]!r}", partial(_configured, data=data), LOADED, CONFIG)
    for name in (WEIGHTS, CONFIG):
        for target in ("/dev/zero", "fifo", "nothing"):
            link = partial(_elsewhere, name=name, target=target, of_adapter=True)
            yield Artifact(f"{name} of an adapter as a link to {target}", link, LOADED, "adapter")


PICKLES: Any = cases(__file__, "pickles")
"""Names of files of weights and of what lies next to them."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "tf_model.h5.index.json")
BESIDE: Any = cases(__file__, "next_to_weights")


def _only(place: Place, name: str) -> None:
    (place.model / "model.safetensors").unlink()
    torch_bomb(place.model / name, place)


def _indexed(place: Place, index: str, file: str) -> None:
    """The weights are named by an index, and are a pickle."""
    from tuner.runtime.safetensors_header import read_header

    names = [*read_header(place.model / "model.safetensors")[0]]
    (place.model / "model.safetensors").unlink()
    (place.model / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))
    torch_bomb(place.model / Path(file).name, place)


def _beside(place: Place, name: str) -> None:
    byte_tokenizer(place.model)
    overwrite(place.model / name, bomb(place))


OF_MODEL = (*GENERATE, "--max-new-tokens", "2")


def pickles() -> Iterator[Artifact]:
    """A base model whose weights, index or other files are pickles."""
    for name in PICKLES:
        yield Artifact(f"only {name}, a pickle", partial(_only, name=name), TRAIN, "safetensors")
    for index in INDEXES:
        for file in ("pytorch_model.bin", "x.safetensors"):
            plant = partial(_indexed, index=index, file=file)
            yield Artifact(f"{index} to {file}, a pickle", plant, TRAIN, "safetensors")
    for name in BESIDE:
        yield Artifact(f"{name}, a pickle, generate", partial(_beside, name=name), OF_MODEL, "", refused=None)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        for target in ("/dev/zero", "fifo", "large"):
            link = partial(_elsewhere, name=name, target=target)
            yield Artifact(f"{name} of a model as a link to {target}", link, OF_MODEL, "", refused=None)
