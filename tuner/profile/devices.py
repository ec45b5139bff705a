"""Devices that memory and time are predicted for: what their drivers report and their data sheets promise.

Memory is what ``nvidia-smi`` reports as the total of a card. Rates are dense bf16 products with float32 sums, without
sparsity, from NVIDIA's data sheets: H100 (DS-11133), H200 (DS-11516), A100 (DS-10031), L40S, L4, A10, and the
architecture papers of Ada, Ampere, Turing and Blackwell (GeForce, T4); B200 from the data sheet of DGX B200. Those of
fp16 are the same, those of fp8, where there are units for it, twice as high. A step reaches a part of them. Copies
between page-locked memory and a device reach four fifths of what PCIe x16 promises. The host's memory for each card is
an eighth of that of a DGX (B200, H200, H100 2 TB; A100 2 TB and 1 TB), and taken as 64 GiB for cards that are put into
machines of any kind.
"""

import difflib
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from tuner.config.numbers import parse_bytes
from tuner.errors import RecipeError
from tuner.profile.rates import stated_error
from tuner.runtime.device import ADA, AMPERE, DeviceFacts, device_facts
from tuner.runtime.memory import host_memory

MIB, GIB = 1 << 20, 1 << 30
PCIE = {3: 12e9, 4: 25e9, 5: 50e9}
"""Bytes a second each way that copies reach over 16 lanes, by the generation of PCIe."""
OTHER_HOST = 64 * GIB


@dataclass(frozen=True)
class Device:
    """One device: its memory in bytes and bf16 operations per second; None where only a measurement tells."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    flops: float | None
    shown: str
    generation: int = 0
    """As in the facts of a device that is here."""
    has_fp8: bool = False
    """As in the facts of a device that is here."""
    bf16_fast: bool = True
    """As in the facts of a device that is here."""
    host_link: float = PCIE[4]
    """Bytes a second each way that page-locked copies to and from the host's memory reach."""
    host_bytes: int = OTHER_HOST
    """Memory of the host for each such device."""

    def facts(self, threads: int = 1) -> DeviceFacts:
        """The device as a resolved recipe sees one that is here, all its memory free."""
        size = self.memory_bytes
        return DeviceFacts(self.kind, self.shown, size, size, self.bf16_fast, threads, self.generation, self.has_fp8)


@cache
def devices() -> dict[str, Device]:
    """The cards of data sheets (`devices.json`) by the name that ``--device`` takes."""
    cards = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
    return {card["name"]: _card(**card) for card in cards}


def _card(
    name: str, shown: str, memory_mib: int, bf16_tflops: float, capability: list[int], pcie: int, host_bytes: int
) -> Device:
    generation, has_fp8 = capability[0], tuple(capability) >= ADA
    size, rate, is_fast = memory_mib * MIB, bf16_tflops * 1e12, generation >= AMPERE
    return Device(name, "cuda", size, rate, shown, generation, has_fp8, is_fast, PCIE[pcie], host_bytes)


MEASURED = ("cpu",)
"""Kinds of device that predictions were held against, whatever its name; GPUs are in `measured.json`.

Predictions for all other devices are shown as unverified, and no command ends because of one.
"""


def is_verified(kind: str, name: str) -> bool:
    """Whether predictions were held against measurements on a device of this kind, or of this name."""
    return kind in MEASURED or stated_error(name) is not None


def present_device(kind: Literal["auto", "cuda", "cpu"]) -> Device:
    """The device that is here, with what is free of its memory; its rate, where the table has it."""
    facts = device_facts(kind)
    rate = data_sheet_rate(facts.name)
    known = next((device for device in devices().values() if facts.name.startswith(device.shown)), None)
    found = Device(facts.kind, facts.kind, facts.free_bytes, rate, facts.name, facts.generation, facts.has_fp8)
    link = found.host_link if known is None else known.host_link
    return replace(found, host_link=link, host_bytes=host_memory()[1], bf16_fast=facts.bf16_fast)


def data_sheet_rate(name: str) -> float | None:
    """Dense bf16 operations a second of a device by the name that its driver gives; None where the table lacks it."""
    known = [device for device in devices().values() if name.startswith(device.shown)]
    return max((device.flops or 0.0 for device in known), default=0.0) or None


def find_device(name: str) -> Device:
    """The device of a name. Raises RecipeError with the nearest one."""
    if name == "cpu":
        return present_device("cpu")
    if name not in devices():
        near = difflib.get_close_matches(name, devices(), n=1)
        raise RecipeError(
            f"--device {name}: no such device",
            hint=f"did you mean {near[0]}?" if near else f"there are cpu, {', '.join(devices())}",
        )
    return devices()[name]


def parse_processes(text: str) -> tuple[int, int]:
    """``8x8`` as machines and processes on each; a number alone is of one machine. Raises RecipeError."""
    machines, _, each = text.partition("x") if "x" in text else ("1", "x", text)
    for number in (machines, each):
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 1 << 16):
            raise RecipeError(f"--processes {text}: no number of processes", hint="write 8, or 4x8 for four machines")
    return int(machines), int(each)


def parse_memory(option: str, text: str) -> int:
    """A size of memory in bytes. Raises RecipeError naming the option, also for a number without a unit."""
    if re.fullmatch(r"\s*[\d.]+\s*", text):
        unit = "GiB" if len(text.strip()) < len("1000000") else "B"
        raise RecipeError(f"{option} {text}: {text.strip()} what? write {text.strip()}{unit}")
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"{option} {text}: {error}", hint="write 24GiB or 16GB") from None
