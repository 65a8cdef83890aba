"""Stand-ins for the model families whose chat templates TRL ships, and their inference requests.

A stand-in has Qwen3's vocabulary, the family's control tokens and EOS, and the tokens at which the
vendor's `generation_config.json` stops generation. Templates are read from the installed TRL.
`prompt` and `finished` show what an inference engine and a client see: transformers' own
`apply_chat_template`, without any code of packhouse.

`python -m tests.templates.families` prints the table of families of docs/masks.md.
"""

import copy
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.render import Rendered, make_renderer
from packhouse.tokenize import load_snapshot
from packhouse.tokenize.encoders import TokenizerSnapshot
from tests.conftest import find_shared
from tests.templates.toys import make_table

Messages = list[dict[str, Any]]
CONTROL = re.compile(
    r"<\|[^<>\s{}%/|]{1,40}\|?>|<[a-z_]+\|>|<\uff5c[^<>\s]{2,40}\uff5c>"
    r"|\[gMASK\]|<sop>|<(?:start|end)_of_(?:turn|image|utterance)>|</?arg_(?:key|value)>"
    r"|</?tool_call>|</?tool_response>|</?think>"
)
"""Control tokens of the vendors' tokenizers, as their templates write them."""


class Vendor(NamedTuple):
    """Tokens of a vendor's tokenizer, including those at which its models stop."""

    bos: str
    eos: str
    stops: tuple[str, ...] = ()
    """Other tokens in `eos_token_id` of `generation_config.json`."""


VENDORS = {
    "cohere": Vendor("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Vendor(
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
    ),
    "diffusion_gemma": Vendor("<bos>", "<eos>", ("<turn|>", "<|tool_response>")),
    "gemma4": Vendor("<bos>", "<eos>", ("<turn|>", "<|tool_response>")),
    "gemma": Vendor("<bos>", "<eos>", ("<end_of_turn>",)),
    "glm": Vendor("", "<|endoftext|>", ("<|user|>", "<|observation|>")),
    "gptoss": Vendor("<|startoftext|>", "<|return|>", ("<|endoftext|>", "<|call|>")),
    "idefics3": Vendor("<|begin_of_text|>", "<|eot_id|>", ("<end_of_utterance>",)),
    "lfm2": Vendor("<|startoftext|>", "<|im_end|>"),
    "llama3": Vendor("<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>")),
    "llava_next": Vendor("<s>", "</s>"),
    "muse_glimmer": Vendor("<|begin_of_text|>", "<|eot|>"),
    "nemotron_3": Vendor("<s>", "<|im_end|>", ("</s>",)),
    "phi3": Vendor("<s>", "<|endoftext|>", ("<|end|>",)),
    "qwen": Vendor("", "<|im_end|>", ("<|endoftext|>",)),
    "smolvlm": Vendor("<|im_start|>", "<end_of_utterance>"),
}
"""By prefix of a template's name; the first match counts."""

_PARTS = ("idefics3", "llava_next", "smolvlm")
_TEXT_ARGUMENTS = ("deepseekv3.jinja", "deepseek_r1_distill")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with the tokenizer and the stop tokens of its vendor."""

    name: str
    source: str
    vendor: Vendor

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.vendor.eos, *self.vendor.stops)

    @property
    def has_content_parts(self) -> bool:
        """True if clients send contents as lists of parts."""
        return self.name.startswith(_PARTS)

    @property
    def has_text_arguments(self) -> bool:
        """True if the template joins arguments of calls to text."""
        return self.name.startswith(_TEXT_ARGUMENTS)

    def base(self, eos: str) -> "Family":
        """The template on a base checkpoint, whose files name `eos` and no other stop token."""
        return replace(self, vendor=self.vendor._replace(eos=eos, stops=()))

    def with_template(self, source: str, *stops: str) -> "Family":
        """The tokenizer with another template and its additional stop tokens."""
        vendor = self.vendor._replace(stops=(*self.vendor.stops, *stops))
        return replace(self, name="toy", source=source, vendor=vendor)


def names() -> list[str]:
    """Templates that the installed TRL ships."""
    folder = files("trl") / "chat_templates"
    return sorted(f.name for f in folder.iterdir() if f.name.endswith(".jinja"))


CHOSEN = [
    f"{name}.jinja"
    for name in (
        *("cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma", "gemma3"),
        *("gemma4", "gemma4_v5", "glm4moe", "gptoss", "idefics3"),
        *("lfm2_2_5_v2", "llama3_2", "llava_next", "muse_glimmer", "nemotron_3_nano", "phi3_5"),
        *("qwen2_5", "qwen3", "qwen3_training", "qwen3_6", "qwen3_8", "smolvlm"),
    )
]
"""At least one of TRL's 72 templates for each vendor and each path of the rule.

