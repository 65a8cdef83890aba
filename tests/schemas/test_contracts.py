"""Each contract accepts the chain's tables and names the value that violates it.

packhouse's contracts (in every run) and Pandera's (in flows) apply the same rules to the same
tables.
"""

import numpy as np
import pyarrow as pa
import pytest

import schemas
from packhouse.errors import ContractError
from packhouse.records import table_schemas
from packhouse.records.table_schemas import FORMATTED, QUARANTINED, read_table
from tests.chain.conftest import Project

SPANS = {"content_spans", "trained_spans"}


@pytest.fixture(params=[table_schemas.check, schemas.check], ids=["packhouse", "Pandera"])
def check(request):
    return request.param


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("project"))
    project.write_rows(range(30))
    with project.rows.open("a") as file:
        file.write('{"instruction": 7}\n')
    receipts = project.prepare("validate.max_quarantined=0.1").receipts
    found = {}
    for receipt in receipts:
        for name in receipt.files:
            if name.endswith(".arrow"):
                found[name.removesuffix(".arrow")] = read_table(receipt.path(name))
    return found


def changed(table, column, values):
    field = table.schema.field(column)
    rest = table[column].to_pylist()[len(values) :]
    new = pa.array([*values, *rest], field.type)
    return table.set_column(table.schema.get_field_index(column), field, new)


@pytest.mark.parametrize("artefact", ["validated", "formatted", "tokenized", "quarantined"])
def test_tables_of_the_chain_and_empty_tables_pass(artefact, made, check):
    check(artefact, made[artefact])
    check(artefact, made[artefact].slice(3))  # arrays that do not begin at 0
    check(artefact, made[artefact].slice(0, 0))


def span(start, end):
    return {"start": start, "end": end}


BREACHES = [
    ("validated", "record_id", ["x"], "record_id is not 20 hex"),
    ("validated", "row", [-1], "row is below 0"),
    ("validated", "messages", [[]], "messages is empty"),
    ("validated", "label", [-1], "label is below 0"),
    ("formatted", "record_id", ["0" * 19], "record_id is not 20 hex"),
    ("formatted", "text", [""], "text is empty"),
    ("formatted", "trained_spans", [[]], "nothing is trained"),
    ("tokenized", "group_key", ["g"], "group_key is not 20 hex"),
    ("tokenized", "num_tokens", [0], "num_tokens is below 1"),
    ("tokenized", "num_tokens", [1], "is not the number of ids"),
    ("tokenized", "num_trained", [1], "is not the sum of"),
    ("quarantined", "row", [-1], "row is below 0"),
    ("quarantined", "byte_offset", [-1], "byte_offset is below 0"),
    ("quarantined", "step", ["pack"], "step is unknown"),
    ("quarantined", "reason", ["Not a code"], "reason is not a valid code"),
    ("quarantined", "detail", [""], "detail is empty"),
    ("quarantined", "raw_sha256", ["0"], "raw_sha256 is not 64 hex"),
]


@pytest.mark.parametrize(("artefact", "column", "values", "breach"), BREACHES)
def test_a_value_that_breaks_a_contract_is_named(artefact, column, values, breach, made, check):
    bad = changed(made[artefact], column, values)
    with pytest.raises(ContractError, match=breach):
        check(artefact, bad)


BAD_SPANS = {
    "before the text": [span(-1, 2)],
    "empty": [span(1, 1)],
    "backwards": [span(2, 1)],
    "over one another": [span(0, 3), span(2, 4)],
    "out of order": [span(4, 5), span(0, 1)],
    "behind the text": [span(0, 10**6)],
}


@pytest.mark.parametrize(
    ("column", "place"), [("content_spans", 0), ("trained_spans", 7), ("trained_ranges", 7)]
)
@pytest.mark.parametrize("spans", BAD_SPANS.values(), ids=BAD_SPANS)
def test_spans_out_of_place_are_refused_wherever_they_are(spans, column, place, made, check):
    artefact = "formatted" if column in SPANS else "tokenized"
    table = made[artefact]
    bad = changed(table, column, [*table[column].to_pylist()[:place], spans])
    with pytest.raises(ContractError, match=rf"{column}.* in row {place}") as caught:
        check(artefact, bad)
    assert caught.value.artefact == artefact


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [0.0], [-1.0], [np.nan], [np.inf], []])
def test_a_weight_is_a_number_over_0_for_each_span(weights, made, check):
    for artefact, column in (("formatted", "span_weights"), ("tokenized", "range_weights")):
        with pytest.raises(
            ContractError,
            match="one number above 0 for each of trained",
        ):
            check(artefact, changed(made[artefact], column, [weights]))


def test_columns_are_checked_for_names_order_types_and_nulls(made, check):
    table = made["formatted"]
    with pytest.raises(
        ContractError, match="column 'text' must have type 'string not null', but it is missing"
    ):
        check("formatted", table.drop_columns(["text"]))
    with pytest.raises(ContractError, match="columns must be"):
        check("formatted", table.select(table.schema.names[::-1]))
    narrow = table.set_column(0, "record_id", pa.array(range(table.num_rows)))
    with pytest.raises(ContractError, match="column 'record_id' must have type"):
        check("formatted", narrow)
    texts = [None, *table["text"].to_pylist()[1:]]
    index = FORMATTED.get_field_index("text")
    holes = table.set_column(index, FORMATTED.field("text"), pa.array(texts))
    with pytest.raises(ContractError, match="column 'text' has nulls"):
        check("formatted", holes)


def test_an_unknown_role_is_refused(made, check):
    rows = made["validated"]["messages"].to_pylist()
    rows[2][0]["role"] = "human"
    with pytest.raises(ContractError, match="a role is unknown"):
        check("validated", changed(made["validated"], "messages", rows))


def test_breaches_are_counted_and_the_first_ones_shown(made, check):
    bad = changed(made["quarantined"], "reason", ["No"])
    many = pa.concat_tables([bad] * 5)
    assert many.schema.equals(QUARANTINED)
    with pytest.raises(ContractError, match=r"5 values break .*row 0") as caught:
        check("quarantined", many)
    assert caught.value.breaches == 5
