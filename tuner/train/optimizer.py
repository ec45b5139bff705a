"""One interface to every optimizer: peak rates times a factor, a device flag that skips, its state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tuner.config import optimizers as sections
from tuner.errors import RecipeError
from tuner.model.freeze import select
from tuner.parallel.mesh import mesh_on
from tuner.runtime.parts import local
from tuner.runtime.torch_private import divide_
from tuner.runtime.warned import pass_on
from tuner.train import moments

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from tuner.model.touched_rows import TouchedRows
    from tuner.parallel.layouts import Layouts
    from tuner.train.custom_optimizer import OwnOptimizer
    from tuner.train.host_adamw import HostAdamW
    from tuner.train.row_adamw import RowAdamW

Group = TypeVar("Group", sections.ParameterGroup, sections.RowOptimizer)
Grouped = Callable[[Iterable[str], float], list[dict[str, Any]]]
"""Makes groups of the parameters with these names, whose peak learning rate is this one unless they have another."""


class OptimizerSet:
    """One or several torch optimizers over named parameters; ours have all their state allocated.

    They hold each process's own part of a sharded parameter as a plain tensor: the update of an element needs no other,
    and plain tensors are dispatched many times faster than DTensors.
    """

    takes_flag: bool
    """Whether the optimizers leave a step out by themselves, as torch's fused ones do."""
    peak_lr: float
    """The learning rate of the main group at a factor of 1."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], held: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer | OwnOptimizer], takes_flag: bool, peak_lr: float,
        on_host: HostAdamW | None = None, of_rows: RowAdamW | None = None,
    ) -> None:
        self._parameters, self._held = dict(parameters), dict(held)
        self._optimizers = tuple(optimizers)
        self.takes_flag, self.peak_lr, self._on_host, self._of_rows = takes_flag, peak_lr, on_host, of_rows
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["peak_lr"] = float(group["lr"])

    def set_factor(self, factor: float) -> None:
        """Set the learning rate of each group to its peak times ``factor``."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

    def step(self, bad: torch.Tensor | None = None, divisor: torch.Tensor | None = None) -> None:
        """Update the parameters from their gradients divided by ``divisor``, unless ``bad``.

        Both are scalars, moved to the host where weights lie there. Where ``bad`` is true, parameters, moments and step
        counts stay as they are; the host reads it only if not ``takes_flag``, or where it computes the update.
        """
        if not self.takes_flag and bad is not None and bool(bad):
            return
        self._see_parts()
        place = min((held.device for held in self._held.values()), key=lambda device: device.type != "cpu")
        bad, divisor = (None if one is None else one.to(place).float() for one in (bad, divisor))
        for optimizer in self._optimizers:
            if self.takes_flag or optimizer is self._of_rows:
                # The names that torch's GradScaler gives to what it hands over.
                optimizer.found_inf = bad  # type: ignore[union-attr]
                optimizer.grad_scale = divisor  # type: ignore[union-attr]
            elif divisor is not None:
                grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                divide_(grads, divisor)
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._held[name].grad = None
        if self._of_rows is not None:
            self._of_rows.drop()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Every moment by ``optimizer/<moment>/<parameter>``, sharded as its parameter is."""
        found = {}
        for name, held in self._held.items():
            for optimizer in self._optimizers:
                for moment, tensor in optimizer.state.get(held, {}).items():
                    if moment != "step":
                        found[f"optimizer/{moment}/{name}"] = _as_sharded(moment, tensor, self._parameters[name])
        return found

    def host_names(self) -> frozenset[str]:
        """Names of the state tensors that the recipe has in the host's memory, whatever the device is."""
        return frozenset() if self._on_host is None else frozenset(self.state_tensors())

    def local_tensors(self) -> list[torch.Tensor]:
        """This process's part of all state, step counts included, and the buffers of an optimizer on the host."""
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        found = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return found if self._on_host is None else [*found, *self._on_host.buffers]

    def allocate(self) -> None:
        """Have all state there, with any values, so that a checkpoint can be loaded into it.

        What is missing, as an optimizer of the user's own allocates it in its first step, comes of a step at a learning
        rate of 0. Weights, state and step counts are to be loaded after it.
        """
        states = [(optimizer.state, optimizer.param_groups) for optimizer in self._optimizers]
        if all(state.get(p) for state, groups in states for group in groups for p in group["params"]):
            return
        self.set_factor(0.0)
        self._see_parts()
        for held in self._held.values():
            held.grad = torch.zeros_like(held)
        for optimizer in self._optimizers:
            optimizer.step()
        self.zero_grad()

    def set_step_count(self, steps: int) -> None:
        """Say how many updates the loaded moments have seen: steps taken, less those left out."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if isinstance(count := state.get("step"), torch.Tensor):
                    count.fill_(float(steps))
                elif count is not None:
                    state["step"] = steps

    def _see_parts(self) -> None:
        """Let the held tensors be this process's parts as they are now: FSDP may move them at its first forward."""
        for name, parameter in self._parameters.items():
            held = self._held[name]
            if held is not parameter:
                held.data = local(parameter.data)
                held.grad = None if parameter.grad is None else local(parameter.grad)