The others write the same turns as one of these, with other words in the system turn.
"""

SPLITTING = ("deepseek_r1_distill", "diffusion_gemma", "gemma4", "gemma4_v5", "glm4moe", "gptoss")
SPLITTING += ("lfm2_2_5_v2", "muse_glimmer", "nemotron_3_nano", "qwen3", "qwen3_6", "qwen3_8")
"""Templates that write a turn differently when later turns follow."""


def cases(*turns: str) -> list[tuple[str, str]]:
    """Each chosen template with the first kind of turns, and those that split rows with each."""
    return [
        (name, kind)
        for name in CHOSEN
        for kind in turns[: None if name.removesuffix(".jinja") in SPLITTING else 1]
    ]


@cache
def family(name: str) -> Family:
    vendor = next(made for prefix, made in VENDORS.items() if name.startswith(prefix))
    source = (files("trl") / "chat_templates" / name).read_text("utf-8")
    return Family(name=name, source=source, vendor=vendor)


def _call(city: str, number: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, thought: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        made["reasoning"] = thought
    if calls:
        made["tool_calls"] = json.dumps(calls)
    return made


def _result(text: str, number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "content": text,
        "tool_call_id": f"call0000{number}",
        "name": "get_weather",
    }


_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "City"}},
    "required": ["city"],
}
_WEATHER = {"name": "get_weather", "description": "Return the weather.", "parameters": _PARAMETERS}
TOOLS = [{"type": "function", "function": _WEATHER}]
_ASKED = _user("Weather in Rome?")
_TWICE = _user("What is two?"), _user("And three?")

SHAPES: dict[str, Messages] = {
    "chat2": [_TWICE[0], _answer("It is 2."), _TWICE[1], _answer("It is 3.")],
    "sys": [{"role": "system", "content": "Be kind."}, _TWICE[0], _answer("It is 2.")],
    "think2": [
        *(_TWICE[0], _answer("It is 2.", "Counting up.")),
        *(_TWICE[1], _answer("It is 3.", "One further.")),
    ],
    "mixed": [_TWICE[0], _answer("It is 2."), _TWICE[1], _answer("It is 3.", "One further.")],
    "tools": [
        *(_ASKED, _answer("", None, _call("Rome", 1))),
        *(_result("Sunny now", 1), _answer("It is sunny.")),
    ],
    "toolsthink": [
        *(_ASKED, _answer("", "Must look.", _call("Rome", 1))),
        *(_result("Sunny now", 1), _answer("It is sunny.", "Tool said so.")),
    ],
    "parallel": [
        *(_user("Rome and Oslo?"), _answer("", None, _call("Rome", 1), _call("Oslo", 2))),
        *(_result("Sunny now", 1), _result("Snowy now", 2), _answer("Sun and snow.")),
    ],
    "agent": [
        *(_ASKED, _answer("Let me look.", "Must look.", _call("Rome", 1))),
        *(_result("Sunny now", 1), _answer("", "And Oslo.", _call("Oslo", 2))),
        *(_result("Snowy now", 2), _answer("Sun and snow.", "Both known.")),
        *(_user("Thanks a lot!"), _answer("Welcome.", "They thank.")),
    ],
    "callast": [_ASKED, _answer("", None, _call("Rome", 1))],
    "lookthink": [  # one exchange, with reasoning only before the call
        *(_ASKED, _answer("", "Must look.", _call("Rome", 1))),
        *(_result("Sunny now", 1), _answer("It is sunny.")),
    ],
    "answerthink": [  # the other way round: the call follows the thinking prompt too
        *(_ASKED, _answer("", None, _call("Rome", 1))),
        *(_result("Sunny now", 1), _answer("It is sunny.", "Tool said so.")),
    ],
    "textcall": [
        *(_ASKED, _answer("Let me look.", None, _call("Rome", 1))),
        *(_result("Sunny now", 1), _answer("It is sunny.")),
        *(_user("Thanks a lot!"), _answer("Welcome.")),
    ],
}
"""Conversations as canonical messages: one or two questions, reasoning, calls, an agent's run."""


