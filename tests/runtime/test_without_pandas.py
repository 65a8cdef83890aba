"""pandas stays out of processes that prepare data, and nothing reads otherwise for it."""

import os
import subprocess
import sys

import pytest

SETTLED = """
import os, sys
os.environ["PACKHOUSE_WITHOUT_PANDAS"] = "1"
import pyarrow as pa
from packhouse.system.without_pandas import recall_pandas, settle_pyarrow, without_pandas
settle_pyarrow()
pa.array(["a"])
assert "pandas" not in sys.modules
"""


def run(code):
    env = {key: value for key, value in os.environ.items() if key != "PACKHOUSE_WITHOUT_PANDAS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_contract_is_checked_and_breaks_without_pandas():
    code = (
        SETTLED
        + """
import schemas
from packhouse.records import tables
from packhouse.errors import ContractError
row = {"source": ["a"], "row": [0], "reason": ["over_seq_len"], "detail": [""]}
try:
    schemas.check("dropped", pa.table(row, schema=tables.DROPPED))
except ContractError as error:
    print("detail is empty" in str(error), "pandas" in sys.modules)
"""
    )
    assert run(code) == ["True", "False"]


def test_tables_of_sources_are_read_as_with_pandas(tmp_path):
    code = (
        SETTLED
        + f"""
import pyarrow.parquet as pq
from packhouse.read.tabular import parse_tables
times = pa.array([1], pa.timestamp("ns"))  # no datetime of Python says it
pq.write_table(pa.table({{"time": times}}), "{tmp_path}/rows.parquet")
row = next(parse_tables("{tmp_path}/rows.parquet", "parquet", 0, 1)).rows[0]
print(type(row["time"]).__name__, row["time"].nanosecond)
"""
    )
    assert run(code) == ["Timestamp", "1"]


def test_another_thread_and_later_imports_find_pandas():
    code = (
        SETTLED
        + """
import threading
found = []
with without_pandas():
    thread = threading.Thread(target=lambda: found.append(__import__("pandas")))
    thread.start()
    thread.join()
import pandas
print(found == [pandas], pa.array([1]).to_pandas().tolist())
"""
    )
    assert run(code) == ["True", "[1]"]


def test_only_pandas_is_hidden_and_only_for_a_moment():
    code = SETTLED.replace("settle_pyarrow()\n", "") + "import json.tool, pandas; print('there')"
    code = code.replace('pa.array(["a"])\nassert "pandas" not in sys.modules', "")
    assert run(code) == ["there"]


def test_in_a_process_of_others_libraries_know_pandas_after_a_step():
    code = """
import importlib
from packhouse.system.without_pandas import settle_pyarrow, without_pandas
settle_pyarrow()  # as every step does
import schemas
from packhouse.records import tables
schemas.check("tokenized", tables.TOKENIZED.empty_table())
import pandas, pandera.pandas, polars, pyarrow
nan = pandas.Series([1.0, float("nan")])
print(pyarrow.array(nan).null_count, polars.from_pandas(nan).null_count())
"""
    assert run(code) == ["1", "1"]


@pytest.mark.parametrize("how", ["import packhouse.cli", "import packhouse.run.steps"])
def test_only_commands_call_a_process_their_own(how, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("dataset: a\n")
    code = f"""
import os, sys
{how}
from packhouse import cli
said = []
sys.argv[1:] = ["prepare", "{recipe}"]
for call in (lambda: cli.cli(sys.argv[1:]), cli.main):
    try:
        call()
    except SystemExit:  # the recipe says too little
        said.append(os.environ.get("PACKHOUSE_WITHOUT_PANDAS"))
print(*said)
"""
    assert run(code)[-2:] == ["None", "1"]
