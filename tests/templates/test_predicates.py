"""Control tokens are found in whole columns."""

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from packhouse.render.predicates import any_of


@given(
    literals=st.sets(st.text("<[a/\u00e9\0.|", min_size=1, max_size=4), max_size=5),
    texts=st.lists(st.text("<[a/\u00e9\0.|b", max_size=8), max_size=6),
    first=st.integers(0, 3),
)
def test_a_literal_is_found_within_texts_and_not_across(literals, texts, first):
    column = pa.array(texts, pa.string())[first:]

    found = pc.match_substring_regex(column, any_of(literals)).to_pylist()

    assert found == [any(own in text for own in literals) for text in texts[first:]]
