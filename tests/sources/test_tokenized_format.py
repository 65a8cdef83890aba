"""Pretokenized rows as a source: which are read, and why others are not."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from packhouse.read.chat_messages import BadRowError
from packhouse.read.row_formats import row_format_of, row_formats
from packhouse.recipe import SourceConfig
from tests.sources.conftest import read_source

IDS = [1, 5, 6, 7, 8, 2]
LABELS = [-100, -100, -100, 7, 8, 2]
TURNS = [("system", [1, 5, 6]), ("assistant", [7, 8, 2])]

Records = list[list[tuple[str, list[int]]]]


def read(row: dict[str, Any], **config: Any) -> list[list[tuple[str, list[int], float | None]]]:
    reader = row_formats()["tokenized"]
    told = SourceConfig(path="", **config)
    found = reader.read(row, reader.names(row, told.fields), told)
    return [[(turn[0], ids_of(turn[1]), turn[7]) for turn in each.turns] for each in found]


def ids_of(content: str) -> list[int]:
    return np.frombuffer(bytes.fromhex(content), ">u4").tolist()


def records(row: dict[str, Any], **config: Any) -> Records:
    return [[(role, ids) for role, ids, _ in turns] for turns in read(row, **config)]


@pytest.mark.parametrize(
    "mask",
    [
        {"labels": LABELS},
        {"loss_mask": [0, 0, 0, 1, 1, 1]},
        {"assistant_masks": [False, False, False, True, True, True]},
        {"assistant_mask": [0, 0, 0, 1, 1, 1]},
        {"completion_mask": [0, 0, 0, 1, 1, 1]},
        {"labels": IDS, "completion_mask": [0, 0, 0, 1, 1, 1]},
        {"labels": [-100, -100, -100, 7, 8, 2], "assistant_masks": [1] * 6},
        {"labels": LABELS, "attention_mask": [1] * 6, "position_ids": [0, 1, 2, 3, 4, 5]},
        {"labels": LABELS, "seq_lengths": [6], "position_ids": None},
    ],
)
def test_every_form_of_mask_is_read(mask):
    row = {"input_ids": IDS, **mask}

    assert row_format_of(row, {}) == "tokenized"
    assert records(row) == [TURNS]


def test_weights_are_those_of_the_mask():
    row = {"input_ids": IDS, "loss_mask": [0, 0, 0.5, 0.5, True, 1e6]}

    assert read(row) == [
        [
            ("system", [1, 5], None),
            ("assistant", [6, 7], 0.5),
            ("assistant", [8], None),
            ("assistant", [2], 1e6),
        ]
    ]


def test_fields_of_other_names_are_told_by_the_recipe():
    row = {"tokens": IDS, "targets": LABELS}

    fields = {"input_ids": "tokens", "labels": "targets"}
    assert records(row, fields=fields) == [TURNS]
    assert row_format_of(row, fields) == "tokenized"


def test_padding_that_a_mask_names_is_no_token():
    right = {"input_ids": [*IDS, 0, 0], "labels": [*LABELS, -100, -100],
             "attention_mask": [1] * 6 + [0, 0], "position_ids": [*range(6), 0, 0]}  # fmt: skip
    left = {"input_ids": [0, 0, *IDS], "labels": [-100, -100, *LABELS],
            "attention_mask": [0, 0] + [1] * 6}  # fmt: skip

    assert records(right) == records(left) == [TURNS]


PACKED = {"input_ids": [*IDS, 3, 4, 2], "labels": [*LABELS, -100, 4, 2]}


@pytest.mark.parametrize(
    "told",
    [
        {"seq_lengths": [6, 3]},
        {"cu_seqlens": [0, 6, 9]},
        {"cu_seq_lens_q": [0, 6, 9]},
        {"position_ids": [0, 1, 2, 3, 4, 5, 0, 1, 2]},
        {"attention_mask": [1] * 6 + [2] * 3},
        {"attention_mask": [1] * 9, "position_ids": [0, 1, 2, 3, 4, 5, 0, 1, 2]},
        {"seq_lengths": [6, 3], "position_ids": [0, 1, 2, 3, 4, 5, 0, 1, 2]},
    ],
)
def test_packed_rows_are_unpacked_by_any_form_of_boundaries(told):
    assert records(PACKED | told) == [TURNS, [("system", [3]), ("assistant", [4, 2])]]


def test_padding_after_packed_records_belongs_to_none_of_them():
    padded = {
        "input_ids": [*PACKED["input_ids"], 0, 0],
        "labels": [*PACKED["labels"], -100, -100],
        "attention_mask": [1] * 6 + [2] * 3 + [0, 0],
    }
    for told in (
        {},
        {"seq_lengths": [6, 3]},
        {"seq_lengths": [6, 3, 2]},
        {"cu_seqlens": [0, 6, 11]},
    ):
        found = records(padded | told)
        assert found == records(PACKED | {"seq_lengths": [6, 3]}), told


@pytest.mark.parametrize(
    ("change", "reason", "says"),
    [
        ({"labels": [*LABELS[1:], -100]}, "labels", "each is the next token"),
        ({"position_ids": [0] * 6}, "boundaries", "are 0 everywhere"),
        ({"labels": [-100, *LABELS[:-1]]}, "labels", "each is the previous token"),
        ({"labels": [-100, -100, -100, 7, 9, 2]}, "labels", "label 4 is 9, but token 4 is 8"),
        ({"labels": [-1, -1, -1, 7, 8, 2]}, "labels", "label 0 is -1"),
        ({"labels": None}, "labels", "no labels or mask"),
        ({"labels": LABELS[1:]}, "uneven", "labels has 5 values for 6 tokens"),
        ({"position_ids": [0, 1]}, "uneven", "position_ids has 2 values"),
        ({"labels": None, "loss_mask": [0, 0, 0, 1, 1, -1.0]}, "labels", "-1.0 at token 5"),
        ({"loss_mask": [0, 0, 0, 1, 1, math.nan]}, "labels", "loss_mask is nan at token 5"),
        ({"loss_mask": [0, 0, 0, math.inf, 1, 1]}, "labels", "loss_mask is inf at token 3"),
        ({"loss_mask": [0, 0, 0, 1e6 + 1, 1, 1]}, "labels", "weights are 0 to 1,000,000"),
        ({"assistant_masks": [0, 0, 0, -1, 1, 1]}, "labels", "assistant_masks is -1 at token 3"),
        ({"input_ids": [True, *IDS[1:]]}, "type", "input_ids has true or false at index 0"),
        ({"seq_lengths": [True, 5]}, "type", "seq_lengths has true or false"),
        ({"loss_mask": [0, 0, 0, 1, 1, "1"]}, "type", "loss_mask has text at index 5"),
        ({"labels": "7 8"}, "type", "labels is text"),
        (
            {"input_ids": [IDS], "labels": [LABELS]},
            "type",
            "write each of these lists as a separate row",
        ),
        ({"input_ids": [float(i) for i in IDS]}, "type", "input_ids has a number at index 0"),
        ({"input_ids": [*IDS[:5], "2"]}, "type", "at index 5"),
        ({"input_ids": [], "labels": []}, "token_ids", "input_ids is empty"),
        ({"input_ids": [-1, *IDS[1:]]}, "token_ids", "token 0 is -1"),
        ({"input_ids": [2**31, *IDS[1:]]}, "token_ids", "which is not a token id"),
        ({"input_ids": [2**70, *IDS[1:]]}, "token_ids", "over 64 bits"),
        ({"attention_mask": [1, 1, 1, 1, 1, 0]}, "labels", "a trained token has attention_mask 0"),
        ({"attention_mask": [1, 0, 1, 1, 1, 1]}, "boundaries", "not at the ends"),
        ({"seq_lengths": [3, 2]}, "boundaries", "do not add up to the row's 6"),
        ({"seq_lengths": [2**63 - 1, 2**63 - 1, 8]}, "boundaries", "do not add up"),
        ({"cu_seqlens": [0, 4]}, "boundaries", "do not add up"),
        ({"position_ids": [0, 1, 2, 5, 6, 7]}, "boundaries", "jump to 5 at token 3"),
        (
            {"seq_lengths": [2, 4], "position_ids": [0, 1, 2, 3, 4, 5]},
            "boundaries",
            "disagree on where records begin",
        ),
    ],
)
def test_every_fault_has_its_reason_and_place(change, reason, says):
    with pytest.raises(BadRowError) as bad:
        read({"input_ids": IDS, "labels": LABELS} | change)

    assert bad.value.reason == reason
    assert says in bad.value.detail


def test_labels_that_equal_ids_by_chance_when_shifted_are_no_shift():
    assert records({"input_ids": [4, 4, 4], "labels": [-100, 4, 4]}) == [
        [("system", [4]), ("assistant", [4, 4])]
    ]


def test_a_long_prompt_groups_records_and_a_header_does_not(tmp_path):
    prompt = list(range(20, 30))
    rows = [
        {"input_ids": [*prompt, 3, 2], "labels": [*[-100] * 10, 3, 2]},
        {"input_ids": [*prompt, 4, 2], "labels": [*[-100] * 10, 4, 2]},
        {"input_ids": [1, 9, 3, 2], "labels": [-100, 9, -100, 2]},
        {"input_ids": [1, 8, 3, 2], "labels": [-100, 8, -100, 2]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    keys = read_source(path).validated["group_key"].to_pylist()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_name_is_of_ids_and_mask(tmp_path):
    rows = [
        {"input_ids": IDS, "labels": LABELS},
        {"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1, 1]},
        {"input_ids": IDS, "labels": [-100, -100, 6, 7, 8, 2]},
        {"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1, 0.5]},
        {"input_ids": [1, 5, 6, 7, 9, 2], "labels": [-100, -100, -100, 7, 9, 2]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    names = read_source(path).validated["record_id"].to_pylist()
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_texts_next_to_ids_are_not_read_and_images_are_refused(tmp_path):
    row = {"input_ids": IDS, "labels": LABELS, "messages": [{"role": "user", "content": "x"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"images": ["a.png"]}) + "\n")

    source = read_source(path)
    assert source.reasons == ["media"]
    assert source.extra_fields == {"images": 1, "messages": 2}


def test_a_text_is_read_instead_of_ids_without_a_mask(tmp_path):
    assert row_format_of({"input_ids": IDS, "attention_mask": [1] * 6, "text": "a"}, {}) == "text"
    assert row_format_of({"input_ids": IDS, "attention_mask": [1] * 6}, {}) == "tokenized"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": IDS}) + "\n")
    assert read_source(path).reasons == ["labels"]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1)))
def test_no_token_and_no_mask_is_lost(rows):
    for row in rows:
        ids = [each for each, _ in row]
        labels = [each if trained else -100 for each, trained in row]
        ((turns),) = read({"input_ids": ids, "labels": labels})
        again = [(i, role == "assistant") for role, own, _ in turns for i in own]
        assert again == row


def test_rows_of_axolotl_and_of_llama_factory_as_they_save_them():
    axolotl = {"input_ids": IDS, "labels": LABELS, "attention_mask": [1] * 6,
               "position_ids": [0, 1, 2, 3, 4, 5], "length": 6}  # fmt: skip
    assert records(axolotl) == [TURNS]

    # `packing: true` pads with a mask of ones; `neat_packing: true` numbers the records.
    media = {"images": None, "videos": None, "audios": None}
    packed = {
        "input_ids": [*PACKED["input_ids"], 9, 9],
        "labels": [*PACKED["labels"], -100, -100],
        "position_ids": [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0],
        **media,
    }
    both = records(PACKED | {"seq_lengths": [6, 3]})
    assert records(packed | {"attention_mask": [1] * 11}) == both
    assert records(packed | {"attention_mask": [1] * 6 + [2] * 3 + [0] * 2}) == both
    assert row_format_of(packed, {}) == "tokenized"


@pytest.mark.parametrize(
    "bounds", [{"seq_lengths": [8, 3]}, {"cu_seqlens": [0, 8, 11]}, {"seq_lengths": [2, 6, 3]}]
)
def test_pads_in_front_that_bounds_count_move_no_bound(bounds):
    """Each record once took as many tokens of the next one as there are pads."""
    row = {name: [0, 0, *PACKED[name]] for name in ("input_ids", "labels")}
    row["labels"][:2] = [-100, -100]

    assert records(row | bounds | {"attention_mask": [0, 0] + [1] * 9}) == records(
        PACKED | {"seq_lengths": [6, 3]}
    )
