"""Cells of XLSX and ODS without a value, and conversion of dates, booleans and large numbers."""

import io
import zipfile

import pytest

from packhouse.errors import SourceError
from tests.sources.workbook_files import Cell, ods, workbook

pytest.importorskip("python_calamine")

HEADER = ["question", "answer"]
DIVIDED = Cell('<c r="{at}" t="e"><f>1/0</f><v>#DIV/0!</v></c>')
PASTED = Cell('<c r="{at}" t="e"><v>#N/A</v></c>')
NOT_COMPUTED = Cell('<c r="{at}"><f>A1</f><v></v></c>')
NO_VALUE = Cell('<c r="{at}"><f>A1</f></c>')
EMPTY_TEXT = Cell('<c r="{at}" t="str"><f>""</f><v></v></c>')
COMPUTED = Cell('<c r="{at}"><f>2+2</f><v>4</v></c>')
COMPUTED_TEXT = Cell('<c r="{at}" t="str"><f>A1</f><v>four</v></c>')
FORMULA = 'table:formula="of:=1/0"'
ODS_ERROR = Cell(
    f'<table:table-cell {FORMULA} office:value-type="string" office:string-value="" '
    'calcext:value-type="error"><text:p>#DIV/0!</text:p></table:table-cell>'
)
ODS_OLD_ERROR = Cell(
    f'<table:table-cell {FORMULA} office:value-type="float" office:value="0">'
    "<text:p>Err:502</text:p></table:table-cell>"
)
ODS_NO_VALUE = Cell(f"<table:table-cell {FORMULA}/>")
ODS_COMPUTED = Cell(
    f'<table:table-cell {FORMULA} office:value-type="float" office:value="4">'
    "<text:p>4</text:p></table:table-cell>"
)


@pytest.mark.parametrize(
    ("cell", "held"),
    [
        (DIVIDED, "the error #DIV/0!. Fix its formula, or remove the row or column"),
        (PASTED, "the error #N/A. "),
        (NOT_COMPUTED, "a formula without a computed value. Open the workbook in a"),
        (NO_VALUE, "a formula without a computed value. "),
    ],
)
def test_a_cell_without_a_value_quarantines_its_row(cell, held, read_bytes):
    rows = [HEADER, ["q0", "a0"], ["q1", cell], [None, None], ["q2", "a2"]]

    found = read_bytes(workbook(rows), "rows.xlsx")

    assert found.texts == [[("user", q), ("assistant", a)] for q, a in [("q0", "a0"), ("q2", "a2")]]
    assert found.validated["row"].to_pylist() == [0, 2]
    (bad,) = found.quarantined.to_pylist()
    assert (bad["row"], bad["reason"]) == (1, "cell")
    assert bad["detail"].startswith(f"cell B3 of sheet 'Sheet1', column 'answer', holds {held}")
    assert bad["raw"] == b'{"question":"q1","answer":null}'  # sent to `retry` unchanged, it is bad


@pytest.mark.parametrize(
    ("cell", "held"),
    [
        (ODS_ERROR, "the error #DIV/0!"),
        (ODS_OLD_ERROR, "the error Err:502"),
        (ODS_NO_VALUE, "a formula without a computed value"),
    ],
)
def test_a_cell_of_ods_without_a_value_quarantines_its_row(cell, held, read_bytes):
    found = read_bytes(
        ods([HEADER, ["q0", ODS_COMPUTED], ["q1", cell], ["#N/A", "#REF!"]]), "r.ods"
    )

    assert found.texts == [
        [("user", "q0"), ("assistant", "4")],
        [("user", "#N/A"), ("assistant", "#REF!")],  # somebody typed it
    ]
    (bad,) = found.quarantined.to_pylist()
    assert bad["detail"].startswith(f"cell B3 of sheet 'S', column 'answer', holds {held}")


def test_cells_of_ods_that_stand_for_several(read_bytes):
    again = str(ODS_ERROR).replace("<table:table-cell", "<table:table-cell {}")
    twice = Cell(again.format('table:number-columns-repeated="2"'))
    data = ods([HEADER, ["q0", "a0"], [twice], ["q1", "a1"]])
    rows = b'<table:table-row table:number-rows-repeated="3"><table:table-cell '
    book = zipfile.ZipFile(io.BytesIO(data))
    content = book.read("content.xml").replace(
        b"<table:table-row><table:table-cell table:number-columns", rows + b"table:number-columns"
    )
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        for name in book.namelist():
            file.writestr(name, content if name == "content.xml" else book.read(name))

    found = read_bytes(sink.getvalue(), "rows.ods")

    assert found.validated["row"].to_pylist() == [0, 4]
    bad = found.quarantined.to_pylist()
    assert [(row["row"], row["detail"][:7]) for row in bad] == [
        (1, "cell A3"),  # B3 too, but the first is named
        (2, "cell A4"),
        (3, "cell A5"),
    ]


