"""Models whose experts lie on several processes, and the same in one process."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.model.root import CausalLM
from tuner.model.trainable import TrainableSpec
from tuner.parallel.assemble import AssemblySpec, Recompute, assemble
from tuner.parallel.mesh import DeviceMeshes
from tuner.parallel.values import materialise

LENGTHS = ((9, 4), (3, 7, 2), (1, 5), (16,))
"""Of the documents of a row, which is another one on each process."""


def both(config: PretrainedConfig, directory: Path, recompute: Recompute = "none") -> tuple[CausalLM, CausalLM]:
    """The whole model, and the same with its experts spread over all processes. Collective."""
    size = torch.distributed.get_world_size()
    directory.mkdir(exist_ok=True)
    config.save_pretrained(directory)
    spec = AssemblySpec(TrainableSpec(drawn=True), seed=5, recompute=recompute)
    whole = assemble(spec, build_model(ModelSpec(str(directory), random_init=True), torch.float32, 1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(whole.named_parameters()):
            parameter.normal_(0, 0.2, generator=generator)
    meshes = DeviceMeshes(expert=init_device_mesh("cpu", (size,)))
    fill = lambda root: materialise(root, whole, torch.device("cpu"))  # noqa: E731 - who broadcasts is rank 0
    spread = assemble(spec, meta_model(whole.model.config, torch.float32), meshes=meshes, give_values=fill)
    return whole, spread


def taken(root: CausalLM, rank: int) -> torch.Tensor:
    """Forward and backward of one process's row; its loss."""
    root.train()
    lengths = LENGTHS[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, root.model.config.get_text_config().vocab_size, (sum(lengths),), generator=generator)
    places = torch.cat([torch.arange(length) for length in lengths])
    loss: torch.Tensor = root(ids, places, lengths, torch.arange(len(ids) - 1), ids[1:])
    loss.backward()
    return loss.detach()


def differences(whole: CausalLM, spread: CausalLM, rank: int) -> dict[str, float]:
    """How far this process's loss and all gradients are from those of the whole model, relative. Collective."""
    size = torch.distributed.get_world_size()
    losses = [taken(whole, number) for number in range(size)]
    found = {"loss": abs(float(taken(spread, rank) / losses[rank]) - 1)}
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in spread.named_parameters():
        gradient, expected = parameter.grad, wanted[name]
        assert (gradient is None) == (expected is None), name
        if gradient is None or expected is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        else:
            torch.distributed.all_reduce(gradient)
        found[name] = float((gradient - expected).norm() / expected.norm().clamp_min(1e-9))
    return found
