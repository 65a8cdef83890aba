"""What each reason code says of a row, and what helps: of quarantined rows, and of dropped ones.

`packhouse quarantine ls` prints the remedy below the rows; the docs' reference is made of it. Codes
are part of published files and of the ledger, so they stay as they are.
"""

from typing import Literal, NamedTuple

TurnOrder = Literal[
    "system_not_first", "starts_with_assistant", "consecutive_user", "consecutive_assistant"
]
"""Orders of turns that `validate.refused_orders` may name; by default the template decides."""


class Reason(NamedTuple):
    """A reason code, for people."""

    meaning: str
    remedy: str


QUARANTINE_REASONS: dict[str, dict[str, Reason]] = {
    "validate": {
        "json": Reason("the row is not JSON", "fix it, or write the file with a JSON library"),
        "csv": Reason("the line is not one record", "put text with quotes or breaks in quotes"),
        "encoding": Reason(
            "bytes that are not UTF-8, or half of a surrogate pair",
            "set the `encoding` of the source, such as `cp1252`, if the file has another one",
        ),
        "cell": Reason(
            "a cell of the workbook holds an error, or a formula that nobody computed",
            "fix the formula, or open the workbook in a spreadsheet and save it",
        ),
        "control": Reason("a raw control character or NUL in a text", "escape or remove it"),
        "number": Reason(
            "NaN, Infinity, or a number that 64 bits cannot hold", "write null, or text in quotes"
        ),
        "duplicate_key": Reason("one object has a key twice", "keep the one that is meant"),
        "depth": Reason("nested deeper than 32", "flatten it, or keep it as JSON in a text"),
        "too_many_fields": Reason("the row has too many fields", "leave out what is not read"),
        "row_too_long": Reason("the row has too many bytes", "raise `validate.max_row_bytes`"),
        "not_an_object": Reason(
            "the row is a number, a text or a list", "set `format: messages` for lists of messages"
        ),
        "fields": Reason(
            "a field of the format is missing, or a CSV row is not as wide as the header",
            "name the file's with `fields: {output: answer}`; in CSV, quote text that holds commas",
        ),
        "type": Reason(
            "a value has another type than it must",
            "write text where text is due, in `select` by `cast(... as varchar)`; and whole "
            "numbers where ids and labels are",
        ),
        "media": Reason(
            "the row holds an image, sound, a video or a file, and packhouse packs text",
            "set `sources.N.media` to `drop_rows`, or to `drop_parts`, which trains the text "
            "alone; or list a field that is only a name of a file in `ignored_fields`",
        ),
        "label": Reason(
            "a label is not a class", "write 0, 1, ... or one of `label_names`, all in one way"
        ),
        "token_ids": Reason(
            "`input_ids` holds no tokens, or a number that is not an id", "write the ids again"
        ),
        "uneven": Reason(
            "a mask or positions are not as long as `input_ids`", "write a value for each token"
        ),
        "labels": Reason(
            "labels or masks contradict the ids, or there are none",
            "write `labels[i]` as `input_ids[i]` where a token is trained, else -100, unshifted",
        ),
        "boundaries": Reason(
            "what parts the records of a row contradicts itself",
            "keep one of `seq_lengths`, `cu_seqlens`, `position_ids`, and let it add up",
        ),
        "nothing_trained": Reason(
            "no token of the record is trained", "fix its mask, or take it out"
        ),
        "vocabulary": Reason(
            "an id that the tokenizer does not have", "name the tokenizer that made the rows"
        ),
        "padding": Reason(
            "pad tokens at either end that no mask leaves out",
            "write an `attention_mask`, or cut them off",
        ),
        "arguments": Reason(
            "arguments of the chat template that no template can have, or documents that are no "
            "list of objects",
            "write them as transformers takes them, or leave the field out: `ignored_fields`",
        ),
        "loss_weight": Reason(
            "a row's loss weight is not a number over 0", "write a number, or filter with `where`"
        ),
        "tools": Reason("tool definitions are not a list of objects", "write them as OpenAI does"),
        "tool_calls": Reason(
            "a tool call has no name, or arguments that are not an object",
            "write `function.name` and `function.arguments`",
        ),
        "empty_conversation": Reason("it holds no message", "take the row out"),
        "unknown_role": Reason(
            "a role outside of system, user, assistant, tool",
            "say who it is with `roles: {Customer: user}`; `packhouse init` proposes them",
        ),
        "system_not_first": Reason(
            "a system turn that is not the first message",
            "move it to the front, split the row, or allow it: `validate.refused_orders`",
        ),
        "starts_with_assistant": Reason(
            "the first turn is the assistant's",
            "put the question in front, drop the greeting, or allow it: `validate.refused_orders`",
        ),
        "tool_result_without_call": Reason(
            "a tool result that no call precedes", "add the call, or take the result out"
        ),
        "consecutive_user": Reason(
            "two user turns in a row", "join them, or allow it: `validate.refused_orders`"
        ),
        "consecutive_assistant": Reason(
            "two assistant turns in a row", "join them, or allow it: `validate.refused_orders`"
        ),
        "call_without_result": Reason(
            "a turn follows a tool call that has no result", "add the result, or end on the call"
        ),
        "no_assistant": Reason("nobody answers", "take the row out"),
        "expression": Reason(
            "`where` or `select` of its source fails on it",
            "fix the row, or take TRY_CAST(...) and TRY(...), which give NULL where they fail",
        ),
        "orphan": Reason(
            "the message answers one that is not in the file",
            "add its parent, or keep whole trees where `where` filters",
        ),
        "tree": Reason(
            "another row has the same `message_id`, or the row is of a tree", "keep one of them"
        ),
        "transcript": Reason(
            "the text does not begin with a speaker", "begin it with `Human:`, or take it out"
        ),
        "no_messages": Reason("a plug-in finds no conversation in the row", "take the row out"),
        "ends_on_user": Reason(
            "the last question has no answer",
            "set `validate.allow_ends_on_user`; the question is then not trained",
        ),
        "ends_on_tool": Reason(
            "the last message is a tool result", "add the answer to it, or end on the call"
        ),
        "no_prompt": Reason(
            "a preferred or rejected answer has no prompt before it",
            "give the row a `prompt`, or begin both conversations with it",
        ),
        "prompt_differs": Reason(
            "an answer is a conversation that begins with another prompt than the row's",
            "leave `prompt` out, or write the answer alone",
        ),
        "not_one_answer": Reason(
            "the prompt is not followed by exactly one assistant turn",
            "end the prompt before the last answer, or take the row out",
        ),
        "same_answers": Reason(
            "the chosen and the rejected answer are the same", "take the row out"
        ),
        "weight": Reason(
            "a preferred or rejected answer has a loss weight", "take the weight out of the row"
        ),
        "empty_prompt": Reason("a user turn without text", "take the row out"),
        "empty_answer": Reason(
            "an assistant turn without text, reasoning or tool call", "take the row out"
        ),
        "too_many_chars": Reason("a message is too long", "raise `validate.max_chars`"),
    },
    "format": {
        "template": Reason(
            "the template refuses the row, or has no place for a part of it",
            "do what the detail says; it may take another template, or a Jinja file that has the "
            "place",
        ),
        "template_limit": Reason(
            "the row takes too long to render, or holds too much text",
            "set `format.turns: whole`, split the conversation, or fix a template that recurses",
        ),
        "content_lost": Reason(
            "the template leaves out a text, a tool or a call",
            "do what the detail says, or give `format.template` a Jinja file that writes it; "
            "for Mistral v0.3's `mistral_system` does",
        ),
        "thought_lost": Reason(
            "the template leaves out the reasoning of a trained answer",
            "set `format.thought_end` to the text that goes between reasoning and answer, or "
            "`format.reasoning: strip` if the template can be asked without reasoning",
        ),
        "no_reasoning": Reason(
            "the prompt of inference opens a thought, and the answer has none",
            "give it reasoning (and set `format.thought_end` where the detail says so), give it "
            "the weight 0, or give `format.template` a Jinja file whose prompt opens no thought",
        ),
        "starts_with_assistant": Reason(
            "the first turn is the assistant's, and the template writes no prompt before it",
            "put the question in front, or give that message the weight 0",
        ),
        "no_stop": Reason(
            "no stop token follows an answer, so the model would not learn to stop",
            "name the token that ends it in `format.stop_tokens`",
        ),
        "stop_inside": Reason(
            "the template writes a stop token inside an answer, where the model would stop",
            "do what the detail says, or give the message the weight 0",
        ),
        "nothing_trained": Reason(
            "no turn of the row is trained",
            "look at `format.train_on` and at weights of messages; a label is trained with "
            "`format.template: classification`",
        ),
        "label": Reason("a label is outside of `label_names`", "name all classes"),
        "only_thinking": Reason(
            "nothing of an answer is left without its thinking",
            "give the message the weight 0, set `format.reasoning: keep`, or take the row out",
        ),
        "unclosed_thinking": Reason(
            "a `<think>` that nothing closes",
            "close it, give that message the weight 0, or set `format.reasoning: keep`",
        ),
    },
    "tokenize": {
        "empty": Reason("the text has no tokens", "take the row out"),
        "nothing_trained": Reason(
            "no token begins inside a trained span", "end the prompt with a line break"
        ),
        "prompt_differs": Reason(
            "the template or the tokenizer writes the prompt otherwise before each answer",
            "give both answers reasoning, or none (`format.reasoning: strip`); end the prompt with "
            "a line break; or take a template that writes prompts alike",
        ),
        "not_one_answer": Reason(
            "what is trained of an answer is not one run of tokens",
            "take a template that writes an answer in one piece",
        ),
        "same_answers": Reason(
            "both answers have the same tokens: the template leaves out where they differ",
            "take the row out, or a template that writes the difference",
        ),
        "control_text": Reason(
            "a content holds the text of a control token",
            "set `tokenize.control_text: text`; where the tokenizer cannot write it as text, "
            "take it out",
        ),
    },
}
"""Step -> reason code of `quarantine` files -> what it says."""