def test_formulas_whose_value_was_kept_are_values(read_bytes):
    rows = [[*HEADER, "note"], ["q0", COMPUTED, EMPTY_TEXT], ["q1", COMPUTED_TEXT, "x"]]

    found = read_bytes(workbook(rows), "rows.xlsx")

    assert [texts[1] for texts in found.texts] == [("assistant", "4"), ("assistant", "four")]
    assert found.reasons == []


@pytest.mark.parametrize(
    ("sheets", "rows", "bad"),
    [
        (  # rows of bad cells alone
            [[HEADER, ["q0", "a0"], [DIVIDED, NO_VALUE], [None, NO_VALUE]]],
            [0],
            [(1, "cell A3 of sheet 'Sheet1'"), (2, "cell B4 of sheet 'Sheet1'")],
        ),
        (  # a table that begins further down
            [[[], [None, None, *HEADER], [None, None, "q", "a"], [None, None, "q", PASTED]]],
            [0],
            [(1, "cell D4 of sheet 'Sheet1'")],
        ),
        (  # each sheet has its own cells
            [[HEADER, ["q0", "a0"]], [HEADER, ["q1", DIVIDED], ["q2", "a2"]]],
            [0, 2],
            [(1, "cell B2 of sheet 'Sheet2'")],
        ),
    ],
)
def test_bad_cells_are_found_wherever_they_are(sheets, rows, bad, read_bytes):
    found = read_bytes(workbook(*sheets), "rows.xlsx")

    assert found.validated["row"].to_pylist() == rows
    assert [(each["row"], each["detail"][:25]) for each in found.quarantined.to_pylist()] == bad


def test_a_bad_cell_in_the_header_refuses_the_file(read_bytes):
    with pytest.raises(SourceError, match="cell B1, which holds #DIV/0!, in its first row"):
        read_bytes(workbook([["question", DIVIDED], ["q", "a"]]), "rows.xlsx")


def test_bad_cells_do_not_depend_on_where_or_on_shards(read_bytes):
    rows = [HEADER, *([f"q{n}", DIVIDED if n % 3 == 0 else f"a{n}"] for n in range(2500))]

    found = read_bytes(workbook(rows), "rows.xlsx", where="question < 'q5'")

    assert found.reasons == ["cell"] * 834
    assert all(row["row"] % 3 == 0 for row in found.quarantined.to_pylist())
    kept = [n for n in range(2500) if n % 3 and f"q{n}" < "q5"]
    assert found.validated["row"].to_pylist() == kept


def test_a_bad_cell_far_out_takes_no_memory(read_bytes):
    far = Cell('<c r="XFD1048576"><f>A1</f></c>')

    with pytest.raises(SourceError, match="column 16,384 exceeds the limit of 16,777,216 cells"):
        read_bytes(workbook([HEADER, ["q", "a"], [far]]), "rows.xlsx")


def test_conversion_of_cell_values(read_bytes):
    values = [
        (2**53 - 1, str(2**53 - 1)),
        (2**53 + 1, "9007199254740992.0"),  # a cell has 53 bits
        (0.1, "0.1"),
        (Cell('<c r="{at}" t="b"><v>1</v></c>'), "true"),
        (Cell('<c r="{at}" t="d"><v>2024-01-31T10:30:00</v></c>'), "2024-01-31 10:30:00"),
    ]

    found = read_bytes(workbook([HEADER, *(["q", cell] for cell, _ in values)]), "rows.xlsx")

    assert [texts[1][1] for texts in found.texts] == [text for _, text in values]
    day = 'office:value-type="date" office:date-value="2024-01-31"'
    others = [
        (Cell(f"<table:table-cell {day}/>"), "2024-01-31"),
        (
            Cell('<table:table-cell office:value-type="boolean" office:boolean-value="true"/>'),
            "true",
        ),
    ]
    found = read_bytes(ods([HEADER, *(["q", cell] for cell, _ in others)]), "rows.ods")
    assert [texts[1][1] for texts in found.texts] == [text for _, text in others]
