"""Wrong proposals, each as a mistake in the product would make it: layout, method, template and the line."""

CHATML, NONE = "chatml", None
PLANTED: tuple[tuple[str, str, str | None, str], ...] = tuple(
    (layout, method, template, f"write the source as {{path: rows.jsonl, {line}}}")
    for layout, method, template, line in (
        ("pref-conversations-turns-from-value", "sft", CHATML, "columns: {messages: conversations}"),  # old answers
        ("pref-prompt-text-text", "sft", NONE, "columns: {completion: rejected}"),  # the other answer
        ("pref-question-text", "sft", CHATML, "columns: {text: chosen}"),  # without its prompt
        ("sft-question-answer", "sft", CHATML, "columns: {instruction: answer, output: question}"),  # exchanged
        ("pref-prompt-preferred", "dpo", NONE, "columns: {chosen: dispreferred, rejected: preferred}"),
        ("sft-dolly", "sft", CHATML, "columns: {output: response}"),  # without its context
        ("pref-system-question-message", "dpo", CHATML, "columns: {prompt: system}"),  # the wrong prompt
        ("kto-rating", "kto", CHATML, "columns: {label: rating}"),  # no label
        ("sft-alpaca-text", "sft", CHATML, "format: text"),  # the instruction too
        ("sft-metamath", "sft", CHATML, "columns: {instruction: original_question, output: response}"),
        ("pref-response-a-b", "dpo", CHATML, "columns: {chosen: response_a, rejected: response_b}"),  # a guess
        ("text-wikipedia", "pretrain", NONE, "columns: {text: title}"),
        ("pref-none-full-lists-turns", "sft", CHATML, "columns: {messages: chosen}"),  # earlier answers
    )
) + (("kto-messages-label", "kto", CHATML, "write method.kind: sft"),)  # unwanted answers