def tools_of(shape: str) -> list[dict[str, Any]] | None:
    return TOOLS if any("tool_calls" in m for m in SHAPES[shape]) else None


def has_thoughts(messages: Messages) -> bool:
    return any(m.get("reasoning") for m in messages)


def texts_of(message: dict[str, Any]) -> list[str]:
    """Return a message's own texts: reasoning, content, names and argument values of its calls."""
    calls = [call["function"] for call in json.loads(message.get("tool_calls") or "[]")]
    named = [text for call in calls for text in (call["name"], *call["arguments"].values())]
    return [t for t in (message.get("reasoning"), message.get("content"), *named) if t]


@cache
def tokenizer() -> Any:
    """Qwen3's tokenizer, with every control token that one of the templates writes."""
    from transformers import AutoTokenizer

    shared = find_shared()
    assert shared is not None
    made = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3", local_files_only=True)
    wanted = {token for name in names() for token in CONTROL.findall(family(name).source)}
    for vendor in VENDORS.values():
        wanted |= {vendor.bos, vendor.eos, *vendor.stops} - {""}
    made.add_special_tokens(
        {"extra_special_tokens": sorted(wanted - set(made.added_tokens_encoder))}
    )
    return made


@cache
def _snapshot() -> TokenizerSnapshot:
    with TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        return load_snapshot(Path(folder))


def snapshot_of(of: Family, **changes: Any) -> TokenizerSnapshot:
    tokens = {"bos_token": of.vendor.bos, "eos_token": of.vendor.eos, "pad_token": "<|endoftext|>"}
    facts = {
        "special_tokens": {name: text for name, text in tokens.items() if text},
        "chat_template": of.source,
        "stop_tokens": {
            **dict.fromkeys(of.vendor.stops, "generation_config.json"),
            of.vendor.eos: "tokenizer",
        },
    }
    return replace(_snapshot(), **(facts | changes))


def client_messages(of: Family, messages: Messages) -> Messages:
    """Messages as a client sends them: parsed calls, reasoning under each of its usual names."""
    made: Messages = []
    for message in messages:
        sent: dict[str, Any] = {
            key: message[key]
            for key in ("role", "content", "tool_call_id", "name")
            if key in message
        }
        if message.get("reasoning"):
            sent |= dict.fromkeys(("thinking", "reasoning_content"), message["reasoning"])
        if "tool_calls" in message:
            sent["tool_calls"] = json.loads(message["tool_calls"])
            if of.has_text_arguments:
                for call in sent["tool_calls"]:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if of.has_content_parts:
            sent["content"] = [{"type": "text", "text": message["content"]}] * bool(
                message["content"]
            )
        made.append(sent)
    return made


def render(
    of: Family, messages: Messages, tools: Any = None, *, is_prompt: bool = False, **arguments: Any
) -> str:
    """Render with transformers; with `is_prompt`, the prompt that an engine sends to the model."""
    speaker = tokenizer()
    speaker.bos_token, speaker.eos_token = of.vendor.bos or None, of.vendor.eos
    text = speaker.apply_chat_template(
        client_messages(of, messages),
        tools=copy.deepcopy(tools),
        chat_template=of.source,
        add_generation_prompt=is_prompt,
        tokenize=False,
        **arguments,
    )
    assert isinstance(text, str)
    return text


