"""Every mistake of the table is answered with its place and the line to write."""

from collections import Counter

from tools.mistakes import answer, mistakes


def test_every_mistake_gets_its_place_and_its_line() -> None:
    table = mistakes()
    assert Counter(one.tool for one in table) == {
        "trl": 27, "axolotl": 24, "llama-factory": 22, "torchtune": 21, "ms-swift": 10, "unsloth": 10, "tuner": 22,
    }  # fmt: skip
    answers = [answer(mistake) for mistake in table]
    assert [one for one in answers if not one.right] == []
