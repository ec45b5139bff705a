"""What some models compute between their decoder and their output layer, such as the dense layer of BERT's head.

A loss takes hidden states and the weight of the output layer (:mod:`tuner.model.output_layer`), so everything before
that weight has to be in the hidden states. It is the class's own code that runs, with nothing in the output layer's
place.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.model.build import head_layer


class BeforeOutput:
    """The parts of a model between its decoder and its output layer, one applied to what the other gives.

    The last of them may hold the output layer itself.
    """

    def __init__(self, model: PreTrainedModel, parts: Sequence[nn.Module]) -> None:
        self._model, self._parts = model, tuple(parts)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """From the decoder's hidden states ``[N, D]`` to what the output layer takes, ``[N, E]``."""
        with self._without_output_layer():
            for part in self._parts:
                found = part(hidden[None])
                hidden = (found[0] if isinstance(found, tuple) else found)[0]  # XLM's gives a tuple
        return hidden

    @contextmanager
    def _without_output_layer(self) -> Iterator[None]:
        """Within, the parts hand on what they would give to the output layer."""
        head = head_layer(self._model)
        places = [
            (owner, name)
            for part in self._parts
            for owner in part.modules()
            for name, child in owner.named_children()
            if child is head
        ]
        for owner, name in places:
            setattr(owner, name, nn.Identity())
        try:
            yield
        finally:
            for owner, name in places:
                setattr(owner, name, head)
