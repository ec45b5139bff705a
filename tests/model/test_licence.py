"""The licence of a base model is what its card's front matter says, and nothing where it says nothing fit to repeat."""

from pathlib import Path

import pytest

from tuner.model.vetting import licence_of


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [x]\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: gemma\n---\n", "gemma"),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\nlicense: |\n  a\n  b\n---\n", None),
        ("---\nlicense: {\n---\n", None),
        ("---\n- license\n---\n", None),
        ("# Model\n---\nlicense: mit\n---\n", None),
        ("license: mit\n", None),
        (None, None),
    ],
)
def test_licence_of_a_directory(tmp_path: Path, card: str | None, licence: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path), None) == licence


def test_a_hub_that_cannot_be_reached_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("tuner.model.vetting.hf_hub_download", offline)
    assert licence_of("owner/name", None) is None
