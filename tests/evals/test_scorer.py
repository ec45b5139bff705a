"""What the scorer says is what the plain model says of each item alone: whatever lies next to it in a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures import quiz
from tests.fixtures.packed import drawn_root, tiny_root
from tuner.data.encoding.tokenizer import TextTokenizer, byte_files
from tuner.errors import DataError
from tuner.evals.figures import figures_of
from tuner.evals.scorer import Scorer, _documents, _rows, before_stops
from tuner.evals.task import Asker, ItemsTask, ScoreRequest, items_of
from tuner.model.root import CausalLM
from tuner.parallel.mesh import Mesh
from tuner.train.step import StepConfig

TOKENIZER = TextTokenizer(byte_files())
LONGEST = 48


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_root("llama", tmp_path_factory.mktemp("model"))


def scorer(root: CausalLM, row_tokens: int = 64) -> Scorer:
    config = StepConfig(torch.device("cpu"), torch.no_grad, None, 0, Mesh())
    return Scorer(root, config, TOKENIZER, row_tokens)


def plain(root: CausalLM, request: ScoreRequest) -> tuple[float, bool]:
    """The request alone, by the class of transformers."""
    ids = torch.tensor([[*request.context, *request.continuation]]) % root.model.config.vocab_size
    with torch.no_grad():
        logits = root.model(ids[:, :-1]).logits[0, -len(request.continuation) :].double()
    wanted = ids[0, -len(request.continuation) :]
    each = torch.log_softmax(logits, -1).gather(1, wanted[:, None])
    return float(each.sum()), bool((logits.argmax(-1) == wanted).all())


def small(root: CausalLM, request: ScoreRequest) -> ScoreRequest:
    """With ids that the tiny model has."""
    size = root.model.config.vocab_size
    return ScoreRequest(tuple(i % size for i in request.context), tuple(i % size for i in request.continuation))


@pytest.mark.parametrize("row_tokens", [1, 50, 1000])
def test_likelihoods_are_those_of_each_request_alone(root: CausalLM, row_tokens: int) -> None:
    texts = [("a b", " c"), ("a b", " d"), ("a b", " cd"), ("longer than the others", " by far"), ("x", "y" * 30)]
    requests = [small(root, Asker(TOKENIZER, LONGEST).pair(*pair)) for pair in texts]
    found = scorer(root, row_tokens).likelihoods(requests)
    for one, request in zip(found, requests, strict=True):
        nats, is_greedy = plain(root, request)
        assert one.log_likelihood == pytest.approx(nats, abs=1e-4)
        assert one.is_greedy == is_greedy
    likeliest = ScoreRequest(requests[0].context, (_next(root, requests[0].context),))
    assert scorer(root).likelihoods([likeliest])[0].is_greedy
    assert scorer(root).likelihoods([]) == []


def _next(root: CausalLM, ids: tuple[int, ...]) -> int:
    with torch.no_grad():
        return int(root.model(torch.tensor([ids])).logits[0, -1].argmax())


REQUESTS = st.lists(
    st.builds(
        lambda before, after: ScoreRequest(tuple(before), tuple(after)),
        st.lists(st.integers(0, 3), min_size=1, max_size=6),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
    ),
    max_size=30,
)


@given(REQUESTS, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_each_request_is_in_one_row_once(requests: list[ScoreRequest], row_tokens: int) -> None:
    documents = _documents(requests)
    rows = _rows(documents, row_tokens)
    assert sorted(number for row in rows for document in row for number in document.requests) == [*range(len(requests))]
    assert len({document.ids for document in documents}) == len(documents)
    assert all(sum(len(one.ids) for one in row) <= row_tokens or len(row) == 1 for row in rows)
    for document in documents:
        assert all((requests[n].context + requests[n].continuation)[:-1] == document.ids for n in document.requests)


def test_choices_of_one_token_share_their_forward() -> None:
    requests = [ScoreRequest((1, 2, 3), (answer,)) for answer in range(4)]
    assert [document.requests for document in _documents(requests)] == [[0, 1, 2, 3]]


def task(kind: str, longest: int = LONGEST, new_tokens: int = 6) -> ItemsTask:
    return ItemsTask(kind, items_of(quiz.TASKS[kind], kind), Asker(TOKENIZER, longest), new_tokens)


@pytest.fixture(scope="module")
def byte_root(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A model with an embedding for each byte."""
    from transformers import LlamaConfig

    size = TOKENIZER.vocab_size
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return drawn_root(config, tmp_path_factory.mktemp("bytes"), spread=6.0)


