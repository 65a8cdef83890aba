"""Prefect's API requires the password on every route, and a token for every change."""

import base64
import uuid

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OPEN = {"/api/health", "/api/ready"}  # probes: they answer `true` and take no parameters


def basic(auth):
    return {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}


@pytest.fixture(scope="module")
def routes(stack):
    """Every method and path of the server, with placeholders filled in."""
    paths = stack.api.client.get(f"{stack.origin}/api/openapi.json").json()["paths"]
    names = {"{id}": str(uuid.uuid4())}
    found = []
    for path, methods in paths.items():
        filled = "/".join(
            names.get(part, str(uuid.uuid4())) if part.startswith("{") else part
            for part in path.split("/")
        )
        prefix = "" if filled.startswith("/api") else "/api"
        found += [(method.upper(), prefix + filled) for method in methods]
    return found


def test_no_route_but_the_probes_answers_without_the_password(stack, routes):
    assert len(routes) > 150
    token = {k: v for k, v in stack.api.client.headers.items() if "csrf" in k.lower()}
    assert len(token) == 2  # so that nothing is refused only because it is missing
    with httpx.Client(base_url=stack.origin, timeout=60, headers=token) as client:
        answers = {(m, p): client.request(m, p).status_code for m, p in routes}
    let_in = {route for route, status in answers.items() if status != 401}
    assert {path for _, path in let_in} <= OPEN


@pytest.mark.parametrize("auth", ["admin:", "admin:wrong", "wrong", ":", "admin:\u00e9"])
def test_a_wrong_password_is_refused(stack, auth):
    answer = httpx.get(f"{stack.origin}/api/admin/version", headers=basic(auth))
    assert answer.status_code in (401, 500)  # 500: accents break hmac; still no access
    assert "3.8" not in answer.text


def test_a_change_without_a_csrf_token_is_refused(stack):
    answer = httpx.post(
        f"{stack.origin}/api/variables/",
        headers=basic(stack.secrets.auth),
        json={"name": "planted", "value": 1},
    )
    assert answer.status_code == 403
    assert "CSRF" in answer.text


def test_another_site_may_not_call_the_api(stack):
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{stack.origin}/api/flow_runs/filter", headers=asked)
    assert "access-control-allow-origin" not in answer.headers
    answer = httpx.options(
        f"{stack.origin}/api/flow_runs/filter", headers={**asked, "Origin": stack.origin}
    )
    assert answer.headers["access-control-allow-origin"] == stack.origin


def talk(url, *messages, **options):
    """Send a message on a websocket and wait for the server's answer."""
    with connect(url, open_timeout=60, **options) as socket:
        for message in messages:
            socket.send(message)
        return [socket.recv(timeout=60) for _ in messages]


@pytest.mark.parametrize("path", ["events/in", "events/out", "logs/out"])
@pytest.mark.parametrize("message", ['{"type": "auth"}', '{"type": "auth", "token": "x"}', "{}"])
def test_no_websocket_opens_without_the_password(stack, path, message):
    url = f"{stack.origin.replace('http', 'ws')}/api/{path}"
    with pytest.raises(ConnectionClosed):
        talk(url, message, "{}", subprotocols=["prefect"])
    with pytest.raises((InvalidHandshake, ConnectionClosed)):
        talk(url, message)
