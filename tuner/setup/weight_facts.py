"""What is known of a model's weights besides their values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tuner.model.root import CausalLM
from tuner.runtime.process import Collective, gloo_group


@dataclass(frozen=True)
class WeightFacts:
    """What was found when a model was built: facts of its weights, as checkpoints note them, not parts of it."""

    frozen_hash: Callable[[], str | None]
    """Gives the SHA-256 of what is not trained (:func:`~tuner.model.freeze.frozen_hash`), which checkpoints do not
    hold, once it is known; of a model that several processes hold, on rank 0."""
    weights_hash: str | None = None
    """SHA-256 of all weights as they were built (:func:`~tuner.model.freeze.weights_hash`), where a reference is
    computed with them."""
    untouched: Mapping[str, Any] | None = None
    """Of the language model of a multimodal checkpoint: what its files hold besides (numbers, bytes, SHA-256)."""
    given: Mapping[str, Any] | None = None
    """What `model.init_from` gave it, as checkpoints note it, and the report of that."""
    why_apart: str | None = None
    """Why documents do not lie end to end, where that was found when the model was proven."""

    def agreed_frozen_hash(self) -> str | None:
        """The hash of the frozen weights, which rank 0 takes, on every rank. Collective."""
        return Collective(gloo_group()).on_rank0(self.frozen_hash)


class Built(NamedTuple):
    """A model as a training begins with it, and what is known of its weights."""

    root: CausalLM
    facts: WeightFacts
