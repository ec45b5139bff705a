"""The loss at the output layer, the copy of a save in page-locked memory, and the optimizers: against plain torch."""

import time
from typing import Any

import torch
from torch import nn

from tools.gpu_day.record import Day, off
from tuner.checkpoint.staging import Staging
from tuner.config.optimizers import AdafactorOptimizer, AdamwOptimizer, MuonOptimizer, SgdOptimizer
from tuner.model.kernels import KERNELS
from tuner.model.output_layer import OutputLayer
from tuner.train.optimizer import build_optimizer

VOCABULARIES = (1000, 50257, 151936, 151937)
"""Of GPT-2's and a grown one no multiple of 8."""
OPTIMIZERS = (
    AdamwOptimizer(lr=1e-2),
    SgdOptimizer(lr=1e-2),
    AdafactorOptimizer(lr=1e-2),
    MuonOptimizer(lr=1e-2, adamw_lr=1e-2),
)
SHAPES = {"self_attn.q_proj.weight": (64, 32), "mlp.up_proj.weight": (32, 96), "input_layernorm.weight": (50,)}
LOSS_ALLOWED, GRADIENT_ALLOWED = 1e-3, 2e-2
"""In bf16, of float64's."""
MOVED_ALLOWED = 3e-3
"""Of the optimizer's steps on the CPU; Muon orthogonalizes in bf16."""


def kernels_of(day: Day) -> list[str]:
    """Kernels of the loss that run on this device."""
    return [name for name in KERNELS if name == "torch" or (name == "liger") == day.on_gpu]


def loss_of(day: Day, vocabulary: int, kernel: str, frozen: bool) -> dict[str, Any]:
    """Loss and gradients in bf16 against float64."""
    rows, width = (40, 16) if day.small else (1500, 256)
    generator = torch.Generator(day.device).manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, device=day.device)
    weight = torch.randn(vocabulary, width, generator=generator, device=day.device) * 0.05
    targets = torch.randint(0, vocabulary, (rows,), generator=generator, device=day.device)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    wanted = nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    gradients = torch.autograd.grad(wanted, exact)
    hidden.requires_grad_()
    weight = weight.to(torch.bfloat16) if frozen else weight.requires_grad_()
    with day.autocast():
        loss = OutputLayer(weight, None, kernel=KERNELS[kernel]).cross_entropy(hidden, targets)
    found = torch.autograd.grad(loss, [hidden] if frozen else [hidden, weight])
    apart = float((loss.detach() - wanted.detach()).abs() / wanted.detach())
    errors = [off(a, b) for a, b in zip(found, gradients, strict=False)]
    ok = apart < LOSS_ALLOWED and max(errors) < GRADIENT_ALLOWED
    return {"ok": ok, "loss off": f"{apart:.1e}", "gradients off": [f"{error:.1e}" for error in errors]}


def steps_of(section: Any, device: str) -> torch.Tensor:
    """All parameters after three steps with drawn gradients, of which the second is left out."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    parameters = {f"model.layers.0.{name}": nn.Parameter(drawn(shape)) for name, shape in SHAPES.items()}
    start = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
    optimizer = build_optimizer(section, parameters)
    for step in range(3):
        for parameter in parameters.values():
            parameter.grad = drawn(tuple(parameter.shape))
        optimizer.set_factor(1.0)
        optimizer.step(torch.tensor(step == 1, device=device), torch.tensor(2.0, device=device))
        optimizer.zero_grad()
    return torch.cat([(p.detach().cpu() - start[name]).flatten() for name, p in parameters.items()])


def optimizers_agree(day: Day) -> dict[str, Any]:
    """How far each optimizer's moves are from its moves on the CPU."""
    apart = {section.kind: off(steps_of(section, day.device), steps_of(section, "cpu")) for section in OPTIMIZERS}
    allowed = {kind: 3e-2 if kind == "muon" else MOVED_ALLOWED for kind in apart}
    ok = all(error < allowed[kind] for kind, error in apart.items())
    return {"ok": ok, **{kind: f"{error:.1e}" for kind, error in apart.items()}}


def staged(day: Day) -> dict[str, Any]:
    """A state is copied beside the work that follows, is equal, and may be changed on the device after its event."""
    elements = 1 << 12 if day.small else 1 << 28
    tensors = {f"t{number}": torch.randn(elements // 4 + number, device=day.device) for number in range(4)}
    staging = Staging()
    began = time.perf_counter()
    staging.reserve(tensors)
    reserved = time.perf_counter() - began
    day.wait()
    began = time.perf_counter()
    copy = staging.stage(tensors)
    queued = time.perf_counter() - began
    copy.wait()
    copied = time.perf_counter() - began
    same = all(torch.equal(copy.tensors[name], tensor.cpu()) for name, tensor in tensors.items())
    again = staging.stage(tensors)
    if again.copied is not None:
        torch.cuda.current_stream().wait_event(again.copied)
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    again.wait()
    fenced = all(torch.equal(again.tensors[name], tensor) for name, tensor in before.items())
    size = staging.nbytes / 1e9
    staging.release()
    return {
        "ok": same and fenced, "reserve GB/s": round(size / reserved, 2), "copy GB/s": round(size / copied, 2),
        "queued ms": round(queued * 1e3, 2),
    }  # fmt: skip


def correctness(day: Day) -> None:
    """Loss, optimizers, staging."""
    for vocabulary in (30, 37) if day.small else VOCABULARIES:
        for kernel in kernels_of(day):
            for frozen in (False, True):
                head = "frozen bf16" if frozen else "trained"
                what = f"loss by {kernel}, vocabulary of {vocabulary:,}, {head} head"
                day.check(what, lambda given=(vocabulary, kernel, frozen): loss_of(day, *given))
    day.check("optimizers take the CPU's steps", lambda: optimizers_agree(day))
    day.check("a copy of the state in page-locked memory", lambda: staged(day))
