"""End to end: a tiny model overfitted on a published record generates the completion, and stops.

The client uses only the tokenizer's files: it calls `apply_chat_template` and `generate`.
"""

import json

import pytest

from tests.prepared import prepare_in

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("trl", reason="TRL is not installed")

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.templates.families import SHAPES, TOOLS, client_messages, family, tokenizer

pytestmark = pytest.mark.usefixtures("shared")

NUM_STEPS = 150
CLIENT = {
    "qwen3": {"enable_thinking": True},
    "glm4moe": {"enable_thinking": True},
    "gptoss": {},
}
"""Families, and the arguments of clients that ask the model to think."""


def save_tokenizer(of, folder):
    """A model's folder, as its vendor would publish it, without weights."""
    own = tokenizer()
    own.bos_token, own.eos_token = of.vendor.bos or None, of.vendor.eos
    own.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(of.source, "utf-8")
    ids = own.convert_tokens_to_ids(list(of.stops))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))


def overfitted(ids, labels, vocab_size):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=True,
        )
    )
    ids, labels = torch.tensor([ids]), torch.tensor([labels])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("name", CLIENT)
def test_a_model_trained_on_a_version_answers_a_client_and_stops(name, tmp_path):
    of, talk = family(f"{name}.jinja"), SHAPES["toolsthink"]
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_tokenizer(of, folder)
    version = prepare_in(
        tmp_path,
        [{"messages": client_messages(of, talk), "tools": TOOLS}],
        tokenizer=str(folder),
        dataset="one",
        seq_len=512,
    )
    (row,) = version.train
    row = {key: list(map(int, row[key])) for key in ("input_ids", "labels")}
    client = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    stops = client.convert_tokens_to_ids(list(of.stops))
    # The model knows only the ids of the record and the stop tokens; 152,000 would take minutes.
    known = sorted({*row["input_ids"], *stops})
    small = {token: number for number, token in enumerate(known)} | {-100: -100}
    model = overfitted(
        [small[token] for token in row["input_ids"]],
        [small[token] for token in row["labels"]],
        len(known),
    )
    answers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
    assert len(answers) == 2
    for number in answers:
        prompt = client.apply_chat_template(
            client_messages(of, talk)[:number],
            tools=TOOLS,
            add_generation_prompt=True,
            return_dict=True,
            **CLIENT[name],
        )["input_ids"]
        size = len(prompt)
        asked = torch.tensor([[small[token] for token in prompt]])
        out = model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=200,
            do_sample=False,
            eos_token_id=[small[stop] for stop in stops],
            pad_token_id=small[stops[0]],
        )[0, size:].tolist()
        said = [known[token] for token in out]
        # The trained part of the record after this prompt: up to its stop token, and no further.
        end = next(at for at in range(size, len(row["labels"])) if row["labels"][at] in stops)
        assert row["input_ids"][:size] == prompt
        assert said == row["labels"][size : end + 1]
        text = client.decode(said)
        assert text.endswith(of.stops)
        assert all(
            own in text for own in (talk[number].get("reasoning"), talk[number]["content"]) if own
        )
