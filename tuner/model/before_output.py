"""What some models compute between their decoder and their output layer, such as the dense layer of BERT's head.

A loss takes hidden states and the weight of the output layer (:mod:`tuner.model.output_layer`), so everything before
that weight has to be in the hidden states. It is the class's own code that runs, with nothing in the output layer's
place.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.model.build import head_layer


def before_output(model: PreTrainedModel, parts: Sequence[nn.Module], hidden: torch.Tensor) -> torch.Tensor:
    """From the decoder's hidden states ``[N, D]`` to what the output layer takes, ``[N, E]``.

    The ``parts`` are those between them, one applied to what the other gives. The last may hold the output layer
    itself: they hand on what they would give to it.
    """
    head = head_layer(model)
    inside = [owner for part in parts for owner in part.modules()]
    places = [(owner, name) for owner in inside for name, child in owner.named_children() if child is head]
    for owner, name in places:
        setattr(owner, name, nn.Identity())
    try:
        for part in parts:
            found = part(hidden[None])
            hidden = (found[0] if isinstance(found, tuple) else found)[0]  # XLM's gives a tuple
        return hidden
    finally:
        for owner, name in places:
            setattr(owner, name, head)
