"""Which parameters of a model are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from tuner.config.recipe import Adapter, LowRankAdapter, PeftAdapter
from tuner.model.freeze import freeze
from tuner.model.tokens import train_new_tokens

if TYPE_CHECKING:
    from tuner.model.adapter import LoraSpec
    from tuner.model.peft_kinds import PeftSpec


@dataclass(frozen=True)
class TrainableSpec:
    """Which parameters are trained: all of them, all but the ``frozen`` ones, an adapter's, or none.

    New tokens are trained unless nothing is.
    """

    adapter: LoraSpec | PeftSpec | None = None
    frozen: Sequence[str] = ()
    new_ids: range = range(0)
    drawn: bool = False
    """The model's weights are random."""
    nothing: bool = False
    """No parameter is trained: another model learns from this one."""

    @property
    def is_all(self) -> bool:
        """Whether there is nothing that stays as it was."""
        return self.adapter is None and not self.frozen and not self.nothing

    def apply(self, model: PreTrainedModel, seed: int) -> None:
        """Add the adapter, or freeze, in place; see :func:`~tuner.model.adapter.add_lora` and `train_new_tokens`."""
        if self.nothing:
            model.requires_grad_(False)
            return
        if self.adapter is not None:
            self._adapt(model, self.adapter, seed)
        elif self.frozen:
            freeze(model, self.frozen)
        train_new_tokens(model, self.new_ids, self.drawn)

    def _adapt(self, model: PreTrainedModel, spec: LoraSpec | PeftSpec, seed: int) -> None:
        from tuner.model.adapter import LoraSpec, add_lora

        if isinstance(spec, LoraSpec):
            add_lora(model, spec, seed)
            return
        from tuner.model.peft_kinds import add_peft  # few adapters are by peft's own config

        add_peft(model, spec, seed)


def spec_of(adapter: Adapter) -> LoraSpec | PeftSpec | None:
    """What a recipe's section asks for; None for no adapter."""
    if isinstance(adapter, PeftAdapter):
        from tuner.model.peft_kinds import PeftSpec

        return PeftSpec(adapter.config, adapter.moves_base)
    if not isinstance(adapter, LowRankAdapter):
        return None
    from tuner.model.adapter import LoraSpec

    return LoraSpec(
        adapter.r, adapter.alpha, adapter.dropout, adapter.target_modules, adapter.use_rslora, adapter.kind == "dora",
        adapter.modules_to_save, adapter.experts,
    )
