"""`make campaign` runs every campaign that there is, and fails where one does."""

import re
import sys
from pathlib import Path

import pytest

from tools import campaign
from tools.campaign import CAMPAIGNS, Campaign

NEED_MORE = {"same_run", "kept_chats"}
"""Tools that hold two things against each other which only their caller has."""


def test_every_campaign_is_among_them(root: Path) -> None:
    named = {one.words[0] for one in CAMPAIGNS} - {"pytest"}
    others = {"damaged_runs", "flawed_recipes", "mistakes", "mutants", "optimizer_spread"}
    others |= {"preference_task", "quantized_task", "store_trainings"}
    assert named == {path.stem for path in (root / "tools").glob("*_campaign.py")} | others
    assert all((root / "tools" / f"{name}.py").is_file() for name in named | NEED_MORE)
    assert len({one.name for one in CAMPAIGNS}) == len(CAMPAIGNS)


def test_contributing_names_them(root: Path) -> None:
    text = (root / "CONTRIBUTING.md").read_text()
    assert [one.name for one in CAMPAIGNS if f"| `{one.name}` |" not in text] == []


def test_pages_name_campaigns_that_are_there(root: Path) -> None:
    text = "".join(path.read_text() for path in (root / "docs").rglob("*.md"))
    chosen = {word for names in re.findall(r'ONLY=("[^"]+"|[\w-]+)', text) for word in names.strip('"').split()}
    assert len(chosen) > 10
    assert chosen <= {one.name for one in CAMPAIGNS}


@pytest.mark.parametrize(("code", "ended"), [(0, "ok"), (3, "failed (3)")])
def test_what_fails_is_told(
    code: int, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "tools" / "one.py"
    script.parent.mkdir()
    (script.parent / "__init__.py").touch()
    script.write_text(f"import sys; print('said', sys.argv[1]); sys.exit({code})")
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    monkeypatch.setattr(campaign, "PLACE", tmp_path / "campaigns")
    monkeypatch.setattr(campaign, "CAMPAIGNS", (Campaign("one", ("one", "word"), "a thing"),))
    monkeypatch.setattr(sys, "argv", ["campaign.py"])
    assert campaign.main() == (1 if code else 0)
    assert re.search(rf"one           {re.escape(ended)}, \d+\.\d min", capsys.readouterr().err)
    assert (tmp_path / "campaigns" / "one.log").read_text() == "said word\n"
    table = (tmp_path / "campaigns" / "table.md").read_text()
    assert re.search(rf"\| one \| a thing \| {re.escape(ended)} \| \d+\.\d \|", table)
