r"""Check that trained answers follow the prompt at inference, and end where generation ends.

The prompt of an answer is what a client would send: the messages before it, rendered by
`apply_chat_template` with `add_generation_prompt=True`. This module renders it in plain Jinja
(`plain_template`), independent of the code that made the text, and compares it with the text before
the answer's trained span.

    text     <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>
    prompt   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    trained                                                       Hello!<|im_end|>

An answer is correct if all of these hold:

- The text before it is the prompt, byte for byte. With `joined`, template text around earlier
  answers of the record may differ (an empty thinking block, `<|end|>` for `<|return|>`), but the
  text between the previous answer and this one may not.
- If the template has a thinking switch, the prompt matches the answer's mode, and its reasoning is
  trained.
- It ends with a stop token and contains none except in the row's own text, both as text and as ids.

Answers that are trained in part (weights of parts, `reasoning: train_last`) are only counted.

Shards of up to 2,000 records are checked completely. For larger ones, 250 records are sampled
across the shapes of conversations (roles, fields, trained messages), at most 32 of each; the sample
is the same in every run. In long conversations only some answers are checked.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.auditing.plain_template import PlainTemplate, PromptError, open_template
from packhouse.auditing.token_checks import NUM_WORST, Side, read_sides
from packhouse.recipe import FormatConfig, Recipe
from packhouse.recipe.sections import is_chat
from packhouse.records.arrays import Bools, Int64s, one_chunk
from packhouse.records.conversation_shapes import has_thinking
from packhouse.records.message_rules import ASSISTANT, FlatMessages
from packhouse.render.template_arguments import Messages
from packhouse.system.wording import counted
from packhouse.system.worker import at
from packhouse.tokenize.encoders import TokenizerSnapshot
from packhouse.tokenize.tokenizer_loading import load_snapshot

MAX_RECORDS = 2_000
"""Up to this many records of a shard are all checked; otherwise a sample is."""
NUM_SAMPLED = 250  # a check of 1,000 took 5 of 18 s of CPU for 20,000 chats with Qwen3
# With 32, a fault in 3% of a shape is missed in 38% of shards. Of 100,000 chats, 2,000 prompts took
# 3.7 s and 768 take 1.0 s.
NUM_OF_SHAPE = 32
"""Of a larger shard, at most so many records of each shape are checked: the template writes all
records of a shape in the same way, up to what it asks about their texts."""
MAX_MESSAGES = 2_000
"""Maximum messages rendered for the prompts of one record; beyond it only some answers are
checked, because the work grows with the square of the number of turns."""

THOUGHT_LOST = "its reasoning is not trained"

# Most spans of partly trained answers in a record that are assigned to answers. `_num_spans` then
# has at most 33 states per answer, and tries up to 33 numbers of spans from each.
_MAX_SPARE = 32
_SHOWN = 80  # characters shown of texts that differ
_BATCH = 256
_THINK_TAG = re.compile("</?think>")


def has_prompts(config: FormatConfig) -> bool:
    """Return True if answers have a prompt to check: a chat template, and not `train_on: all`."""
    name = config.template
    return is_chat(name) and not name.startswith("dart-math/") and config.train_on != "all"


class _Answer(NamedTuple):
    """A message that should be trained."""

    number: int
    is_assistant: bool
    """False for a turn of another role that the row's weights train."""
    is_partial: bool
    """True if only a part of it may be trained."""
    texts: tuple[str, ...]
    """Texts of the row, without white space."""
    thought: str
    """Reasoning; empty if the row has none."""


@dataclass(slots=True)
class _Record:
    """A trained record."""

    place: dict[str, object]
    """Its source, row and record id."""
    messages: Messages
    """Messages in the form that the template takes."""
    tools: object
    arguments: Mapping[str, object]
    answers: list[_Answer]
    row_thinks: bool
    """True if any record of the same row has reasoning."""
    text: bytes
    spans: list[tuple[int, int]]
    content: list[tuple[int, int]]
    ids: list[list[int]] | None
    """Token ids of each span; None if unknown."""


class _Conversation(NamedTuple):
    """Columns of a conversation, schema VALIDATED."""

    source: str
    row: int
    record_id: str
    messages: list[dict[str, Any]]
    tools: str | None
    arguments: str | None


_TEXT = ("text", "trained_spans", "content_spans")
"""Columns of its text, schema FORMATTED."""
_TOKENS = ("input_ids", "trained_ranges")
"""Columns of its tokens, schema TOKENIZED."""