WITH_REMEDY = {
    *("template_limit", "content_lost", "thought_lost", "no_reasoning"),
    *("starts_with_assistant", "no_stop", "stop_inside"),
}
"""Reason codes whose details say what to do, which fits the row better than the remedy here."""

DROP_REASONS: dict[str, Reason] = {
    "over_seq_len": Reason(
        "longer than `pack.seq_len`",
        "raise it, or set `pack.over_length: truncate_turns`, `window`",
    ),
    "first_turn_too_long": Reason(
        "not even the first whole turns fit into `pack.seq_len`", "raise it"
    ),
    "nothing_trained": Reason("nothing of it is trained after it was cut", "raise `pack.seq_len`"),
    "duplicate": Reason("repeats an earlier conversation", "set `dedup.exact: keep` to keep it"),
    "near_duplicate": Reason(
        "nearly repeats an earlier conversation", "set `dedup.near: keep`, or a higher threshold"
    ),
    "contaminated": Reason(
        "shares a run of words with a benchmark", "set `audit.on_match: stop` to be told instead"
    ),
    "joined": Reason(
        "the message is part of the conversation at the first row of its tree", "nothing to do"
    ),
    "other_path": Reason(
        "the message is on no path of its tree that is taken", "set `oasst_paths: all` for more"
    ),
    "filtered": Reason(
        "`where` of its source is false or NULL for it", "widen the expression to keep it"
    ),
    "media": Reason(
        "the row holds an image, sound, a video or a file, and its source has `media: drop_rows`",
        "set `media: drop_parts` to train the text without them",
    ),
    "sampled_out": Reason(
        "not chosen by `weight` or `max_records` of its source", "raise them to take more"
    ),
}
"""Reason code of rows that a policy of the recipe drops -> what it says."""
