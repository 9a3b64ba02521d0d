"""Viewers of pages: nobody is asked on the developer's own machine, and everybody elsewhere."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from conveyor.bootstrap.loop import session_options
from conveyor.dev.rate_limit import MemoryRateLimit
from conveyor.domain.api_keys import key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.auth import open_api_keys, open_operator_keys
from conveyor.http.pages.session import (
    COOKIE,
    ROOT,
    SIGN_IN,
    SIGN_INS_AT_ONCE,
    SessionOptions,
    Sessions,
    is_secure,
)
from conveyor.http.pages.viewer import Viewer
from conveyor.service.callers import derive_keyring
from conveyor.service.sign_ins import LONGEST_SIGN_IN, SignIns
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import KEY, OTHER_KEY, Api, open_api

OPERATOR, READER = "key-of-an-operator", "key-of-a-reader"
LOCAL = ("Host", "localhost:9000")
PUBLIC = ("Host", "conveyor.example")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


def request(*headers: tuple[str, str], scheme: str = "http") -> Request:
    """Build a request for the overview with these headers."""
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "GET", "path": "/dashboard", "headers": raw}
    return Request(scope | {"scheme": scheme, "server": ("127.0.0.1", 9000), "query_string": b""})


def sessions(api: Api, *, on_loopback: bool = True) -> Sessions:
    """Sessions of a server that takes the keys of Alice and Bob, and of two operators."""
    keys = f"{key_hash(KEY)},{key_hash(OTHER_KEY)}"
    operators = f"{key_hash(OPERATOR)} acts at night\n{key_hash(READER)}\n"
    options = SessionOptions(on_loopback=on_loopback, operators=open_operator_keys(operators))
    return Sessions(api.service, api.clock, options, api_keys=open_api_keys(keys))


def signed_in(made: Sessions, api_key: str) -> tuple[str, str]:
    """Sign in; the header that a browser sends from then on."""
    answer = made.sign_in(api_key, ROOT)
    assert answer is not None
    return ("Cookie", f"{COOKIE}={cookie_of(answer)}")


def cookie_of(answer: Response) -> str:
    found = SimpleCookie(answer.headers["Set-Cookie"])
    return found[COOKIE].value


async def test_what_goes_on_is_asked_for_the_sign_in_anew(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{key_hash(KEY)}\n{key_hash(OTHER_KEY)}\n")
    options = SessionOptions(on_loopback=True)
    made = Sessions(api.service, api.clock, options, api_keys=open_api_keys(str(file)))
    requests = [request(PUBLIC, signed_in(made, key)) for key in (KEY, OTHER_KEY)]
    viewers = [await made.identify(one) for one in requests]
    local = await made.identify(request(LOCAL))

    def seen() -> list[bool]:
        pairs = zip(requests, viewers, strict=True)
        return [viewer is not None and made.still_sees(one, viewer) for one, viewer in pairs]

    assert seen() == [True, True]
    file.write_text(f"{key_hash(OTHER_KEY)}\n")
    assert seen() == [False, True]
    await api.clock.advance(LONGEST_SIGN_IN + 1)
    assert seen() == [False, False]
    assert local is not None
    assert made.still_sees(request(LOCAL), local)


# -- this machine --


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "127.8.9.1:1", "[::1]:8080"])
async def test_a_loopback_host_of_a_loopback_server_shows_all_callers(api: Api, host: str) -> None:
    viewer = await sessions(api).identify(request(("Host", host)))
    assert viewer == Viewer(caller_id=None, acts=True)


async def test_a_server_that_others_reach_asks_also_on_loopback(api: Api) -> None:
    assert await sessions(api, on_loopback=False).identify(request(LOCAL)) is None


@pytest.mark.parametrize("host", ["conveyor.example", "10.0.0.1:8080", "localhost.evil.example"])
async def test_another_host_asks(api: Api, host: str) -> None:
    assert await sessions(api).identify(request(("Host", host))) is None


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "x-forwarded-proto"]
)
async def test_a_request_that_a_proxy_passed_on_asks(api: Api, header: str) -> None:
    assert await sessions(api).identify(request(LOCAL, (header, "127.0.0.1"))) is None


async def test_two_hosts_or_none_ask(api: Api) -> None:
    assert await sessions(api).identify(request()) is None
    assert await sessions(api).identify(request(LOCAL, LOCAL)) is None


# -- signing in --


async def test_a_key_signs_in_its_caller_and_the_cookie_hides_it(api: Api) -> None:
    made = sessions(api)
    answer = made.sign_in(KEY, f"{ROOT}/jobs?state=running")
    assert answer is not None
    assert (answer.status_code, answer.headers["Location"]) == (303, f"{ROOT}/jobs?state=running")
    told = answer.headers["Set-Cookie"]
    attributes = {part.strip().lower() for part in told.split(";")[1:]}
    assert told.startswith("__Host-")
    assert {"httponly", "secure", "samesite=lax", "path=/"} <= attributes
    assert not any(part.startswith("domain") for part in attributes)
    assert KEY not in told

    viewer = await made.identify(request(PUBLIC, ("Cookie", f"{COOKIE}={cookie_of(answer)}")))
    assert viewer == Viewer(api.service.identify(KEY).caller_id, signed_in=True)


async def test_an_operator_sees_all_callers_and_acts_where_the_line_says_so(api: Api) -> None:
    made = sessions(api)
    found = [
        await made.identify(request(PUBLIC, signed_in(made, key))) for key in (OPERATOR, READER)
    ]
    assert found == [
        Viewer(None, acts=True, operator=key_hash(OPERATOR), signed_in=True),
        Viewer(None, acts=False, operator=key_hash(READER), signed_in=True),
    ]


async def test_an_unknown_key_does_not_sign_in(api: Api) -> None:
    for key in ("", "key-of-nobody", "two words", "x" * 513):
        assert sessions(api).sign_in(key, ROOT) is None


@pytest.mark.parametrize(
    "address",
    ["//evil.test", "https://evil.test/dashboard", "/v1/jobs", "/dashboardx", "/dashboard\\evil"]
    + ["", "/dashboard\n/x", "javascript:alert(1)"]
    + ["/dashboard/../v1", "/dashboard/..", "/dashboard/jobs/./..?a=b", "/dashboard/.#a"]
    + ["/dashboard/%2e%2E/v1", "/dashboard/.%2E/v1", "/dashboard/..%2Fv1"],
)
async def test_a_sign_in_leads_to_pages_of_ours_alone(api: Api, address: str) -> None:
    answer = sessions(api).sign_in(KEY, address)
    assert answer is not None
    assert answer.headers["Location"] == ROOT


@pytest.mark.parametrize("address", ["/dashboard/jobs?name=a/../b", "/dashboard/jobs/a..b"])
async def test_dots_that_leave_no_page_are_kept(api: Api, address: str) -> None:
    answer = sessions(api).sign_in(KEY, address)
    assert answer is not None
    assert answer.headers["Location"] == address


async def test_each_process_takes_a_bounded_number_of_sign_ins(api: Api) -> None:
    made = sessions(api)
    for _ in range(SIGN_INS_AT_ONCE):
        assert made.sign_in("key-of-nobody", ROOT) is None
    with pytest.raises(ConveyorError) as caught:
        made.sign_in(KEY, ROOT)
    assert (caught.value.code, caught.value.retry_after) == (ErrorCode.RATE_LIMITED, 1)
    await api.clock.advance(1.0)
    assert made.sign_in(KEY, ROOT) is not None


async def test_a_key_that_is_no_longer_accepted_is_signed_out(api: Api) -> None:
    signed = [signed_in(sessions(api), key) for key in (KEY, OPERATOR)]
    after = Sessions(
        api.service,
        api.clock,
        SessionOptions(on_loopback=True),
        api_keys=open_api_keys(key_hash(OTHER_KEY)),
    )
    for header in signed:
        assert await after.identify(request(PUBLIC, header)) is None


async def test_a_cookie_lasts_twelve_hours(api: Api) -> None:
    made = sessions(api)
    header = signed_in(made, KEY)
    api.clock.shift(12 * 3_600 - 1)
    assert await made.identify(request(PUBLIC, header)) is not None
    api.clock.shift(1)
    assert await made.identify(request(PUBLIC, header)) is None


async def test_a_cookie_from_the_future_is_none(api: Api) -> None:
    made = sessions(api)
    api.clock.shift(3_600)
    header = signed_in(made, KEY)
    api.clock.shift(-3_600)
    assert await made.identify(request(PUBLIC, header)) is None


async def test_a_forged_cookie_is_none(api: Api) -> None:
    made = sessions(api)
    name, value = signed_in(made, KEY)
    flipped = value[:-3] + ("A" if value[-3] != "A" else "B") + value[-2:]
    for forged in (flipped, value[:-8], f"{COOKIE}=", f"{COOKIE}={KEY}", f"{COOKIE}=\xe4\xf6"):
        assert await made.identify(request(PUBLIC, (name, forged))) is None


async def test_a_cookie_of_another_secret_or_purpose_is_none() -> None:
    clock = FakeClock()
    older, newer = derive_keyring([b"a" * 32]), derive_keyring([b"b" * 32])
    text = SignIns(older, clock).seal(KEY)
    assert SignIns(older, clock).open(text) == KEY
    assert SignIns(newer, clock).open(text) is None
    assert SignIns(derive_keyring([b"b" * 32, b"a" * 32]), clock).open(text) == KEY
    # What the same secret seals for a job is no sign-in.
    plain = clock.now().to_bytes(8, "big").decode("latin-1") + KEY
    sealed = older.sealer.seal(plain, caller="dashboard", nonce=bytes(12))
    assert SignIns(older, clock).open(urlsafe_b64encode(sealed).decode().rstrip("=")) is None


async def test_signing_out_takes_the_cookie_back(api: Api) -> None:
    answer = sessions(api).sign_out()
    assert answer.status_code == 303
    assert f'{COOKIE}=""; ' in answer.headers["Set-Cookie"]
    assert "Max-Age=0" in answer.headers["Set-Cookie"]


# -- forms --


async def test_the_token_of_a_form_belongs_to_one_sign_in(api: Api) -> None:
    made = sessions(api)
    local, alice = request(LOCAL), request(PUBLIC, signed_in(made, KEY))
    bob = request(PUBLIC, signed_in(made, OTHER_KEY))
    tokens = [made.token(one) for one in (local, alice, bob)]
    assert len(set(tokens)) == 3
    for one, token in zip((local, alice, bob), tokens, strict=True):
        made.check_token(one, token)
        for wrong in {*tokens, "", "é"} - {token}:
            with pytest.raises(ConveyorError) as caught:
                made.check_token(one, wrong)
            assert caught.value.code is ErrorCode.PERMISSION_DENIED


# -- https --


@pytest.mark.parametrize(
    "headers",
    [
        (LOCAL,),
        (("Host", "conveyor.public"),),
        (PUBLIC, ("X-Forwarded-Proto", "https, http")),
        (PUBLIC, ("Forwarded", 'for=10.0.0.1;proto=https;host="x"')),
        (PUBLIC, ("Sec-Fetch-Site", "none")),
    ],
    ids=str,
)
def test_https_is_recognised_behind_a_proxy(headers: tuple[tuple[str, str], ...]) -> None:
    assert is_secure(request(*headers), "https://conveyor.public")


def test_http_elsewhere_than_on_loopback_keeps_no_cookie() -> None:
    assert not is_secure(request(PUBLIC), "https://conveyor.public")
    assert not is_secure(request(PUBLIC, ("X-Forwarded-Proto", "http")), "http://conveyor.example")
    assert is_secure(request(PUBLIC, scheme="https"), "http://conveyor.example")


# -- settings --


def test_production_has_no_dashboard_unless_it_is_asked_for() -> None:
    assert session_options(load({}, production=True)) is None
    asked = session_options(load({"CONVEYOR_DASHBOARD": "on"}, production=True))
    assert asked is not None
    assert not asked.on_loopback
    assert session_options(load({"CONVEYOR_DASHBOARD": "off"})) is None


@pytest.mark.parametrize(
    ("host", "on_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_a_server_is_on_loopback_if_it_listens_there_alone(host: str, on_loopback: bool) -> None:
    options = session_options(load({"CONVEYOR_HOST": host}))
    assert options is not None
    assert options.on_loopback is on_loopback


async def test_a_caller_has_the_rate_of_the_api_on_pages_too(api: Api) -> None:
    limit = MemoryRateLimit(api.clock, rate=1, burst=2)
    options = SessionOptions(on_loopback=True)
    keys = open_api_keys(key_hash(KEY))
    made = Sessions(api.service, api.clock, options, api_keys=keys, rate_limit=limit)
    header = signed_in(made, KEY)
    for _ in range(2):
        assert await made.identify(request(PUBLIC, header)) is not None
    with pytest.raises(ConveyorError) as caught:
        await made.identify(request(PUBLIC, header))
    assert caught.value.code is ErrorCode.RATE_LIMITED


async def test_the_sign_in_page_says_where_any_key_is_accepted(tmp_path: Path) -> None:
    options = SessionOptions(on_loopback=False)
    said = []
    for name, keys in (("any", open_api_keys("any")), ("one", open_api_keys(key_hash("key")))):
        async with open_api(tmp_path / name, api_keys=keys, sessions=options) as asking:
            page = await asking.bare.get(SIGN_IN)
            said.append("accepts any key" in page.text)
    assert said == [True, False]