def build_optimizer(
    section: sections.Optimizer, parameters: Mapping[str, nn.Parameter], outer: Set[str] = frozenset(),
    embeddings: Set[str] = frozenset(), seed: int = 0, touched: Mapping[str, TouchedRows] = MappingProxyType({}),
) -> OptimizerSet:
    """The optimizer of a resolved recipe over the parameters that are trained.

    ``outer`` names those of embeddings and of the output layer, which Muon leaves to AdamW; ``embeddings`` those whose
    state is float32 whatever others have. ``seed`` is of what an optimizer draws. ``touched`` are those
    that are updated row by row. Raises RecipeError where the section does not fit the parameters.
    """
    held = {name: _held(parameter) for name, parameter in parameters.items()}
    lr, own = float(section.lr), chosen_groups(parameters, section.groups)

    def groups(names: Iterable[str], lr: float) -> list[dict[str, Any]]:
        found = group_parameters({name: parameters[name] for name in names}, lr, section.weight_decay, own)
        return [{"params": [held[name] for name in group["names"]], **group} for group in found]

    rest = {name: parameter for name, parameter in parameters.items() if name not in touched}
    if rest and isinstance(section, sections.AdamwOptimizer) and section.offload == "host":
        from tuner.train.host_adamw import HostAdamW

        on_host = HostAdamW(groups(rest, lr), section.betas, section.eps)
        if on_host.problem is not None:
            pass_on(on_host.problem)
        return OptimizerSet(parameters, held, [on_host], takes_flag=True, peak_lr=lr, on_host=on_host)
    built = _Built(section, parameters, held, groups, outer, embeddings, seed)
    optimizers = built.of_kind(rest) if rest else []
    if (of_rows := built.row_adamw(touched) if touched else None) is not None:
        optimizers.append(of_rows)
    takes_flag = not isinstance(section, sections.CustomOptimizer)
    return OptimizerSet(parameters, held, optimizers, takes_flag, peak_lr=lr, of_rows=of_rows)


