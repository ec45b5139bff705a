"""The shipped orders: those of their generator, each with its facts, and none of those that the pages ask for."""

import json
import re

import pytest

from tools import order_rows, readme_campaign
from tuner.config.paths import recipes_dir

ROWS = order_rows.rows()
ORDERS = [row["messages"][0]["content"] for row in ROWS]


def test_the_shipped_orders_are_those_of_the_generator() -> None:
    lines = (recipes_dir() / "data" / "orders.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    assert len(set(ORDERS)) == order_rows.ROWS
    assert order_rows.ROWS % len(order_rows.WORDINGS) == 0, "each wording as often as the others"


@pytest.mark.parametrize("row", ROWS)
def test_the_answer_is_what_the_order_says(row: order_rows.Row) -> None:
    order, answer = (message["content"] for message in row["messages"])
    facts = json.loads(answer)
    assert tuple(facts) == tuple(readme_campaign.LEARNED)
    assert all(str(facts[key]) in order for key in ("name", "city", "quantity", "total_usd"))


def test_a_person_stands_before_the_city_about_as_often_as_after_it() -> None:
    first = [wording.index("{name}") < wording.index("{city}") for wording in order_rows.WORDINGS]
    assert 1 / 3 < sum(first) / len(first) < 2 / 3


def test_the_pages_ask_for_orders_that_are_not_trained_on() -> None:
    readme = readme_campaign.typed_in(readme_campaign.README.read_text(encoding="utf-8"))
    (notebook,) = re.findall(r'prompt = "(.+)"', readme_campaign.cells(readme_campaign.NOTEBOOK))
    for asked in (readme, notebook):
        assert asked.startswith(order_rows.ASKED) and asked not in ORDERS
        assert all(str(value) in asked for value in readme_campaign.LEARNED.values())
    assert readme_campaign.answer(readme_campaign.README.read_text(encoding="utf-8")) == readme_campaign.LEARNED
