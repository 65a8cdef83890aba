"""Meaning and remedy of each reason code of quarantined and dropped rows.

`packhouse quarantine ls` prints the remedy below the rows, and docs/reference/reasons.md is
generated from it. Codes are part of published files and the ledger, so they never change.
"""

from typing import Literal, NamedTuple

TurnOrder = Literal[
    "system_not_first", "starts_with_assistant", "consecutive_user", "consecutive_assistant"
]
"""Turn orders that `validate.refused_orders` can list; by default the template decides."""


class Reason(NamedTuple):
    """Meaning and remedy of a reason code."""

    sentence: str
    """The meaning. With `message {at}`, it is also the detail of a row: its message is named."""
    remedy: str

    @property
    def meaning(self) -> str:
        """The sentence about any row."""
        return self.sentence.replace(" (message {at})", "").replace("message {at}", "a message")


QUARANTINE_REASONS: dict[str, dict[str, Reason]] = {
    "validate": {
        "json": Reason("the row is not JSON", "fix it, or write the file with a JSON library"),
        "csv": Reason(
            "the line is not a complete CSV record",
            "quote values that contain quotes or line breaks",
        ),
        "encoding": Reason(
            "bytes that are not UTF-8, or half of a surrogate pair",
            "set `encoding` of the source, such as `cp1252`, if the file has another encoding",
        ),
        "cell": Reason(
            "a cell of the workbook has an error, or a formula without a saved result",
            "fix the formula, or open the workbook in a spreadsheet program and save it",
        ),
        "control": Reason(
            "an unescaped control character or NUL in a string", "escape or remove it"
        ),
        "number": Reason(
            "NaN, Infinity, or a number that does not fit in 64 bits",
            "write null, or put the value in quotes",
        ),
        "duplicate_key": Reason(
            "an object has the same key twice", "remove the one with the wrong value"
        ),
        "depth": Reason(
            "the row is nested more than 32 levels deep",
            "flatten it, or store the inner part as JSON text",
        ),
        "too_many_fields": Reason("the row has too many fields", "remove those that are not used"),
        "row_too_long": Reason("the row has too many bytes", "raise `validate.max_row_bytes`"),
        "not_an_object": Reason(
            "the row is a number, a string or a list",
            "set `format: messages` if each row is a list of messages",
        ),
        "fields": Reason(
            "a required field is missing, or a CSV row has more or fewer values than the header",
            "if the field has another name in the file, follow the advice in the detail; in CSV, "
            "quote values that contain commas or line breaks",
        ),
        "type": Reason(
            "a value has the wrong type",
            "use strings for text fields (in `select`: `cast(... as varchar)`) and integers for "
            "IDs and labels",
        ),
        "media": Reason(
            "the row has an image, audio, video or file; packhouse packs text only",
            "set `media` of the source to `drop_rows`, or to `drop_parts` to train only the text "
            "(of the first source: `--set sources.0.media=drop_rows`); if the field is just a file "
            "name, list it in `ignored_fields`",
        ),
        "label": Reason(
            "the label is not a known class",
            "use 0, 1, ... or names from `label_names`, but not both",
        ),
        "winner": Reason(
            "the field that tells the better answer names neither of them",
            "follow the advice in the detail: leave such rows out with `where`",
        ),
        "token_ids": Reason(
            "`input_ids` is empty, or has a number that is not a token id", "tokenize the row again"
        ),
        "uneven": Reason(
            "a mask or positions differ in length from `input_ids`", "write one value per token"
        ),
        "labels": Reason(
            "labels or masks are missing or contradict the IDs",
            "set `labels[i]` to `input_ids[i]` for trained tokens and to -100 for others, without "
            "shifting them",
        ),
        "boundaries": Reason(
            "the columns that separate the row's records contradict each other",
            "keep only one of `seq_lengths`, `cu_seqlens` and `position_ids`, and make it add up "
            "to the number of tokens",
        ),
        "nothing_trained": Reason("no token in the record is trained", "fix or remove the mask"),
        "vocabulary": Reason(
            "an id is not in the tokenizer's vocabulary", "use the tokenizer that made the rows"
        ),
        "padding": Reason(
            "unmasked pad tokens at the start or end", "add an `attention_mask`, or remove them"
        ),
        "arguments": Reason(
            "invalid arguments for the chat template, or documents that are not a list of objects",
            "write them as transformers expects, or list the field in `ignored_fields`",
        ),
        "loss_weight": Reason(
            "the row's loss weight is not a number above 0",
            "write a number, or filter with `where`",
        ),
        "tools": Reason(
            "tools is not a list of objects", "use OpenAI's format for tool definitions"
        ),
        "tool_calls": Reason(
            "a tool call has no name, or arguments that are not an object",
            "write `function.name` and `function.arguments`",
        ),
        "empty_conversation": Reason("the conversation has no messages", "remove the row"),
        "unknown_role": Reason(
            "message {at} has an unknown role (known: system, user, assistant, tool)",
            "map it with `roles: {Customer: user}`; `packhouse init` proposes the mapping",
        ),
        "system_not_first": Reason(
            "message {at} is a system turn but not the first message",
            "move it to the start, split the row, or allow it: `validate.refused_orders`",
        ),
        "starts_with_assistant": Reason(
            "the first turn (message {at}) is from the assistant",
            "add the question, remove the greeting, or allow it: `validate.refused_orders`",
        ),
        "tool_result_without_call": Reason(
            "message {at} is a tool result, but no tool call precedes it",
            "add the call, or remove the result",
        ),
        "consecutive_user": Reason(
            "message {at} is a user turn right after another user turn",
            "join them, or allow it: `validate.refused_orders`",
        ),
        "consecutive_assistant": Reason(
            "message {at} is an assistant turn right after another assistant turn",
            "join them, or allow it: `validate.refused_orders`",
        ),
        "call_without_result": Reason(
            "message {at} follows a tool call that has no result",
            "add the result, or end the conversation with the call",
        ),
        "no_assistant": Reason(
            "there is no assistant turn, so there is nothing to train", "remove the row"
        ),
        "expression": Reason(
            "`where` or `select` fails on the row",
            "fix the row, or use TRY_CAST(...) or TRY(...), which give NULL on failure",
        ),
        "orphan": Reason(
            "the message replies to one that is not in the file",
            "add its parent; if you filter with `where`, keep whole trees",
        ),
        "tree": Reason(
            "another row has the same `message_id`, or the row is one message of a tree",
            "keep one of them, or set `format: oasst_flat`",
        ),
        "transcript": Reason(
            "the text does not begin with a speaker", "begin it with `Human:`, or remove the row"
        ),
        "no_messages": Reason("the plug-in found no conversation in the row", "remove the row"),
        "ends_on_user": Reason(
            "the last message is a user turn; set allow_ends_on_user to keep such rows",
            "set `validate.allow_ends_on_user`; the question is then not trained",
        ),
        "ends_on_tool": Reason(
            "the last message is a tool result, so the answer to it is missing",
            "add the answer, or end with the call",
        ),
        "no_prompt": Reason(
            "a chosen or rejected answer has no prompt",
            "add a `prompt`, or begin both conversations with it",
        ),
        "several_answers": Reason(
            "the question has several answers and no context; only one of them can be trained",
            "set `format: squad` to train the first answer of each row, or choose one with "
            "`select`",
        ),
        "prompt_differs": Reason(
            "an answer is a conversation whose prompt differs from the row's prompt",
            "remove `prompt`, or write only the answer",
        ),
        "not_one_answer": Reason(
            "the prompt is not followed by exactly one assistant turn",
            "end the prompt before the last answer, or remove the row",
        ),
        "same_answers": Reason("the chosen and rejected answers are identical", "remove the row"),
        "weight": Reason(
            "a chosen or rejected answer has a loss weight", "remove the weight from the row"
        ),
        "empty_prompt": Reason(
            "the prompt (message {at}) is empty: a user turn without text",
            "remove the row, or, if the first of its messages holds the prompt, set `format: "
            "question_answer` and `select: {question: 'messages[1].content', answer: "
            "'messages[-1].content'}`",
        ),
        "empty_answer": Reason(
            "the answer (message {at}) is empty: no text, reasoning or tool call", "remove the row"
        ),
        "too_many_chars": Reason(
            "message {at} has more characters than validate.max_chars", "raise `validate.max_chars`"
        ),
    },
    "format": {
        "template": Reason(
            "the template rejects the row, or cannot render a part of it",
            "follow the advice in the detail; a different template, or your own Jinja file, may "
            "be able to render it",
        ),
        "template_limit": Reason(
            "the row takes too long to render, or its text is too large",
            "set `format.turns: whole`, split the conversation, or fix a template that recurses",
        ),
        "content_lost": Reason(
            "the template leaves out text, a tool or a tool call",
            "follow the advice in the detail, or set `format.template` to a Jinja file that "
            "writes it (`mistral_system` for Mistral v0.3)",
        ),
        "thought_lost": Reason(
            "the template leaves out the reasoning of a trained answer",
            "set `format.thought_end` to the text between reasoning and answer, or "
            "`format.reasoning: strip` if the model is also used without reasoning",
        ),
        "no_reasoning": Reason(
            "the inference prompt opens a thinking block, but the answer has no reasoning",
            "add reasoning (and `format.thought_end` if the detail says so), set the answer's "
            "weight to 0, or set `format.template` to a Jinja file whose prompt does not open one",
        ),
        "starts_with_assistant": Reason(
            "the first turn is from the assistant, and the template writes no prompt before it",
            "add the question, or set the weight of that message to 0",
        ),
        "no_stop": Reason(
            "no stop token follows an answer, so the model would not learn to stop",
            "list the token that ends the answer in `format.stop_tokens`",
        ),
        "stop_inside": Reason(
            "the template writes a stop token inside an answer, where the model would stop",
            "follow the advice in the detail, or set the weight of the message to 0",
        ),
        "nothing_trained": Reason(
            "no turn of the row is trained",
            "add an answer to the row, or remove the row; check `format.train_on` and the weights "
            "of messages; labels are trained with `format.template: classification`",
        ),
        "label": Reason("a label is not in `label_names`", "list all classes"),
        "only_thinking": Reason(
            "an answer has only reasoning; see format.reasoning",
            "set the message's weight to 0, set `format.reasoning: keep`, or remove the row",
        ),
        "unclosed_thinking": Reason(
            "an answer has a `<think>` without `</think>`, so its reasoning cannot be separated "
            "from the answer; fix it, or set its weight to 0",
            "close it, set that message's weight to 0, or set `format.reasoning: keep`",
        ),
    },
    "tokenize": {
        "empty": Reason("the text has no tokens", "remove the row"),
        "nothing_trained": Reason(
            "no token begins inside a trained span", "end the prompt with a line break"
        ),
        "prompt_differs": Reason(
            "the template or tokenizer renders the prompt differently for the two answers",
            "give both answers reasoning or none (`format.reasoning: strip`), end the prompt with "
            "a line break, or use a template that writes equal prompts",
        ),
        "not_one_answer": Reason(
            "the trained tokens of an answer are not contiguous",
            "use a template that writes an answer in one piece",
        ),
        "same_answers": Reason(
            "both answers have the same tokens: the template leaves out the difference",
            "remove the row, or use a template that writes the difference",
        ),
        "control_text": Reason(
            "a message contains the text of a control token",
            "set `tokenize.control_text: text`; if the tokenizer cannot encode it as ordinary "
            "text, remove it from the row",
        ),
    },
}
"""Step -> reason code in `quarantine` files -> meaning and remedy."""