@dataclass(frozen=True)
class _Built:
    """What optimizers are built of: all parameters, how they fall into groups, and what is known of them."""

    section: sections.Optimizer
    parameters: Mapping[str, nn.Parameter]
    held: Mapping[str, nn.Parameter]
    groups: Grouped
    outer: Set[str]
    embeddings: Set[str]
    seed: int

    def of_kind(self, names: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer | OwnOptimizer]:
        """The optimizers that the section's kind means, each of some of these parameters."""
        groups, lr = self.groups, float(self.section.lr)
        match self.section:
            case sections.AdamwOptimizer() as section:
                return self._adamw_and_compact(section, names)
            case sections.SgdOptimizer() as section:
                return [_sgd(groups(names, lr), section.momentum, section.nesterov)]
            case sections.AdafactorOptimizer() | sections.MuonOptimizer() as section:
                from tuner.train import sharded

                if isinstance(section, sections.AdafactorOptimizer):
                    return [sharded.ShardedAdafactor(groups(names, lr), self._layouts(), section)]
                hidden = hidden_matrices(names, self.outer)
                muon = sharded.ShardedMuon(groups(hidden, lr), self._layouts(), section)
                others = [name for name in names if name not in set(hidden)]
                adamw_lr = float(section.adamw_lr)
                return [muon, _adamw(groups(others, adamw_lr), section.betas, section.eps)] if others else [muon]
            case sections.CustomOptimizer() as section:
                from tuner.train.custom_optimizer import build_own_optimizer

                return [build_own_optimizer(section, groups(names, lr), self._layouts())]

    def row_adamw(self, touched: Mapping[str, TouchedRows]) -> RowAdamW:
        """The AdamW of the rows of embeddings with these names."""
        from tuner.train.row_adamw import row_adamw

        section = self.section
        held: dict[torch.Tensor, TouchedRows] = {self.held[name]: one for name, one in touched.items()}
        lr = float(section.adamw_lr if isinstance(section, sections.MuonOptimizer) else section.lr)
        own = chosen_groups(touched, section.rows, "optimizer.rows")
        return row_adamw(section, self.groups(touched, lr), own, held)

    def _layouts(self) -> Layouts:
        """How each parameter lies over processes, by what this one holds of it."""
        from tuner.parallel.layouts import layouts_of  # an update of single elements needs none

        layouts = layouts_of(self.parameters.values())
        return dict(zip((self.held[name] for name in self.parameters), layouts, strict=True))

    def _adamw_and_compact(
        self, section: sections.AdamwOptimizer, parameters: Mapping[str, nn.Parameter]
    ) -> list[torch.optim.Optimizer | OwnOptimizer]:
        """AdamW of these parameters: torch's own, and ours of those in 8 bits, or rounded stochastically."""
        found: list[torch.optim.Optimizer | OwnOptimizer] = []
        lr, by_chance = float(section.lr), section.rounding == "stochastic"
        in_8_bits = coded_matrices(parameters, self.embeddings) if section.state == "8bit" else []
        compact = [n for n, p in parameters.items() if n in set(in_8_bits) or (by_chance and p.dtype == torch.bfloat16)]
        if compact:
            from tuner.train.compact_adamw import CompactAdamW

            codes = {parameter for group in self.groups(in_8_bits, lr) for parameter in group["params"]}
            found.append(CompactAdamW(self.groups(compact, lr), self._layouts(), codes, section, self.seed))
        if others := [name for name in parameters if name not in set(compact)]:
            found.append(_adamw(self.groups(others, lr), section.betas, section.eps))
        return found


def hidden_matrices(parameters: Mapping[str, nn.Parameter], outer: Set[str]) -> list[str]:
    """Names of the matrices that Muon updates: all but those of the ends of the network. RecipeError for none."""
    hidden = [n for n, p in parameters.items() if n not in outer and p.ndim == 2 and is_matrix(n, p)]
    if not hidden:
        raise RecipeError("optimizer.kind: muon has no hidden matrix to train", hint="write kind: adamw")
    return hidden


def coded_matrices(parameters: Mapping[str, nn.Parameter], embeddings: Set[str]) -> list[str]:
    """Names of the matrices whose moments have 8 bits, by their whole shapes. Raises RecipeError where none has.

    Embeddings keep float32: their rows see gradients of very different sizes, and some for many steps none, where
    Dettmers et al. 2022 (section 2.3) found training to become unstable.
    """
    found = [
        name for name, parameter in parameters.items() if is_matrix(name, parameter) and name not in embeddings
        and parameter.numel() >= moments.LEAST_NUMBERS and moments.rows_of(parameter.shape)[1] >= moments.LEAST_WIDTH
    ]
    if not found:
        raise RecipeError(
            f"optimizer.state: 8bit: no matrix of {moments.LEAST_NUMBERS:,} numbers or more is trained besides "
            "embeddings",
            hint="write state: fp32",
        )
    return found


