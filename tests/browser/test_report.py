"""Reports in a browser: charts have marks, search and hover work, and no code in rows runs."""

import itertools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import packhouse
from packhouse.addons.report.command import diff_report
from packhouse.store.version_reader import open_address
from tests.browser.conftest import Page
from tests.prepared import TOKENIZER, prepare_in
from tests.report.hostile import TEXTS, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("real_reports")]

WIDTHS = (360, 1920)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, real_reports):
    folder = tmp_path_factory.mktemp("hostile")
    write_rows(folder / "rows.jsonl")
    how = {"format": {"template": "alpaca"}, "split": {"eval_fraction": 0.2}}
    return published(folder, folder / "rows.jsonl", tokenizer=TOKENIZER, seq_len=512, **how)


@pytest.fixture(scope="module")
def tools(tmp_path_factory, real_reports, shared):
    data = shared / "data" / "reason_tool_use_demo_50.jsonl"
    how = {"tokenizer": shared / "tokenizers" / "qwen3", "seq_len": 4096}
    return published(tmp_path_factory.mktemp("tools"), data, **how)


@pytest.fixture(scope="module", params=["hostile", "tools"])
def report(request):
    return request.getfixturevalue(request.param)


def published(folder, data, **settings):
    version = prepare_in(folder, data, **settings, validate={"max_quarantined": 0.5})
    (page,) = (folder / "store" / version.dataset / "v" / version.id / "report").iterdir()
    if "vega" not in page.read_text("utf-8"):
        pytest.skip("no packhouse/addons/report/vega.js here: python hatch_build.py")
    return page


def opened(page: Page, report: Path, width: int = 1400, scheme: str = "light") -> Any:
    """Open a report at a window width and return the driver once the charts are drawn."""
    driver = page.driver
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    page.open(report.as_uri())
    page.until(
        lambda: driver.execute_script(
            "return [...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))"
        ),
        "chart",
    )
    return driver


def test_charts_have_marks_and_nothing_overflows(page, report):
    for width in WIDTHS:
        driver = opened(page, report, width)
        marks = driver.execute_script(
            "return [...document.querySelectorAll('.chart')].map(chart =>"
            " chart.querySelectorAll('.mark-rect path, .mark-area path, .mark-symbol path').length)"
        )
        assert len(marks) >= 7
        assert all(marks)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        driver.save_screenshot(str(page.pictures / f"{report.parents[3].name}-{width}.png"))


def test_axes_of_few_rows_have_whole_numbers(page, tmp_path):
    """The axis once showed half a pack as `500m`."""
    rows = [{"instruction": f"Say {n}", "output": str(n)} for n in range(3)]
    places = {"store": tmp_path / "store", "cache": tmp_path / "cache"}
    version = packhouse.prepare(rows, tokenizer=TOKENIZER, dataset="few", progress=False, **places)
    version.report(tmp_path / "few.html")
    driver = opened(page, tmp_path / "few.html")

    ticks = driver.execute_script(
        "return [...document.querySelectorAll('.chart text')].map(text => text.textContent)"
    )

    assert "1" in ticks
    assert not [tick for tick in ticks if re.fullmatch(r"[\d.]+m", tick)]


def test_a_phone_shows_result_and_limit_of_each_check_without_scrolling(page, report):
    driver = opened(page, report, 360)
    edges = driver.execute_script(
        "return [...document.querySelectorAll('#audit tr > :nth-child(4)')].map(cell =>"
        " cell.getBoundingClientRect().right)"
    )
    assert len(edges) > 10
    assert max(edges) <= 360


def test_nothing_of_a_row_runs_or_is_fetched(page, report):
    driver = opened(page, report)

    assert driver.execute_script("return window.pwned") is None
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.execute_script("return document.querySelectorAll('img, iframe').length") == 0
    assert driver.get_log("browser") == []