@cache
def switch_of(of: Family) -> str | None:
    """Return the argument that turns thinking in the prompt on and off, if the template has one."""
    for name in ("enable_thinking", "thinking", "thinking_mode"):
        if name not in of.source:
            continue
        for shape, k in (("chat2", 1), ("tools", 3)):
            try:
                tails = {
                    _after_texts(
                        render(
                            of, SHAPES[shape][:k], tools_of(shape), is_prompt=True, **{name: on}
                        ),
                        SHAPES[shape][:k],
                    )
                    for on in (True, False)
                }
            except Exception:  # the template does not render calls
                continue
            if len(tails) == 2:
                return name
    return None


def own_texts(messages: Messages) -> re.Pattern[str]:
    texts = {text for message in messages for text in texts_of(message)}
    return re.compile("|".join(map(re.escape, sorted(texts, key=lambda t: (-len(t), t)))))


def _after_texts(text: str, messages: Messages) -> str:
    return text[max(found.end() for found in own_texts(messages).finditer(text)) :]


def arguments_of(of: Family, messages: Messages, k: int) -> list[dict[str, bool]]:
    """Return arguments that a client may send for answer k: with or without thinking.

    A client decides once per exchange. If the answer has no reasoning but its exchange has, the
    thinking prompt comes first; the other one is for templates that cannot follow it.
    """
    name = switch_of(of)
    if name is None:
        return [{}]
    if messages[k].get("reasoning"):
        return [{name: True}]
    asked = max((i for i, m in enumerate(messages[:k]) if m["role"] == "user"), default=0)
    end = next((i for i in range(k, len(messages)) if messages[i]["role"] == "user"), len(messages))
    return [{name: True}, {name: False}] if has_thoughts(messages[asked:end]) else [{name: False}]


class Answer(NamedTuple):
    """One trained answer of a record."""

    message: int
    before: str
    """The record's text up to the completion."""
    completion: str


Records = list[list[Answer]]


class Outcome(NamedTuple):
    """packhouse's result for a shape: records, or the reason code of its refusal."""

    records: Records
    reason: str | None = None
    detail: str = ""


def answers_of(rendered: Rendered, number: int, train_on: str = "assistant") -> list[Answer]:
    """Return the trained answers of a formatted record; `train_on` is the default weight."""
    record = rendered.formatted.slice(number, 1).to_pylist()[0]
    example = rendered.examples.filter(_is_formatted(rendered)).slice(number, 1).to_pylist()[0]
    text = record["text"].encode()
    trained = [
        k
        for k, m in enumerate(example["messages"])
        if m["role"] == "assistant" and m["weight"] != 0
    ]
    if train_on == "last_assistant":
        trained = trained[-1:]
    spans = record["trained_spans"]
    assert len(spans) == len(trained), (trained, [text[s["start"] : s["end"]] for s in spans])
    return [
        Answer(k, text[: span["start"]].decode(), text[span["start"] : span["end"]].decode())
        for k, span in zip(trained, spans, strict=True)
    ]


def _is_formatted(rendered: Rendered) -> pa.Array:
    """Return the rows of `examples` that were not quarantined."""
    bad = {(r["source"], r["row"]) for r in rendered.quarantined.to_pylist()}
    pairs = rendered.examples.select(["source", "row"]).to_pylist()
    return pa.array([(r["source"], r["row"]) not in bad for r in pairs])


def outcome(of: Family, shape: str, turns: str = "joined", **config: Any) -> Outcome:
    return outcome_of(of, SHAPES[shape], tools_of(shape), turns=turns, **config)


def rendered_by_packhouse(of: Family, messages: Messages, tools: Any, **config: Any) -> Rendered:
    renderer = make_renderer(FormatConfig(**config), snapshot_of(of))
    tools = [json.dumps(tools)] if tools else None
    return renderer.render(make_table([copy.deepcopy(messages)], tools=tools))


