"""The losses of routers over the global batch of a step, and over held-out documents."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from tuner.data.batches import Batch
from tuner.model.router_loss import RouterLoss, RoutingSums
from tuner.parallel.mesh import Mesh
from tuner.train.methods.method import Counts, Sum, Terms
from tuner.train.step_parts import StepForwards, StepPart

TERM, BALANCE, Z_TERM = "router_aux", "router_balance", "router_z"
_PER = "steps"


class Routing(StepPart):
    """How often each expert was chosen by the documents of a step, of all micro-batches and all processes.

    A micro-batch's part of the loss needs it: :meth:`note` each forward, then :meth:`agree`, then :meth:`with_loss`.
    With a ``balance`` by ``micro_batch`` each process takes its own counts of each, and the loss is the mean over all:
    no forward comes before, and experts are asked to be evenly busy in each part of a step, as other trainers ask.
    """

    def __init__(self, router: RouterLoss, mesh: Mesh, balance: str = "step") -> None:
        self._router, self._mesh, self._is_global = router, mesh, balance == "step"
        self._chosen: torch.Tensor | None = None
        self._is_agreed = False
        self._parts = 1
        """How many values of the loss a step has; it is their mean."""
        self._tokens = 1
        """Of the global batch."""

    def counts(self, counts: Counts) -> Counts:
        """With the one step that the router's loss is divided by."""
        return {**counts, _PER: 1.0}

    @torch.no_grad()
    def before_forward(self, step: StepForwards) -> None:
        """Of several micro-batches, have the routers choose for all of them first, in a forward of each with the same
        dropout as the one that is trained. Collective."""
        self._chosen, self._is_agreed, self._parts, self._tokens = None, False, 1, step.batches.tokens
        if not self._router.weight:
            return  # a z-loss is a mean over tokens: nothing has to be known of the others
        if not self._is_global:
            self._parts = len(step.batches.micro) * self._mesh.size // self._mesh.tensor
        elif len(step.batches.micro) > 1:
            for number, batch in enumerate(step.batches.micro):
                step.forward(number)
                self.note(batch)
            self.agree()

    def terms(self, batch: Batch, terms: Terms) -> Terms:
        """With the micro-batch's part of the router's loss. Collective where it is the only one, and asked globally."""
        if not self._is_global or not self._router.weight:
            self._chosen = _counting(self._router, batch).chosen
        elif not self._is_agreed:
            self.note(batch)
            self.agree()
        return self.with_loss(terms, batch)

    def note(self, batch: Batch) -> None:
        """Count the forward that the model has just done; documents of a filler do not count."""
        chosen = _counting(self._router, batch).chosen
        self._chosen = chosen if self._chosen is None else self._chosen + chosen

    def agree(self) -> None:
        """Add the counts of all processes. Collective."""
        assert self._chosen is not None, "a step has at least one micro-batch"
        if dist.is_initialized():
            dist.all_reduce(self._chosen)
            self._chosen /= self._mesh.tensor
        self._is_agreed = True

    def with_loss(self, terms: Terms, batch: Batch) -> Terms:
        """The micro-batch's terms with its part of the routers' losses, from the forward that gave them; that which
        keeps experts busy as a figure, too, without its weight and over k: 1 where they are evenly busy."""
        assert self._chosen is not None, "the step was counted"
        router, sums = self._router, _counting(self._router, batch)
        losses, figures = dict(terms.losses), dict(terms.figures)
        if router.weight:
            value = router.value(self._chosen, sums.probability) / self._parts
            losses[TERM] = Sum(router.weight * value, _PER)
            figures[BALANCE] = Sum(value.detach() / router.per_token, _PER)
        if router.z_weight:
            losses[Z_TERM] = Sum(router.z_weight * sums.squares / (self._tokens * router.layers), _PER)
        return Terms(losses, figures)


class HeldOutRouting:
    """The same of held-out documents, all of them together."""

    def __init__(self, router: RouterLoss, mesh: Mesh, device: torch.device) -> None:
        self._router, self._mesh, self._sums = router, mesh, router.nothing(device)

    @torch.no_grad()
    def note(self, batch: Batch) -> None:
        """Add the forward that the model has just done."""
        old, new = self._sums, _counting(self._router, batch)
        self._sums = RoutingSums(old.chosen + new.chosen, old.probability + new.probability, old.squares + new.squares)

    def figures(self) -> Mapping[str, float]:
        """The router's loss with its weight, and without it over k; the z-loss with its weight. Collective."""
        router, n = self._router, self._router.experts
        every = torch.cat([self._sums.chosen, self._sums.probability, self._sums.squares[None]])
        if dist.is_initialized():
            dist.all_reduce(every)
            every /= self._mesh.tensor
        chosen, figures = every[:n], dict[str, float]()
        if router.weight:
            value = float(router.value(chosen, every[n:-1]))
            figures |= {TERM: router.weight * value, BALANCE: value / router.per_token}
        if router.z_weight:
            figures[Z_TERM] = float(router.z_weight * every[-1] / router.seen(chosen))
        return figures


def _counting(router: RouterLoss, batch: Batch) -> RoutingSums:
    if len(batch.documents):
        return router.sums
    chosen, probability, squares = router.sums
    return RoutingSums(torch.zeros_like(chosen), probability * 0.0, squares * 0.0)