def test_search_finds_text_and_record_and_marks_it(page, report):
    driver = opened(page, report)
    record = driver.execute_script("return document.querySelector('#tokens h3 b').textContent")
    text = driver.execute_script(
        "return [...document.querySelectorAll('#tokens span')].map(s => s.textContent).join('')"
    )
    query = next(word for word in text.split() if len(word) > 4)
    field = driver.find_element("id", "find")

    field.send_keys(record[:12])
    page.until(lambda: "1 of the records" in driver.find_element("id", "where").text, "record")
    assert driver.find_element("css selector", "#tokens h3 b").text == record
    field.clear()
    field.send_keys(query)
    page.until(lambda: driver.find_elements("css selector", "#tokens .hit"), "hit")
    field.clear()
    field.send_keys("no row holds this text")
    page.until(lambda: not driver.find_elements("css selector", "#tokens span"), "empty list")


def test_hover_and_keys_name_ids(page, report):
    from selenium.webdriver import ActionChains, Keys

    driver = opened(page, report)
    token = driver.find_element("css selector", "#tokens span")
    first = driver.execute_script("return arguments[0].record.ids[0]", token)

    ActionChains(driver).move_to_element(token).perform()
    page.until(lambda: f"id {first} " in driver.find_element("id", "tip").text, "tip")
    driver.find_element("id", "tokens").send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: f"id {first} " in driver.find_element("id", "token").text, "token's id")
    driver.find_element("id", "tokens").send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: "token 1 of" in driver.find_element("id", "token").text, "next token")


def serious_findings(driver: Any) -> list[Any]:
    """Return the violations that axe finds on the current page."""
    spec = find_spec("axe_playwright_python")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("axe-playwright-python, which carries axe, is not installed: make setup")
    axe = Path(spec.submodule_search_locations[0], "axe.min.js").read_text("utf-8")
    driver.set_script_timeout(200)
    driver.execute_script(axe)
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(r => done(r.violations.map("
        "v => ({id: v.id, impact: v.impact, html: v.nodes.map(n => n.html.slice(0, 120))}))))"
    )
    return [each for each in found if each["impact"] in ("serious", "critical")]


def test_axe_finds_nothing_serious(page, report):
    for scheme in ("light", "dark"):
        driver = opened(page, report, scheme=scheme)
        assert serious_findings(driver) == []


def test_two_versions_of_hostile_rows_are_compared_and_run_nothing(page, tmp_path):
    """The second version lacks the last 30 lines and also trains prompts."""
    write_rows(tmp_path / "rows.jsonl")
    uris = []
    for train_on in ("assistant", "all"):
        version = prepare_in(
            tmp_path,
            tmp_path / "rows.jsonl",
            tokenizer=TOKENIZER,
            seq_len=512,
            format={"template": "alpaca", "train_on": train_on},
            validate={"max_quarantined": 0.5},
        )
        uris.append(version.uri)
        lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "rows.jsonl").write_text("".join(lines[:-30]))
    old, new = map(open_address, uris)
    made = tmp_path / "diff.html"
    made.write_text(diff_report(old, new, tmp_path / "cache" / "tokenizers"), encoding="utf-8")

    for width, scheme in itertools.product(WIDTHS, ("light", "dark")):
        driver = opened(page, made, width, scheme)
        marks = driver.execute_script(
            "return [...document.querySelectorAll('.chart')].map(chart =>"
            " chart.querySelectorAll('.mark-line path').length)"
        )
        assert marks == [2, 2]
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert serious_findings(driver) == []
        driver.save_screenshot(str(page.pictures / f"diff-{width}-{scheme}.png"))
    shown = driver.execute_script("return document.querySelector('#records').textContent")
    assert "removed" in shown
    assert driver.find_elements("css selector", "#records .gain")
    assert driver.execute_script("return window.pwned") is None
    assert driver.execute_script("return document.querySelectorAll('img, iframe').length") == 0
    assert driver.get_log("browser") == []


def test_hostile_texts_are_shown_as_they_are(page, hostile):
    driver = opened(page, hostile)
    for text in (TEXTS[0], TEXTS[2], TEXTS[6], TEXTS[7]):
        field = driver.find_element("id", "find")
        field.clear()
        field.send_keys(text) if text.isascii() else driver.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
            field,
            text,
        )
        page.until(lambda: driver.find_elements("css selector", "#tokens .hit"), "hit")
        assert "0 of the records" not in driver.find_element("id", "where").text
    assert driver.execute_script("return window.pwned") is None