_Fault = tuple[str, str, str]
"""Problem, actual text and expected text."""
_PARTIAL: _Fault = ("", "", "")
"""Not a fault: a generation block begins inside the answer, so it is trained in part."""


@dataclass(kw_only=True, slots=True)
class InferenceCounts:
    """Counts of trained records and their answers."""

    records: int = 0
    records_checked: int = 0
    answers: int = 0
    """Answers of all records, whether checked or not."""
    answers_checked: int = 0
    answers_after_prompt: int = 0
    """Checked answers that follow their prompt."""
    completions_stopped: int = 0
    """Checked answers that end with their only stop token."""
    partly_trained: int = 0
    """Answers of the checked records that are trained in part, and so not compared."""


_COUNTS = tuple(each.name for each in fields(InferenceCounts))


def check_prompts(
    conversations: Path,
    formatted: Path,
    tokenized: Path,
    rejected: tuple[Path, Path] | None,
    recipe: Recipe,
    date: str | None,
    cache: Path | None,
) -> dict[str, object]:
    """Compare the answers of a shard with the prompts at inference.

    Args:
        conversations: rendered conversations: `examples.arrow` or `validated.arrow`.
        formatted: their texts.
        tokenized: their tokens.
        rejected: for pairs, conversations and texts of the rejected sides.
        recipe: recipe of the run.
        date: date on which the texts were rendered; None if the template prints none.
        cache: folder of tokenizer snapshots.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    sides = read_sides(conversations, formatted, tokenized, rejected)
    allows_control = recipe.tokenize.control_text == "allow"
    template = open_template(recipe, snapshot, date)
    return audit_inference(sides, snapshot, recipe.format, template, allows_control=allows_control)


def audit_inference(
    sides: Sequence[Side],
    snapshot: TokenizerSnapshot,
    config: FormatConfig,
    template: PlainTemplate,
    *,
    allows_control: bool = False,
) -> dict[str, object]:
    """Compare trained answers with the prompts and the stop tokens at inference.

    Args:
        sides: records; for pairs, the chosen and the rejected ones.
        snapshot: tokenizer.
        config: format settings.
        template: renders the prompts.
        allows_control: True if control tokens in the row's own text are tokenized as such.

    Returns:
        Plain JSON: `turns`; `counts` (`InferenceCounts`); `worst`, faults with `finding`,
        `source`, `row`, `record_id`, `value` (number of the message), `what`, `text` and
        `expected`.
    """
    check = _Check(config, snapshot, template, allows_control)
    for side in sides:
        for record in check.records_of(side):
            check.add(record)
    return {"turns": config.turns, "counts": asdict(check.counts), "worst": check.worst}


@dataclass(slots=True)
class _Check:
    """Checks the records of a shard and counts the results."""

    config: FormatConfig
    snapshot: TokenizerSnapshot
    template: PlainTemplate
    allows_control: bool
    counts: InferenceCounts = field(default_factory=InferenceCounts)
    worst: list[dict[str, object]] = field(default_factory=list)

    def records_of(self, side: Side) -> Iterator[_Record]:
        """Yield the records of a side to check, and count all of them."""
        ids = one_chunk(side.formatted["record_id"])
        known = one_chunk(side.conversations["record_id"])
        talks, aligned = side.conversations, np.arange(len(ids))
        if not known.equals(ids):
            places = pc.index_in(ids, value_set=known).to_numpy(zero_copy_only=False)
            aligned = np.flatnonzero(places >= 0)  # False for NaN: no conversation with that id
            talks = talks.take(pa.array(places[aligned].astype(np.int64)))
        messages = FlatMessages.of_table(talks)
        weights = messages.decide_weights(self.config)
        weights = weights * np.repeat(pc.fill_null(one_chunk(talks["weight"]), 1), messages.counts)
        is_answer = (messages.roles == ASSISTANT) & (weights > 0)
        has_answer = messages.sums(is_answer) > 0
        chosen = _choose(talks, messages, weights > 0, has_answer)
        self.counts.records += int(has_answer.sum())
        self.counts.answers += int(is_answer.sum())
        self.counts.records_checked += len(chosen)
        texts = side.formatted.take(pa.array(aligned[chosen]))
        tokens = pc.index_in(texts["record_id"], value_set=one_chunk(side.tokenized["record_id"]))
        tokenized = side.tokenized.select(_TOKENS)
        # Look at all records, because another record of the same row may have the reasoning.
        thoughts = FlatMessages.of_table(side.conversations)
        thinks = pa.array(thoughts.sums(has_thinking(thoughts)) > 0)
        thinking = {*_rows(side.conversations.select(["source", "row"]).filter(thinks))}
        for first in range(0, len(chosen), _BATCH):
            numbers = chosen[first : first + _BATCH]
            for number, columns, text, token in zip(
                numbers.tolist(),
                _rows(talks.select(_Conversation._fields).take(pa.array(numbers))),
                _rows(texts.select(_TEXT).slice(first, _BATCH)),
                tokens[first : first + _BATCH].to_pylist(),
                strict=True,
            ):
                talk = _Conversation(*columns)
                own = weights[slice(*messages.offsets[number : number + 2])].tolist()
                its_tokens = None if token is None else next(_rows(tokenized.slice(token, 1)))
                row_thinks = (talk.source, talk.row) in thinking
                yield self._record(talk, text, its_tokens, own, row_thinks)

    def _record(
        self,
        talk: _Conversation,
        written: tuple[Any, ...],
        tokenized: tuple[Any, ...] | None,
        weights: list[float],
        row_thinks: bool,
    ) -> _Record:
        raw = [{k: v for k, v in message.items() if v is not None} for message in talk.messages]
        system, tools = self.config.system, self.config.chat_template_kwargs.get("tools")
        if system is not None and all(message["role"] != "system" for message in raw):
            raw, weights = [{"role": "system", "content": system}, *raw], [0.0, *weights]
        text, spans, content_spans = written[0], _pairs(written[1]), _pairs(written[2])
        input_ids, ranges = tokenized or ([], [])
        has_ids = len(ranges) == len(spans)
        ids = [input_ids[start:end] for start, end in _pairs(ranges)] if has_ids else None
        answers = []
        for number, (message, weight) in enumerate(zip(raw, weights, strict=True)):
            if weight <= 0:
                continue
            content, thought = message["content"], message.get("reasoning", "").strip()
            has_tags = _THINK_TAG.search(content) is not None
            is_assistant = message["role"] == "assistant"
            is_partial = "part_weights" in message or not is_assistant
            if self.config.reasoning == "train_last":
                # The record does not show which question is the last one.
                is_partial |= bool(thought) or has_tags
            # Templates may remove reasoning between tags from a content.
            known = () if has_tags and not is_partial else (_packed(content),)
            answers.append(_Answer(number, is_assistant, is_partial, known, thought))
        return _Record(
            place={"source": talk.source, "row": talk.row, "record_id": talk.record_id},
            messages=self.template.fit(raw),
            tools=json.loads(talk.tools) if talk.tools else tools,
            arguments=json.loads(talk.arguments or "{}"),
            answers=answers,
            row_thinks=row_thinks,
            text=text.encode(),
            spans=spans,
            content=content_spans,
            ids=ids,
        )

    def add(self, record: _Record) -> None:
        """Check the answers of a record."""
        at("{source} row {row}".format(**record.place))
        counts = self.counts
        texts = [_packed(record.text[a:b].decode(errors="replace")) for a, b in record.spans]
        answers: list[tuple[_Answer, int | None]] = []
        """Answers that are trained as a whole, with their span; None if there is none."""
        place = 0
        of_answers = _num_spans(record.answers, texts)
        for answer, num_spans in zip(record.answers, of_answers, strict=True):
            own = (*answer.texts, _packed(answer.thought))
            is_whole = num_spans == 1 and (
                not answer.is_partial or all(text in texts[place] for text in own)
            )
            if answer.is_assistant and (is_whole or not answer.is_partial):
                answers.append((answer, place if is_whole else None))
            else:
                counts.partly_trained += answer.is_assistant
            place += num_spans
        work = sum(answer.number for answer, _ in answers)
        if work > MAX_MESSAGES:  # check a sample with the first and the last answer
            number = min(max(2, MAX_MESSAGES * len(answers) // work), len(answers))
            chosen = np.linspace(0, len(answers) - 1, num=number).round().astype(np.int64)
            answers = [answers[each] for each in np.unique(chosen).tolist()]
        for answer, index in answers:
            fault: _Fault | None = "it has no trained span", "", ""
            if index is not None:
                fault = self._prompt_fault(record, answer, index)
            if fault is _PARTIAL:
                counts.partly_trained += 1
                continue
            counts.answers_checked += 1
            counts.answers_after_prompt += fault is None
            stop_fault = None if index is None else self._stop_fault(record, index)
            counts.completions_stopped += index is not None and stop_fault is None
            for finding, each in (("other_prompts", fault), ("other_stops", stop_fault)):
                num_known = sum(worst["finding"] == finding for worst in self.worst)
                if each is None or num_known >= NUM_WORST:
                    continue
                said = dict(zip(("what", "text", "expected"), each, strict=True))
                where = record.place | {"value": answer.number}
                self.worst.append({"finding": finding, **where, **said})

    # A template behaves differently in other places: by a rule learned from two probes,
    # 375 of 1,134 answers (21 templates) had another prompt or completion than at inference.
    def _prompt_fault(self, record: _Record, answer: _Answer, index: int) -> _Fault | None:
        """Return the fault in an answer's prompt, or None."""
        template, (start, end) = self.template, record.spans[index]
        before = record.text[:start].decode(errors="replace")
        joint = 0
        if self.config.turns == "joined" and index > 0:
            joint = len(record.text[: record.spans[index - 1][1]].decode(errors="replace"))
        first = ""
        messages = record.messages[: answer.number + 1]
        for settings, is_right in self._modes(record, answer):
            given = record.tools, {**record.arguments, **settings}
            try:
                prompt = template.render(messages[:-1], *given, is_prompt=True)
            except PromptError as error:
                first = first or f"(the template refuses this prompt: {error})"
                continue
            first = first or prompt
            if not _follows(before, prompt, joint, template):
                inner = template.text_before_block(prompt, messages, *given)
                outer = before.removesuffix(inner)
                if outer != before and _follows(outer, prompt, joint, template):
                    return _PARTIAL
                continue
            if is_right is None:
                is_right = not self._can_be_plain(record, answer, first)
            if not is_right:
                what = "it follows the prompt for the other thinking mode"
                return _difference(what, before, first)
            said = record.text[start:end].decode(errors="replace")
            if _packed(answer.thought) not in _packed(said):
                return THOUGHT_LOST, said[:_SHOWN], answer.thought[:_SHOWN]
            return None
        what = "the text before it is not its prompt"
        if not template.reads_prompt:
            what += ", and the template does not read add_generation_prompt"
        return _difference(what, before, first)

    def _modes(
        self, record: _Record, answer: _Answer
    ) -> Iterator[tuple[dict[str, object], bool | None]]:
        """Yield template arguments to try, the most likely first, and whether they are correct.

        None: correct only if the template cannot write the non-thinking prompt, which was yielded
        first, before the answer.

        If the row or the recipe sets the thinking switch, or the template has none, the arguments
        are used unchanged. Otherwise, an answer with reasoning must follow the thinking prompt. An
        answer in a row without any reasoning must follow the non-thinking prompt, if the template
        can write that. An answer without reasoning in a row that has some may follow either,
        because clients set the switch once for all answers to a question.
        """
        switch = self.template.switch
        if switch is None or switch[0] in record.arguments:
            yield {}, True
            return
        thinking, plain = ({switch[0]: value} for value in switch[1:])
        default = self.template.default_mode
        if answer.thought:
            yield thinking, True
            yield {}, bool(default)
            yield plain, False
        elif record.row_thinks:
            yield from ((settings, True) for settings in (thinking, plain, {}))
        else:
            yield plain, True
            yield {}, True if default is False else None
            yield thinking, None

    def _can_be_plain(self, record: _Record, answer: _Answer, prompt: str) -> bool:
        """Return True if the text of an answer starts with its non-thinking prompt."""
        assert self.template.switch is not None
        name, _, plain = self.template.switch
        given = record.tools, {**record.arguments, name: plain}
        messages = record.messages[: answer.number + 1]
        try:
            return self.template.render(messages, *given, is_prompt=False).startswith(prompt)
        except PromptError:
            return False

    def _stop_fault(self, record: _Record, index: int) -> _Fault | None:
        """Return the fault at the end of an answer, or None."""
        (start, end), known = record.spans[index], self.snapshot.added_tokens
        stops = [stop.encode() for stop in self.template.stop_tokens]
        said, due = record.text[start:end], " or ".join(self.template.stop_tokens)
        shown = said.decode(errors="replace")[-_SHOWN:]
        last = max((stop for stop in stops if said.endswith(stop)), key=len, default=b"")
        if not last or _is_content(record, end - len(last), end):
            return "it does not end with a stop token", shown, due
        # Python takes the first alternative that fits, so a token must come before its beginning.
        longest_first = sorted(stops, key=len, reverse=True)
        pattern = re.compile(b"|".join(map(re.escape, longest_first)))
        for match in pattern.finditer(record.text, start, end - len(last)):
            if not _is_content(record, *match.span()):
                upto = record.text[start : match.end()].decode(errors="replace")
                return "it contains a stop token", upto[-_SHOWN:], due
        if record.ids is None or last.decode() not in known:
            return None
        # By ids too: the text is right even if the stop token was encoded as several tokens of
        # plain text.
        own = record.ids[index]
        ids = {known[stop] for stop in self.template.stop_tokens if stop in known}
        if not own or own[-1] != known[last.decode()]:
            return "its tokens do not end with a stop token", shown, due
        if not self.allows_control and not ids.isdisjoint(own[:-1]):
            return "its tokens contain a stop token", shown, due
        return None


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each row, without the names of the columns."""
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def _pairs(spans: Sequence[Mapping[str, int]]) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in spans]


def _packed(text: str) -> str:
    """Remove white space, which templates add and strip."""
    return "".join(text.split())


def _choose(
    talks: pa.Table, messages: FlatMessages, is_trained: Bools, has_answer: Bools
) -> Int64s:
    """Return the rows to check: all if there are few, otherwise a sample spread evenly over shapes.

    Shapes a a a b with ids 3 1 2 4: first the lowest id of each shape (a1, b4), then a2, a3. At
    most `NUM_OF_SHAPE` of each shape, and `NUM_SAMPLED` in all.
    """
    rows = np.flatnonzero(has_answer)
    if len(rows) <= MAX_RECORDS:
        return rows
    # Bits 0 and 1 are the role, then one per flag: a trained answer (2) with a call is 2 + 8 + 16.
    codes = messages.roles.astype(np.int64)
    for bit, flag in enumerate([messages.has("reasoning"), messages.has("tool_calls"), is_trained]):
        codes |= flag.astype(np.int64) << (bit + 2)
    letters = pa.array([chr(ord("0") + code) for code in range(32)]).take(pa.array(codes))
    given = [pc.cast(pc.cast(one_chunk(talks[n].is_valid()), "int8"), "string")
             for n in ("tools", "arguments")]  # fmt: skip
    shapes = pc.binary_join_element_wise(messages.join(letters, ""), *given, " ")
    shape = np.asarray(shapes.take(pa.array(rows)).dictionary_encode().indices)
    names = one_chunk(talks["record_id"]).take(pa.array(rows))
    by_name = np.asarray(pc.array_sort_indices(names))
    order = by_name[np.argsort(shape[by_name], kind="stable")]
    # Three rows of shape 0 and one of shape 1: bounds [0 3], ranks [0 1 2 0].
    bounds = np.cumsum(np.bincount(shape)) - np.bincount(shape)
    rank = np.arange(len(order)) - bounds[shape[order]]
    number = min(NUM_SAMPLED, int((rank < NUM_OF_SHAPE).sum()))
    return np.sort(rows[order[np.lexsort((order, rank))[:number]]])


def _num_spans(answers: Sequence[_Answer], texts: Sequence[str]) -> list[int]:
    """Return how many spans each answer has: one, except for those that are trained in part.

    Args:
        answers: answers in order.
        texts: texts of the spans, without white space.
    """
    others = sum(not answer.is_partial for answer in answers)
    spare = len(texts) - others
    if others == len(answers) or not 0 <= spare <= _MAX_SPARE:
        return [int(place < len(texts)) for place in range(len(answers))]
    # Dynamic programming: `reached[i]` maps the number of spans used by the first i answers to the
    # number used before answer i. First require that each whole answer's text is in its span; if
    # that is impossible, go by order alone.
    for must_match in (True, False):
        reached: list[dict[int, int]] = [{0: 0}]
        for answer in answers:
            known: dict[int, int] = {}
            for taken in reached[-1]:
                if answer.is_partial:
                    for count in range(spare + 1):
                        known.setdefault(taken + count, taken)
                elif taken < len(texts) and (
                    not must_match or all(text in texts[taken] for text in answer.texts)
                ):
                    known.setdefault(taken + 1, taken)
            reached.append(known)
        if len(texts) in reached[-1]:
            counts, taken = [], len(texts)
            for known in reversed(reached[1:]):
                counts.append(taken - known[taken])
                taken = known[taken]
            return counts[::-1]
    return [int(place < len(texts)) for place in range(len(answers))]


def _follows(before: str, prompt: str, joint: int, template: PlainTemplate) -> bool:
    """Return True if the text before an answer is the prompt.

    Args:
        before: text before the answer.
        prompt: prompt at inference.
        joint: end of the previous answer in the record, if template text before it may differ;
            otherwise 0.
        template: tells template text from other text.
    """
    if before == prompt:
        return True
    new = before[joint:]
    if not joint or not prompt.endswith(new):
        return False
    rest, written = prompt[: len(prompt) - len(new)], before[:joint]
    # Everything after the previous answer's stop token must match, including white space. The
    # exception is a stop token that follows white space: in `<|end|>\n</s>`, the prompt has
    # `<|end|>\n`.
    stop = next((stop for stop in template.stop_tokens if written.endswith(stop)), "")
    if rest[-1:].isspace() and not written.removesuffix(stop)[-1:].isspace():
        return False
    return not template.differ_in_rows(written, rest)


def _is_content(record: _Record, start: int, end: int) -> bool:
    """Return True if part of the text [start, end) is the row's own content."""
    return any(a < end and start < b for a, b in record.content)


