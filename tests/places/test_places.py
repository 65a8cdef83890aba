"""Names and prefixes that a worker accepts from a run form, and everything that it refuses."""

import os

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from packhouse.errors import ConfigError, SourceError
from packhouse.read.source_files import find_files
from packhouse.recipe import Recipe, SourceConfig, parse_recipe
from schemas.places import AllowedPaths, load_places, refuse_credentials

YAML = """
sources: {chats: raw/chats.jsonl, cloud: "s3://raw/chats.jsonl"}
tokenizers: {demo: tokenizer}
stores: {main: "${PACKHOUSE_TEST_STORE:-./store}"}
files: {pins: golden.jsonl, mine: chat.jinja}
allow:
  read: [raw/open, s3://bucket/open/]
  write: ["hf://datasets/us/"]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "places.yaml").write_text(YAML)
    for name in ("raw/open/sub", "raw/open-secret", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outside" / "rows.jsonl").touch()
    return tmp_path


@pytest.fixture
def places(folder):
    return load_places(folder / "places.yaml")


def form(**changes):
    raw = {"dataset": "d", "sources": [{"path": "chats"}], "tokenizer": "demo"}
    return Recipe.model_validate(raw | {"publish": {"store": "main"}} | changes)


def test_names_become_places_and_name_the_source(places, folder):
    recipe = places.recipe(form(golden="pins", format={"template": "mine"}))
    assert recipe.sources[0].path == str(folder / "raw" / "chats.jsonl")
    assert recipe.sources[0].name == "chats"
    assert recipe.tokenizer == str(folder / "tokenizer")
    assert recipe.publish.store == str(folder / "store")
    assert recipe.golden == str(folder / "golden.jsonl")
    assert recipe.format.template == str(folder / "chat.jinja")


def test_the_environment_may_say_where_the_store_is(folder, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_TEST_STORE", "s3://bucket/versions")
    assert load_places(folder / "places.yaml").store("main") == "s3://bucket/versions"


@pytest.mark.parametrize(
    "place",
    [
        "{folder}/raw/open",
        "{folder}/raw/open/a.jsonl",
        "{folder}/raw/open/sub/*.jsonl",
        "{folder}/raw/open-secret/../open/a.jsonl",
        "s3://bucket/open/a.jsonl",
        "s3://bucket/open/*/b.jsonl",
    ],
)
def test_paths_under_an_allowed_prefix_may_be_read(place, places, folder):
    place = place.format(folder=folder)
    assert places.source(place) in (place, os.path.realpath(place))


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "~/secrets.jsonl",
        "{folder}/raw/open-secret/a.jsonl",
        "{folder}/raw/open*/a.jsonl",
        "{folder}/raw/open/../../outside/rows.jsonl",
        "{folder}/raw/open/*/../../../outside/rows.jsonl",
        "{folder}/raw/open/link/rows.jsonl",
        "{folder}/raw",
        "relative.jsonl",
        "s3://bucket/open-secret/a.jsonl",
        "s3://bucket/open*/a.jsonl",
        "s3://bucket/open/../closed/a.jsonl",
        "s3://bucket/open/%2e%2e/closed/a.jsonl",
        "s3://bucket/open/./a.jsonl",
        "s3://bucket",
        "s3://another/open/a.jsonl",
        "S3://bucket/open/a.jsonl",
        "hf://datasets/us/raw/a.jsonl",
        "http://169.254.169.254/latest",
        "s3://bucket/open/\\..\\a",
        "s3://bucket/open/a/%2e%2e/%2e%2e/secret",
        "s3://bucket/open/a/%252e%252e/secret",
        "s3://bucket/open/a%2f..%2f..%2fsecret",
        "s3://bucket/open/a%5c..%5csecret",
        "s3://bucket/open/a::file:///etc/passwd",
        "s3://bucket/open/a/../../secret",
        "s3://bucket/open/a%00b",
        "a\0b",
        "",
    ],
)
def test_everything_else_is_refused(place, places, folder):
    (folder / "raw" / "open" / "link").symlink_to(folder / "outside")
    with pytest.raises(ConfigError, match="is not listed in the worker"):
        places.source(place.format(folder=folder))


def test_a_readable_path_is_not_writable(places):
    with pytest.raises(ConfigError, match=r"store 's3://bucket/open/x' is not listed"):
        places.store("s3://bucket/open/x")


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": [{"path": "chats"}, {"path": "/etc/passwd"}]},
        {"tokenizer": "/etc"},
        {"golden": "/etc/shadow"},
        {"format": {"template": "/etc/x.jinja"}},
        {"audit": {"benchmarks": [{"path": "/etc/passwd"}]}},
        {"publish": {"store": "/etc"}},
        {"publish": {"store": "main", "also": ["hf://datasets/them/x"]}},
        {"publish": {"store": "main", "also": ["wandb://theirs"]}},
    ],
)
def test_every_path_of_a_recipe_is_checked(changes, places):
    with pytest.raises(ConfigError, match="is not listed in the worker"):
        places.recipe(form(**changes))


def test_a_mirror_below_an_allowed_prefix_is_written(places):
    recipe = form(publish={"store": "main", "also": ["hf://datasets/us/alpaca"]})
    assert places.recipe(recipe).publish.also == ["hf://datasets/us/alpaca"]


@pytest.mark.parametrize(
    "place",
    [
        "s3://key:secret@bucket/a",
        "s3://key@bucket/a",
        "s3://KEY:sec/ret0123@bucket/a",
        "https://host/a?X-Amz-Signature=0123",
        "https://host/a?x=1&X-Amz-Credential=AKIA",
        "https://host/a?AWSAccessKeyId=1&Signature=2",
        "https://host/a?sig=0123&se=2027",
        "s3://bucket/AKIAABCDEFGHIJKLMNOP/a",
        "hf://datasets/o/n?token=hf_0123",
    ],
)
def test_a_credential_is_refused_and_not_repeated(place):
    with pytest.raises(ConfigError) as refused:
        refuse_credentials(place)
    assert "credential" in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "0123" not in str(refused.value)


@given(st.text(alphabet="ab./*~\\%", max_size=12))
def test_no_spelling_of_a_path_leaves_the_allowed_folder(text):
    places = AllowedPaths(allow={"read": ["/nowhere/open"]})
    try:
        found = places.source(f"/nowhere/open/{text}")
    except ConfigError:
        return
    fixed = found.split("*")[0].rpartition("/")[0] if "*" in found else found
    assert os.path.realpath(fixed).startswith("/nowhere/open")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sources: [", "cannot be read"),
        ("source: {}", "'source': Extra inputs"),
        ("stores: {main: 3}", "'stores.main'"),
        ("stores: {main: '${HOME}'}", "only variables named PACKHOUSE_"),
    ],
)
def test_an_invalid_places_file_is_reported(text, says, tmp_path):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_places(tmp_path / "p.yaml")


def test_no_file_of_places_stops_a_run(tmp_path):
    with pytest.raises(ConfigError, match="PACKHOUSE_SOURCES"):
        load_places(tmp_path / "none.yaml")


def test_a_linked_folder_whose_name_looks_like_a_pattern_is_not_followed_outside(places, folder):
    for name in ("link[x]", "link*", "link?"):
        (folder / "raw" / "open" / name).symlink_to(folder / "outside")
        for place in (name, f"{name}/rows.jsonl", f"{name}/*.jsonl", f"{name}/../rows.jsonl"):
            with pytest.raises(ConfigError, match="is outside the allowed prefixes"):
                places.source(f"{folder}/raw/open/{place}")


def test_a_port_is_no_credential():
    refuse_credentials("http://minio:9000/bucket")
    with pytest.raises(ConfigError, match="contains a credential"):
        refuse_credentials("http://user:pa55@minio:9000/bucket")
    with pytest.raises(SourceError, match="scheme 'http' is not supported"):
        find_files(SourceConfig(path="http://minio:9000/rows.jsonl"))
    with pytest.raises(SourceError, match="contains credentials") as caught:
        find_files(SourceConfig(path="s3://key:sec/ret@bucket/rows.jsonl"))
    assert "sec" not in str(caught.value)


SECRET = "hunter2-" + "x" * 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"pack": {"seq_len": SECRET}},
        {"dataset": SECRET.upper()},
        {"split": SECRET},
        {"dedup": [SECRET]},
        {"validate": {"max_quarantined": SECRET}},
        {"format": {"train_on": SECRET}},
        {"sources": {"path": SECRET}},
        {"publish": {"store": "s", "ref": f"{SECRET} {SECRET}"}},
    ],
)
def test_a_secret_in_a_wrong_field_is_not_repeated(wrong):
    raw = {"dataset": "d", "sources": [{"path": "a.jsonl"}], "tokenizer": "t"}
    with pytest.raises(ConfigError) as caught:
        parse_recipe(raw | wrong)
    assert SECRET.lower() not in str(caught.value).lower()
    with pytest.raises(ValidationError) as plain:  # Prefect's message about parameters
        Recipe.model_validate(raw | wrong)
    assert SECRET.lower() not in str(plain.value).lower()


def test_a_link_in_a_tokenizers_folder_leads_nowhere_outside(places, folder):
    tokenizer = folder / "raw" / "open" / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    assert places.tokenizer(str(tokenizer)) == str(tokenizer)
    (tokenizer / "chat_template.jinja").symlink_to(folder / "outside" / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"the link 'chat_template.jinja', which leads outside"):
        places.tokenizer(str(tokenizer))


def test_a_tokenizer_may_be_a_name_of_the_hub(tmp_path):
    (tmp_path / "sources.yaml").write_text(
        "tokenizers: {qwen: Qwen/Qwen2.5-0.5B-Instruct, own: models/own}\n"
    )
    (tmp_path / "models" / "own").mkdir(parents=True)
    places = load_places(tmp_path / "sources.yaml")
    assert places.tokenizer("qwen") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert places.tokenizer("own") == str(tmp_path / "models" / "own")
    with pytest.raises(ConfigError, match="is not listed in the worker"):
        places.tokenizer("Qwen/Qwen2.5-0.5B-Instruct")