def chosen_groups(names: Iterable[str], groups: Sequence[Group], of: str = "optimizer.groups") -> dict[str, Group]:
    """The group of each parameter that has one: the first that means it. Raises RecipeError for a group without any."""
    known, found = list(names), dict[str, Group]()
    for number, group in enumerate(groups):
        key = f"{of}.{number}"
        if not (fresh := [name for name in select(group.match, known, f"{key}.match") if name not in found]):
            raise RecipeError(f"{key}: earlier groups have all that it means", hint="put the narrower group first")
        found |= dict.fromkeys(fresh, group)
    return found


def group_parameters(
    parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float, own: Mapping[str, sections.ParameterGroup]
) -> list[dict[str, Any]]:
    """The ``names`` of parameters that share a peak ``lr`` and a ``weight_decay``, ``own`` ones before the common ones.

    Decay applies to matrices alone.
    """
    found: dict[tuple[float, float], list[str]] = {}
    for name, parameter in parameters.items():
        group = own.get(name)
        peak = lr if group is None or group.lr is None else group.lr
        decay = weight_decay if group is None or group.weight_decay is None else group.weight_decay
        found.setdefault((peak, decay if is_matrix(name, parameter) else 0.0), []).append(name)
    return [{"names": tuple(names), "lr": peak, "weight_decay": decay} for (peak, decay), names in found.items()]


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is one or several matrices: not one-dimensional, and neither of a norm nor a bias."""
    module = name.rpartition(".")[0].rpartition(".")[2].lower()
    of_norm = "norm" in module or module == "ln" or module.startswith("ln_")
    return parameter.ndim >= 2 and not of_norm and not name.endswith("bias")


def _adamw(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019)."""
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments.zero_averages(parameter)}
    return optimizer


def _sgd(groups: list[dict[str, Any]], momentum: float, nesterov: bool) -> torch.optim.SGD:
    """Fused gradient descent; a buffer of zeros takes the first gradient whole, as torch's own first step does."""
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=nesterov, fused=True)
    if momentum:
        for parameter in (parameter for group in groups for parameter in group["params"]):
            optimizer.state[parameter] = {"momentum_buffer": moments.zeros_like(parameter)}
    return optimizer


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """What the torch optimizer holds: the parameter, or a plain one over this process's part of it."""
    return nn.Parameter(local(parameter.data)) if isinstance(parameter, DTensor) else parameter


def _as_sharded(moment: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A moment of this process's part of a parameter as a tensor that lies over the processes as the parameter does."""
    if not isinstance(like, DTensor):
        return tensor
    part = local(like)
    every = tuple(range(like.ndim))
    shape, dims = like.shape, every
    if moment == "row_updates":
        shape, dims = like.shape[:1], every[:1]
    elif moment.endswith("_scales"):
        shape, dims = moments.scales_shape(like.shape), every[:2]
    elif moment in {"exp_avg_sq_row", "exp_avg_sq_col"}:
        dims = tuple(dim for dim in every if dim != like.ndim - (1 if moment == "exp_avg_sq_row" else 2))
        shape = torch.Size(like.shape[dim] for dim in dims)
    elif tensor.shape != part.shape:  # of an optimizer that has the parameter whole
        shape, dims = tensor.shape, ()
    mesh = mesh_on(tensor.device.type, like.device_mesh)
    placements = [_of_dims(placement, dims) for placement in like.placements]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=strides)


def _of_dims(placement: Any, dims: tuple[int, ...]) -> Placement:
    """How an axis splits what has these dimensions of a parameter that it splits so."""
    if placement.is_replicate() or placement.dim not in dims:
        return Replicate()
    dim, parts = dims.index(placement.dim), getattr(placement, "split_factor", None)
    if dim == placement.dim:
        return cast("Placement", placement)
    return cast("Placement", type(placement)(dim) if parts is None else type(placement)(dim, split_factor=parts))
