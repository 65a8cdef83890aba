"""Use Prefect's UI as people do: log in, fill in the form, start, watch, read, and be refused.

Screenshots of every stage are saved in test-output/browser/.
"""

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECTIONS = (
    "Name of the dataset in the store.",
    "Sources of raw rows.",
    "Folder of the tokenizer",
    "Rules for rows",
    "How records are packed",
    "Which records go to the eval split",
    "Destination and files of the published version.",
)
"""Descriptions of the recipe's sections, in the recipe's order."""


@pytest.fixture(scope="module")
def ui(page, deployed):
    """The UI of the stack, logged in with the auth string."""
    page.open(deployed.origin)
    page.says("Login")
    field = page.find("//input[@type='password']")
    field.send_keys("admin:wrong")
    page.click("Login")
    page.until(lambda: "/login" in page.driver.current_url, "login page")
    page.picture("01-login-refused")
    page.open(deployed.origin)
    page.find("//input[@type='password']").send_keys(deployed.secrets.auth)
    page.click("Login")
    page.says("Dashboard", "Logout")
    return page


def open_form(ui, stack):
    found = stack.api.get("/deployments/name/prepare/form-prepare")
    ui.open(f"{stack.origin}/v2/deployments/deployment/{found['id']}")
    ui.says("prepare", "packhouse")
    ui.picture("03-deployment")
    ui.click("Run")
    ui.click("Custom run", tag="*[@role='menuitem']")
    ui.says("Parameters", "Max Quarantined")


def submit(ui, stack):
    """Submit the form and return the run that it started."""
    ui.click("Submit")
    name = ui.until(lambda: "/runs/flow-run/" in ui.driver.current_url or started_link(ui), "run")
    if name is not True:
        name.click()
    ui.until(lambda: "/runs/flow-run/" in ui.driver.current_url, "page of the run")
    return ui.driver.current_url.split("/flow-run/")[1].split("?")[0].strip("/")


def started_link(ui):
    links = ui.driver.find_elements("xpath", "//*[self::a or self::button][.='View run']")
    return next(iter(links), None)


def open_artifact(ui, stack, run_id, key, picture):
    artifact = stack.api.artifacts(run_id)[key]
    ui.open(f"{stack.origin}/v2/artifacts/artifact/{artifact['id']}")
    ui.says(artifact["description"] or key)
    ui.picture(picture)
    return ui.text


def test_the_deployments_are_listed(ui, deployed):
    ui.open(f"{deployed.origin}/v2/deployments")
    ui.says("nightly-refresh", "form-prepare", "promote-version", "weekly-gc")  # ten of eleven
    ui.picture("02-deployments")


def test_a_person_fills_the_form_runs_it_and_reads_what_was_published(ui, deployed):
    open_form(ui, deployed)
    text = ui.text
    places = [text.index(described) for described in SECTIONS]
    assert places == sorted(places)  # in the recipe's order, not PostgreSQL's
    assert "Pack size in tokens." in text
    ui.fill("Dataset", "browser-demo")
    ui.fill("Seq Len", "256")
    ui.picture("04-form-filled")
    run_id = submit(ui, deployed)
    ui.picture("05-run-started")

    run = deployed.api.wait(run_id)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert run["parameters"]["recipe"]["dataset"] == "browser-demo"
    assert run["parameters"]["recipe"]["pack"]["seq_len"] == 256
    ui.find("//*[text()='Published']")  # the page's own word; the logs contain `Published(` earlier
    ui.picture("06-run-completed")
    ui.click("Artifacts", tag="*[@role='tab']")
    ui.says("browser-demo-version")
    ui.picture("07-run-artifacts")
    page = open_artifact(ui, deployed, run_id, "browser-demo-version", "08-artifact-version")
    for shown in ("Ledger", "validate", "304", "295", "Audit", "load_packed"):
        assert shown in page
    table = open_artifact(ui, deployed, run_id, "browser-demo-quarantine", "09-artifact-quarantine")
    assert "unknown_role" in table
    open_artifact(ui, deployed, run_id, "browser-demo-sources", "10-artifact-sources")


def test_a_run_that_a_gate_refuses_says_why(ui, deployed):
    open_form(ui, deployed)
    ui.fill("Dataset", "browser-refused")
    ui.fill("Max Quarantined", "0.01")
    run_id = submit(ui, deployed)
    run = deployed.api.wait(run_id)
    assert run["state_type"] == "FAILED"
    ui.find("//*[text()='Refused']")
    ui.open(ui.driver.current_url)  # the page stops requesting logs when the run has ended
    ui.says("Refused", "refused by its quarantine gate")
    ui.picture("11-run-refused")
    page = open_artifact(ui, deployed, run_id, "browser-refused-refused", "12-artifact-refused")
    assert "9 of 304" in page
    assert "Nothing was published" in page


def test_a_bad_value_is_refused_before_a_run_starts(ui, deployed):
    before = deployed.api.count("prepare/form-prepare")
    open_form(ui, deployed)
    ui.fill("Seq Len", "0")
    ui.click("Submit")
    ui.until(lambda: "minimum" in ui.text.lower() or "less than" in ui.text.lower(), "refusal")
    ui.picture("13-form-refused")
    assert deployed.api.count("prepare/form-prepare") == before