def _difference(what: str, text: str, expected: str) -> _Fault:
    """Return a fault with both texts, cut shortly after their first difference."""
    # By halving, because with `turns: whole` most answers may differ from their prompt: 22 us for
    # texts of 11 KB, and 1,160 us for one character after the other.
    equal, differ = 0, min(len(text), len(expected)) + 1
    while differ - equal > 1:
        middle = (equal + differ) // 2
        if text[:middle] == expected[:middle]:
            equal = middle
        else:
            differ = middle
    cut = equal + _SHOWN // 2
    return what, text[:cut][-_SHOWN:], expected[:cut][-_SHOWN:]


def combine_inference(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the results of shards.

    Args:
        shards: results of `audit_inference`, each with its `source`.

    Returns:
        `turns`; counts in `dataset` and `sources`; in `worst`, the first faults of each source.
    """
    total = Counter[str]()
    sources = defaultdict[str, Counter[str]](Counter)
    faults = defaultdict[tuple[str, str], list[Any]](list)  # of each source and finding
    for found in shards:
        for counts in (sources[found["source"]], total):
            counts.update(found["counts"])
        for fault in found["worst"]:
            faults[found["source"], fault["finding"]].append(fault)
    return {
        "turns": shards[0]["turns"],
        "dataset": {name: total[name] for name in _COUNTS},
        "sources": {
            source: {name: counts[name] for name in _COUNTS}
            for source, counts in sorted(sources.items())
        },
        "worst": [fault for key in sorted(faults) for fault in faults[key][:NUM_WORST]],
    }


def inference_line(audit: Mapping[str, Any]) -> str:
    """Return a one-line summary; empty if nothing was checked.

    Example:
        >>> counts = {"records": 9, "records_checked": 9, "answers": 90, "answers_checked": 12,
        ...     "answers_after_prompt": 12, "completions_stopped": 11, "partly_trained": 0}
        >>> found = {"inference": {"turns": "joined", "dataset": counts}}
        >>> inference_line(found)  # doctest: +ELLIPSIS
        'inference: of 12 answers compared (90 in all), 12 follow the inference prompt and 11 ...'
    """
    found = audit.get("inference")
    if not found:
        return ""
    known = found["dataset"]
    counts = InferenceCounts(**{name: known.get(name, 0) for name in _COUNTS})
    if not counts.records_checked:
        return ""
    answers, right, total = counts.answers_checked, counts.answers_after_prompt, counts.answers
    stopped, partly = counts.completions_stopped, counts.partly_trained
    sampled = f" compared ({total:,} in all)" if answers + partly < total else ""
    follow = counted(right, "follows", "follow")
    end = counted(stopped, "ends with its", "end with their")
    line = (
        f"inference: of {counted(answers, 'answer')}{sampled}, {follow} the inference prompt and "
        f"{end} only stop token"
    )
    if counts.records_checked < counts.records:
        line += f"; {counts.records_checked:,} of {counted(counts.records, 'record')} checked"
    if partly:
        line += f"; {counted(partly, 'answer')} trained in part"
    if found["turns"] == "whole" and min(right, stopped) < answers:
        line += (
            ". The model would not generate the other answers; set format.turns to joined or exact"
        )
    return line