def outcome_of(of: Family, messages: Messages, tools: Any, **config: Any) -> Outcome:
    try:
        rendered = rendered_by_packhouse(of, messages, tools, **config)
    except TemplateError as error:
        return Outcome([], "TemplateError", str(error))
    if rendered.quarantined.num_rows:
        bad = rendered.quarantined.to_pylist()[0]
        return Outcome([], bad["reason"], bad["detail"])
    train_on = config.get("train_on", "assistant")
    return Outcome([answers_of(rendered, n, train_on) for n in range(rendered.formatted.num_rows)])


def check(
    of: Family, messages: Messages, tools: Any, turns: str, records: Records
) -> Iterator[str]:
    """Compare the prompts and completions of a conversation with those of inference."""

    def fault(what: str, expected: object, got: object) -> str:
        return f"{what}\n    expected {expected!r}\n    got      {got!r}"

    everyone = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
    trained = [answer.message for record in records for answer in record]
    if sorted(trained) != everyone:
        yield fault("trained answers", everyone, trained)
    for record in records:
        previous: Answer | None = None
        for answer in record:
            k, before, completion = answer
            prompts = [
                render(of, messages[:k], tools, is_prompt=True, **arguments)
                for arguments in arguments_of(of, messages, k)
            ]
            is_exact = previous is None or turns != "joined"
            fits = [
                p
                for p in prompts
                if (p == before if is_exact else _continues(p, before, previous, messages[:k]))
            ]
            if not fits:
                expected, got = _first_difference(prompts[0], before)
                yield fault(f"prompt of message {k}", expected, got)
            yield from (
                fault(f"completion of message {k}: {what}", expected, completion)
                for what, expected in _bad_completion(of, messages[k], completion)
            )
            if fits:
                for arguments in arguments_of(of, messages, k):
                    if render(of, messages[:k], tools, is_prompt=True, **arguments) == fits[0]:
                        end = render(of, messages[: k + 1], tools, **arguments)
                        if not _is_written(end, fits[0], completion, of.stops):
                            yield fault(
                                f"completion of message {k}: not as rendered",
                                end[-200:],
                                completion,
                            )
            previous = answer


def _continues(prompt: str, before: str, previous: Answer | None, messages: Messages) -> bool:
    """Return True if a record differs from the prompt only in text that the template adds.

    The own texts are the same in the same order, and the new part is the end of the prompt.
    """
    assert previous is not None
    own = own_texts(messages)
    start = len(previous.before) + len(previous.completion)
    new = before[start:]
    written = previous.before + previous.completion
    if own.findall(prompt) != own.findall(before) or not prompt.endswith(new):
        return False
    # "It is 2.<|return|>" in the record is "It is 2.<|end|>" in the prompt: a control token.
    end = written[max(found.end() for found in own.finditer(written)) :]
    rest = prompt.removesuffix(new)
    return rest.endswith(end) or bool(CONTROL.search(rest[-30:]) and rest.endswith((">", "]")))


def _bad_completion(
    of: Family, message: dict[str, Any], completion: str
) -> Iterator[tuple[str, object]]:
    own = texts_of(message)
    lost = [text for text in own if text not in completion]
    if lost:
        yield "texts missing", lost
    template = completion
    for text in own:
        template = template.replace(text, "")
    stops = re.findall("|".join(map(re.escape, of.stops)), template)
    if not completion.endswith(of.stops):
        yield "end", of.stops
    if len(stops) != 1:
        yield "stop tokens", stops


def _is_written(end: str, prompt: str, completion: str, stops: tuple[str, ...]) -> bool:
    """Return True if the template finishes the turn with this completion.

    Its stop token may belong to the next turn's header. If the finished conversation writes older
    turns differently from the prompt, the completion is searched for.
    """
    stop = next(s for s in stops if completion.endswith(s)) if completion.endswith(stops) else ""
    bare = completion.removesuffix(stop)
    if end.startswith(prompt):
        rest = end[len(prompt) :]
        return rest.startswith(completion) or rest.rstrip() == bare.rstrip()
    return completion in end or end.rstrip().endswith(bare.rstrip())


