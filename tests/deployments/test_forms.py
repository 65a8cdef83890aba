"""The deployments' run forms accept only what a worker accepts, and list its names."""

import pytest
import yaml
from prefect.utilities.schema_tools.validation import validate

from deployments.deploy import HERE, SHOWN, form
from schemas.places import AllowedPaths

PLACES = AllowedPaths(
    sources={"chats": "/data/chats.jsonl", "alpaca": "/data/alpaca.json"},
    tokenizers={"demo": "/data/tokenizer"},
    stores={"main": "s3://bucket/versions"},
    recipes={"nightly": "/data/nightly.yaml"},
    allow={"read": ["s3://raw/"]},
)


def schema_of(flow):
    return flow.parameters.model_dump()


@pytest.fixture(scope="module")
def flows():
    from flows.backfill import backfill
    from flows.prepare import prepare
    from flows.refresh import refresh

    return {"prepare": prepare, "refresh": refresh, "backfill": backfill}


def test_every_deployment_has_a_name_of_its_own():
    found = yaml.safe_load((HERE / "prefect.yaml").read_text())["deployments"]
    names = [each["name"] for each in found]
    assert len(names) == len(set(names)) == 11


@pytest.mark.parametrize("flow", ["prepare", "refresh", "backfill"])
def test_the_form_has_no_cache_which_a_deployed_run_may_not_choose(flow, flows):
    before = schema_of(flows[flow])
    assert "cache" in before["properties"]
    after = form(before, PLACES)
    assert after["patternProperties"].keys() == {"^runner$"}
    assert before["properties"].keys() - after["properties"].keys() == {"cache", "runner"}
    assert after["additionalProperties"] is False  # so the server refuses it too


def test_the_form_lists_names_and_still_takes_a_place_below_an_allowed_prefix(flows):
    sections = form(schema_of(flows["prepare"]), PLACES)["definitions"]
    path = sections["SourceConfig"]["properties"]["path"]
    name, place = path["anyOf"]
    assert name["enum"] == ["alpaca", "chats"]
    assert place["type"] == "string"
    assert "pattern" in place  # no credentials
    assert "type" not in path
    assert path["description"].startswith("File, folder, glob")
    tokenizer = sections["Recipe"]["properties"]["tokenizer"]
    assert tokenizer["anyOf"][0]["enum"] == ["demo"]
    assert sections["PublishConfig"]["properties"]["store"]["anyOf"][0]["enum"] == ["main"]


def test_a_recipe_is_one_of_the_names_or_a_whole_one(flows):
    refresh = form(schema_of(flows["refresh"]), PLACES)["properties"]
    assert [each.get("enum") for each in refresh["recipe"]["anyOf"]] == [["nightly"], None]
    assert refresh["recipe"]["anyOf"][1] == {"$ref": "#/definitions/Recipe"}
    assert refresh["store"]["anyOf"][0]["enum"] == ["main"]
    assert {"type": "null"} in refresh["store"]["anyOf"]
    recipes = form(schema_of(flows["backfill"]), PLACES)["properties"]["recipes"]
    assert recipes["items"]["anyOf"][0]["enum"] == ["nightly"]


def test_the_form_shows_common_settings_and_takes_all(flows):
    schema = form(schema_of(flows["prepare"]), AllowedPaths())
    shown = {name: set(each.get("properties", ())) for name, each in schema["definitions"].items()}
    assert shown["SourceConfig"] == {"path", "format"}
    assert sum(len(shown[name]) for name in SHOWN.keys() - {"parameters"}) == 13
    recipe = {"dataset": "d", "sources": [{"path": "a", "weight": 2}], "tokenizer": "t"}
    assert not validate({"recipe": recipe, "runner": "threads"}, schema)
    for wrong in ({"pack": {"strategy": "zzz"}}, {"pack": {"seq_length": 1}}, {"tokenise": {}}):
        assert validate({"recipe": recipe | wrong}, schema)
