"""A client that has only the tokenizer's files sends the prompt that a published record trains.

After the prompt, the record's labels are what the model generates: the answer up to its stop token.
"""

import json

import pytest

from tests.prepared import prepare_in

pytest.importorskip("trl", reason="TRL is not installed")

from transformers import AutoTokenizer

from tests.templates.families import SHAPES, TOOLS, client_messages, family, tokenizer

pytestmark = pytest.mark.usefixtures("shared")

NAME, CLIENT = "glm4moe", {"enable_thinking": True}
"""A family, and the arguments of a client that asks the model to think. test_model_families.py has
the ids of prompts of the others."""


def save_tokenizer(of, folder):
    """A model's folder, as its vendor would publish it, without weights."""
    own = tokenizer()
    own.bos_token, own.eos_token = of.vendor.bos or None, of.vendor.eos
    own.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(of.source, "utf-8")
    ids = own.convert_tokens_to_ids(list(of.stops))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))


def test_a_published_record_trains_the_answer_to_the_prompt_of_a_client(tmp_path):
    of, talk = family(f"{NAME}.jinja"), SHAPES["toolsthink"]
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
    ids, labels = (list(map(int, row[key])) for key in ("input_ids", "labels"))
    client = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    stops = client.convert_tokens_to_ids(list(of.stops))
    answers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
    assert len(answers) == 2
    for number in answers:
        prompt = client.apply_chat_template(
            client_messages(of, talk)[:number],
            tools=TOOLS,
            add_generation_prompt=True,
            return_dict=True,
            **CLIENT,
        )["input_ids"]
        size = len(prompt)
        assert ids[:size] == prompt
        assert labels[size - 1] == -100
        end = next(at for at in range(size, len(ids)) if labels[at] in stops)
        assert labels[size : end + 1] == ids[size : end + 1]
        assert labels[end + 1 : end + 2] in ([], [-100])
        text = client.decode(labels[size : end + 1])
        assert text.endswith(of.stops)
        assert all(
            own in text for own in (talk[number].get("reasoning"), talk[number]["content"]) if own
        )
