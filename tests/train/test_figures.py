"""What a method's section says of its figures, held to what the method logs."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tuner.config.recipe import UNIONS
from tuner.data.batches import StepBatches, collate
from tuner.data.prepared import Row
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import build_method, logged

HEADING = 7


def of_documents() -> list[str]:
    """Kinds over pairs or labelled documents that need nothing but their defaults."""
    found = []
    for kind, section in UNIONS["method"].items():
        try:
            built: Any = section()
        except ValidationError:
            continue
        found += [kind] if built.examples.kind in {"preference", "unpaired"} else []
    return found


@pytest.mark.parametrize("kind", of_documents())
def test_a_section_names_what_its_method_logs(kind: str) -> None:
    section: Any = UNIONS["method"][kind]()
    method = build_method(section)
    lengths = np.array([4, 5, 3, 6], dtype=np.int32)
    trained = np.concatenate([np.arange(n) >= n - 2 for n in lengths])
    ids = np.random.default_rng(0).integers(0, 11, int(lengths.sum()))
    batch = method.made_up(collate([Row(ids, trained, lengths, np.arange(4))]))
    columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
    columns |= {"kl": torch.zeros(())} if method.mismatched else {}
    at = method.positions(batch)
    targets = torch.as_tensor(batch.targets[at])
    terms = method.terms(torch.randn(len(at), 5), OutputLayer(torch.randn(11, 5)), targets, columns)
    assert set(section.figures) == set(logged(terms))
    assert all(len(figure.heading) <= HEADING for figure in section.figures.values())
    counts = method.counts(StepBatches(np.arange(1), len(at), len(ids), [batch], batch.trained_per_document, 4))
    assert {one.per for one in (*terms.losses.values(), *terms.figures.values())} <= set(counts)
