"""The devices that predictions are made for: the present one is taken as it is."""

from dataclasses import replace

import pytest

from tuner.profile import devices
from tuner.runtime.device import device_facts


@pytest.mark.parametrize("bf16_fast", [True, False])
def test_the_present_processor_computes_in_what_it_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch, bf16_fast: bool
) -> None:
    here = replace(device_facts("cpu"), bf16_fast=bf16_fast)
    monkeypatch.setattr(devices, "device_facts", lambda kind: here)
    assert devices.present_device("cpu").facts().bf16_fast is bf16_fast


def test_cards_before_ampere_have_no_bf16_units() -> None:
    assert {name for name, card in devices.devices().items() if not card.facts().bf16_fast} == {"t4-16g"}