def test_a_task_of_choices(byte_root: CausalLM) -> None:
    found = task("choice").score(scorer(byte_root))
    asker = Asker(TOKENIZER, LONGEST)
    for item, result in zip(quiz.CHOICES, found.results, strict=True):
        choices = [str(choice) for choice in item["choices"]]
        nats = [plain(byte_root, asker.answer(str(item["prompt"]), choice))[0] for choice in choices]
        assert result["log_likelihoods"] == pytest.approx(nats, abs=1e-4)
        by_letter = [one / len(choice) for one, choice in zip(nats, choices, strict=True)]
        assert result["figures"]["acc"] == float(nats.index(max(nats)) == item["answer"])
        assert result["figures"]["acc_norm"] == float(by_letter.index(max(by_letter)) == item["answer"])
    assert set(found.figures) == {"acc", "acc_norm", "bits_per_byte"} == set(task("choice").figures or ())
    assert found.figures["acc"] == sum(r["figures"]["acc"] for r in found.results) / 5
    assert found.line().keys() == {"choice/acc", "choice/acc_norm", "choice/bits_per_byte"}


def test_a_text_is_measured_in_windows(byte_root: CausalLM) -> None:
    found = task("text", longest=16).score(scorer(byte_root))
    for item, result in zip(quiz.TEXTS, found.results, strict=True):
        windows = list(Asker(TOKENIZER, 16).windows(str(item["text"])))
        ids = TOKENIZER.encode(str(item["text"]))
        assert [i for window in windows for i in window.continuation] == ids, "each token in one window"
        assert all(len(one.context) + len(one.continuation) == 17 or len(windows) == 1 for one in windows)
        nats = -sum(plain(byte_root, window)[0] for window in windows)
        assert result["sums"]["nats"] == pytest.approx(nats, abs=1e-3)
        assert result["sums"]["tokens"] == len(ids) and result["sums"]["bytes"] == len(str(item["text"]))
    assert found.figures == {name: one.value for name, one in figures_of(found.results).items()}


def test_answers_are_generated_and_matched(byte_root: CausalLM) -> None:
    found = task("question").score(scorer(byte_root))
    alone = [scorer(byte_root).answers([task("question").asker.prompt(f"{i} ")], [6], [["ba"]])[0] for i in range(5)]
    assert [result["answer"] for result in found.results] == alone
    assert set(found.figures) == {"exact_match"}


def test_a_prompt_that_is_too_long_loses_its_beginning_and_is_counted(byte_root: CausalLM) -> None:
    long = {"prompt": "z" * 100, "choices": ["a", "b"], "answer": 0}
    short = {"prompt": "z" * (8 - 1), "choices": ["a", "b"], "answer": 0}
    asker = Asker(TOKENIZER, 8)
    found = ItemsTask("t", items_of([long, short], "t"), asker, 6).score(scorer(byte_root))
    assert found.cut == 2, "of one item both choices"
    assert found.results[0]["log_likelihoods"] == found.results[1]["log_likelihoods"]
    with pytest.raises(DataError, match="an answer has 41 tokens, and a forward takes 8"):
        asker.pair("a", "b" * 41)


def test_pairs_are_cut_where_lm_eval_cuts_them() -> None:
    asker = Asker(TOKENIZER, LONGEST)
    spaced = asker.pair("a ", "b")
    assert TOKENIZER.decode(spaced.context) == "a" and TOKENIZER.decode(spaced.continuation) == " b"
    assert asker.answer("a", "b") == asker.pair("a", " b") and asker.answer("a\n", "b") == asker.pair("a\n", "b")
    assert asker.pair("", "b").context == (asker.first_id,)


def test_before_stops() -> None:
    assert before_stops("a\nb. c", ["b", "\n"]) == "a"
    assert before_stops("abc", []) == "abc"
