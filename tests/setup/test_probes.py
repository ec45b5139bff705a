"""Probes answer as the model with its own weights in float32 does, however the weights are held."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.tiny import TINY, VOCAB, tiny_config
from tuner.export.verify import compare, last_logits
from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.model.root import CausalLM
from tuner.setup.probes import record_probes


@pytest.mark.parametrize("kind", TINY)
def test_a_frozen_bfloat16_base_adds_no_rounding(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path)
    held = build_model(ModelSpec(str(tmp_path)), torch.bfloat16, seed=0)
    assert {parameter.dtype for parameter in held.parameters()} == {torch.bfloat16}
    on_meta = meta_model(held.config, torch.bfloat16)  # what other processes fill with these values
    assert {n: b.dtype for n, b in on_meta.named_buffers()} == {n: b.dtype for n, b in held.named_buffers()}
    for name, parameter in held.named_parameters():
        assert torch.equal(parameter.float(), model.get_parameter(name)), name
    probes = [torch.randint(0, VOCAB, (length,)) for length in (5, 12)]
    answers = record_probes(CausalLM(held), probes, torch.device("cpu"))["logits"]
    expected = last_logits(model.eval(), [probe.tolist() for probe in probes])
    assert compare(expected, answers).relative <= 1e-5