def _first_difference(expected: str, got: str) -> tuple[str, str]:
    n = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    at = max(0, n - 30)
    return f"...{expected[at : n + 90]}", f"...{got[at : n + 90]}"


LISTED = {
    "GLM-4.5, 4.6": "glm4moe",
    "gpt-oss": "gptoss",
    "Nemotron 3": "nemotron_3_nano",
    "Qwen3.8": "qwen3_8",
    "Qwen3.5, 3.6": "qwen3_6",
    "Qwen3": "qwen3",
    "Qwen2.5": "qwen2_5",
    "LFM2.5": "lfm2_2_5_v2",
    "Gemma 4": "gemma4_v5",
    "Gemma 3": "gemma3",
    "DeepSeek R1": "deepseek_r1_distill",
    "Muse Glimmer": "muse_glimmer",
    "Llama 3.1 to 3.3": "llama3_1",
    "Phi-3.5": "phi3_5",
    "Aya (Cohere)": "cohere2",
}
"""Families of the table in docs/masks.md, and the template used for each row."""

THOUGHT_END = "\n</think>\n\n"


def table() -> str:
    """Return the table of families of docs/masks.md, made from packhouse's renderings."""
    head = ["Family", "Samples", "A call ends with", "A new record starts", "Notes"]
    rows = [
        head,
        ["---"] * len(head),
        *(_row(label, family(f"{LISTED[label]}.jinja")) for label in LISTED),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(label: str, of: Family) -> list[str]:
    """Return the row of one family: sampled tokens, starts of its records, required settings."""
    notes = []
    made = outcome(of, "think2")
    if made.reason == "TemplateError":
        if outcome(of, "chat2").reason == "no_reasoning":
            notes.append(
                f"`thought_end: {json.dumps(THOUGHT_END)}`; rows without reasoning are refused"
            )
            made = outcome(of, "think2", thought_end=THOUGHT_END)
        else:
            notes.append("reasoning needs `reasoning: strip`")
            made = outcome(of, "chat2")
    sampled = made.records[-1][-1].completion
    for text, name in (("One further.", "THOUGHT"), ("It is 3.", "ANSWER")):
        sampled = sampled.replace(text, name)
    call = outcome(of, "callast")
    ends = next(
        (s for s in of.stops if call.records and call.records[0][0].completion.endswith(s)), ""
    )
    if not ends:
        notes.append("calls are refused")
    else:
        if outcome(of, "parallel").reason:
            notes.append("one call in a turn")
        if has_no_text_with_calls(of):
            notes.append("no text in a turn with a call")
    return [label, _code(sampled), _code(ends) if ends else "", _splits(of, made), "; ".join(notes)]


def has_no_text_with_calls(of: Family) -> bool:
    """Return True if the template refuses or loses a text before a call."""
    messages = copy.deepcopy(SHAPES["tools"])
    messages[1]["content"] = "Let me look."
    return outcome_of(of, messages, TOOLS).reason is not None


def _splits(of: Family, thoughts: Outcome) -> str:
    """Return where records start, with `joined` and with `exact`."""
    split = "after a thought" if len(thoughts.records) > 1 else "never"
    if thoughts.reason or outcome(of, "chat2").reason:
        return split
    if len(outcome(of, "mixed").records) > 1:
        starts = "where thinking starts"
        split = starts if split == "never" else f"{split}, {starts}"
    exact = {shape: len(outcome(of, shape, "exact").records) for shape in ("chat2", "tools")}
    if exact["tools"] > 1:
        return f"{split}; `exact`: at each answer"
    if exact["chat2"] > 1:
        return f"{split}; `exact`: at each question"
    return split


def _code(text: str) -> str:
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


if __name__ == "__main__":
    sys.stdout.write(table())
