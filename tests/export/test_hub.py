"""An upload against a stand-in for the hub: what is created and sent, and what is refused before."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.fixtures.fake_hub import Hub, serving
from tuner.errors import DataError, MachineError, RecipeError
from tuner.export.hub import find_export, plan_push, push

# The library hands its HTTP client a file in a way that this deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
CARD = "---\ntags:\n- tuner\n---\n\nmodel = from_pretrained(DIRECTORY), base BASE_MODEL\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
        monkeypatch.setattr(constants, name, value)
    with serving(Hub()) as found:
        yield found


def entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export as `tuner export-hf` leaves it, in a run, with a file that somebody else put there."""
    directory = tmp_path / "run" / "exports" / "step-8"
    directory.mkdir(parents=True)
    files = {"README.md": CARD.encode(), "config.json": b"{}", "model.safetensors": bytes(range(256)) * 40}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    facts = {"source": {"step": 8}, "files": {name: entry(data) for name, data in files.items()}}
    (directory / "tuner.json").write_text(json.dumps(facts))
    (directory / "private-notes.txt").write_text("not yours")
    (tmp_path / "run" / "run.json").write_text("{}")
    return directory


def relisted(export: Path, files: dict[str, Any], gone: str = "") -> None:
    """Have an export say that it has more files, or one less."""
    facts = json.loads((export / "tuner.json").read_text())
    facts["files"] = {name: one for name, one in {**facts["files"], **files}.items() if name != gone}
    (export / "tuner.json").write_text(json.dumps(facts))


def test_an_export_is_created_and_sent(hub: Hub, export: Path) -> None:
    report = push(plan_push(find_export(export.parents[1]), "me/model"), private=True, endpoint=hub.url)
    assert (report.url, report.commit, report.files) == (f"{hub.url}/me/model", "a" * 40, 4)
    assert len(hub.created) == 1
    assert {"name": "model", "organization": "me", "visibility": "private"}.items() <= hub.created[0].items()
    assert hub.tokens == {"Bearer hf_secret"}
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors", "tuner.json"}
    weights = (export / "model.safetensors").read_bytes()
    assert hub.large == {hashlib.sha256(weights).hexdigest(): weights}
    card = hub.files["README.md"]["data"]
    assert 'from_pretrained("me/model")' in card
    lineage = json.loads(hub.files["tuner.json"]["data"])
    assert lineage["files"]["README.md"] == entry(card.encode()), "a download of it is whole by its own tuner.json"
    assert (export / "README.md").read_text() == CARD


def test_a_hub_that_fails_is_no_error_of_the_export(hub: Hub, export: Path) -> None:
    hub.fails = [503]
    with pytest.raises(MachineError, match="the hub cannot be reached"):
        push(plan_push(export, "me/model"), endpoint=hub.url)
    push(plan_push(export, "me/model"), endpoint=hub.url)
    assert hub.files


def test_a_connection_that_breaks_within_a_file_is_made_again(hub: Hub, export: Path) -> None:
    hub.breaks = 1
    push(plan_push(export, "me/model"), endpoint=hub.url)
    assert len(hub.large) == 1 and hub.breaks == 0


@pytest.mark.parametrize("code", [401, 403])
def test_a_token_that_may_not_is_no_reason_to_try_again(code: int, hub: Hub, export: Path) -> None:
    hub.fails = [code] * 9
    with pytest.raises(MachineError, match="the hub refuses me/model"):
        push(plan_push(export, "me/model"), endpoint=hub.url)


def test_no_token_no_request(hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.export.hub.get_token", lambda: None)
    with pytest.raises(MachineError, match="there is no token"):
        push(plan_push(export, "me/model"), endpoint=hub.url)
    assert hub.created == []


def test_a_file_behind_a_linked_directory_is_not_taken(export: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "home" / "deep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "key").write_bytes(b"secret")
    (export / "sub").symlink_to(tmp_path / "home", target_is_directory=True)
    relisted(export, {"sub/deep/key": entry(b"secret")})
    with pytest.raises(DataError, match="sub/deep/key: sub is a link"):
        plan_push(export, "me/model")


@pytest.mark.parametrize("name", ["latest", "step-9"])
def test_an_export_elsewhere_that_a_run_links_to_is_not_taken(export: Path, tmp_path: Path, name: str) -> None:
    exports = export.parent
    moved = export.rename(tmp_path / "moved")
    (exports / "latest").unlink(missing_ok=True)
    (exports / name).symlink_to(moved)
    with pytest.raises(DataError, match=f"exports/{name}: a link, to {moved}"):
        find_export(exports.parent)


def test_what_is_damaged_or_no_export_is_refused_before(export: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no name of a repository"):
        plan_push(export, "model")
    (export / "config.json").write_bytes(b"[]")
    with pytest.raises(DataError, match="config.json"):
        plan_push(export, "me/model")
    with pytest.raises(RecipeError, match="neither an export nor a run"):
        find_export(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text("{}")
    with pytest.raises(RecipeError, match="has no export yet"):
        find_export(tmp_path / "new")


@pytest.mark.parametrize(("base", "works"), [("owner/base", True), ("/home/me/base", False), (None, False)])
def test_an_adapter_names_a_base_that_others_have(base: str | None, works: bool, export: Path) -> None:
    data = json.dumps({"base_model_name_or_path": base}).encode()
    (export / "adapter_config.json").write_bytes(data)
    (export / "config.json").unlink()
    relisted(export, {"adapter_config.json": entry(data)}, "config.json")
    if works:
        card = plan_push(export, "me/model").files["README.md"]
        assert isinstance(card, bytes) and b'base "owner/base"' in card
    else:
        with pytest.raises(RecipeError, match="which others do not have"):
            plan_push(export, "me/model")