WITH_REMEDY = {
    *("template_limit", "content_lost", "thought_lost", "no_reasoning"),
    *("starts_with_assistant", "no_stop", "stop_inside"),
    *("fields", "winner"),
}
"""Reason codes whose detail has a remedy for the row, better than the general one here."""

ROW_STEPS = tuple(QUARANTINE_REASONS)
"""Steps that may reject a row, in order; the limit of bad rows is checked after each."""

DROP_REASONS: dict[str, Reason] = {
    "over_seq_len": Reason(
        "longer than `pack.seq_len`",
        "raise it, or set `pack.over_length` to `truncate_turns` or `window`",
    ),
    "first_turn_too_long": Reason(
        "even the first turns alone are longer than `pack.seq_len`", "raise `pack.seq_len`"
    ),
    "nothing_trained": Reason("no trained token is left after truncation", "raise `pack.seq_len`"),
    "duplicate": Reason("repeats an earlier conversation", "set `dedup.exact: keep` to keep it"),
    "near_duplicate": Reason(
        "nearly repeats an earlier conversation", "set `dedup.near: keep`, or raise the threshold"
    ),
    "contaminated": Reason(
        "shares consecutive words with a benchmark",
        "set `audit.on_match: stop` to stop the run instead",
    ),
    "joined": Reason(
        "the message is part of the conversation at the first row of its tree", "no action needed"
    ),
    "other_path": Reason(
        "the message is not on a path that is read", "set `oasst_paths: all` to read all paths"
    ),
    "filtered": Reason("`where` is false or NULL for the row", "relax the expression to keep it"),
    "media": Reason(
        "the row has an image, audio, video or file, and its source has `media: drop_rows`",
        "set `media: drop_parts` to train the text without them",
    ),
    "sampled_out": Reason(
        "not chosen by the source's `weight` or `max_records`", "raise them to include more rows"
    ),
}
"""Reason code of rows dropped by a policy of the recipe -> meaning and remedy."""
