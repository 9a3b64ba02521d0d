"""Signatures of events: two schemes, held against two independent verifiers."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import WebhookVerificationError
from zenrows.batch import verify_webhook_signature

from conveyor import signatures as public
from conveyor.clock import SystemClock
from conveyor.domain.signatures import SECRET_LENGTH, TOLERANCE, SigningSecret, sign, verify

OLD = SigningSecret("01ARZ3NDEKTSV4RRFFQ69G5FAV", bytes(range(SECRET_LENGTH)))
NEW = SigningSecret("01ARZ3NDEKTSV4RRFFQ69G5FAW", bytes(range(1, SECRET_LENGTH + 1)))
EVENT_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAX"
BODY = b'{"event_type":"run.completed","name":"\xe2\x80\xa8</script>"}'

EVENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
).map(lambda event: json.dumps({"event": event}, ensure_ascii=False).encode("utf-8", "replace"))


def text_of(key: SigningSecret) -> str:
    return base64.b64encode(key.secret).decode()


def by_the_client(body: bytes, headers: Mapping[str, str], *keys: SigningSecret) -> bool:
    """The published client's verifier, with the keys that a receiver knows."""
    secrets = {key.kid: text_of(key) for key in keys}
    return verify_webhook_signature(body, headers["X-Signature"], secrets)


def by_standard_webhooks(body: bytes, headers: Mapping[str, str], key: SigningSecret) -> bool:
    """The verifier of Standard Webhooks."""
    try:
        standardwebhooks.Webhook(text_of(key)).verify(body, dict(headers))
    except WebhookVerificationError:
        return False
    return True


def present() -> int:
    return SystemClock().now() // 1_000


@given(EVENTS, st.integers(0, 1_000_000))
@pytest.mark.slow
def test_three_verifiers_agree_on_what_is_signed_and_on_a_flipped_bit(
    body: bytes, bit: int
) -> None:
    now = present()
    headers = sign(body, event_id=EVENT_ID, timestamp=now, active=OLD)
    place, mask = bit // 8 % len(body), 1 << bit % 8
    flipped = body[:place] + bytes([body[place] ^ mask]) + body[place + 1 :]

    assert by_the_client(body, headers, OLD)
    assert by_standard_webhooks(body, headers, OLD)
    assert verify(body, headers, text_of(OLD), now=now)
    assert not by_the_client(flipped, headers, OLD)
    assert not verify(flipped, headers, text_of(OLD), now=now)
    # The oracle reads the text first: a flipped bit may leave no UTF-8.
    if _is_text(flipped):
        assert not by_standard_webhooks(flipped, headers, OLD)


def _is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_receiver_with_either_key_verifies_each_event_of_a_rotation() -> None:
    now = present()
    headers = sign(BODY, event_id=EVENT_ID, timestamp=now, active=OLD, candidate=NEW)

    assert f"kid={OLD.kid}" in headers["X-Signature"]
    assert len(headers["webhook-signature"].split(" ")) == 2
    for key in (OLD, NEW):
        assert by_standard_webhooks(BODY, headers, key)
        assert verify(BODY, headers, text_of(key), now=now)
    assert by_the_client(BODY, headers, OLD)
    assert verify(BODY, headers, [text_of(OLD), text_of(NEW)], now=now)
    assert verify(BODY, headers, f"whsec_{text_of(NEW)}", now=now)
    assert verify(BODY, headers, NEW.secret, now=now)


@pytest.mark.parametrize("scheme", ["X-Signature", "webhook-signature"])
def test_one_scheme_is_enough_and_names_match_in_any_case(scheme: str) -> None:
    signed = sign(BODY, event_id=EVENT_ID, timestamp=1_000, active=OLD)
    others = {"X-Signature", "webhook-signature"} - {scheme}
    headers = {name.upper(): value for name, value in signed.items() if name not in others}

    assert verify(BODY, headers, OLD.secret, now=1_000)
    assert not verify(BODY, headers, NEW.secret, now=1_000)


@pytest.mark.parametrize("apart", [-TOLERANCE - 1, TOLERANCE + 1])
def test_an_old_or_a_future_signature_does_not_count(apart: int) -> None:
    headers = sign(BODY, event_id=EVENT_ID, timestamp=10_000, active=OLD)

    assert not verify(BODY, headers, OLD.secret, now=10_000 + apart)
    assert verify(BODY, headers, OLD.secret, now=10_000 + apart, tolerance=TOLERANCE + 1)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"X-Signature": ""},
        {"X-Signature": "t=,v1=,kid="},
        {"X-Signature": f"t=1000,v1={'g' * 64}"},
        {"X-Signature": f"t=1000,v1={'0' * 64}"},
        {"X-Signature": f"t=-5,v1={'0' * 64}"},
        {"webhook-id": "id", "webhook-timestamp": "1000", "webhook-signature": "v1,"},
        {"webhook-id": "id", "webhook-timestamp": "1000", "webhook-signature": "v1,é"},
        {"webhook-id": "id", "webhook-timestamp": "٣", "webhook-signature": "v1,AAAA"},
        {"webhook-id": "", "webhook-timestamp": "1000", "webhook-signature": "v2,AAAA"},
        # As servers pass bytes on that are no text.
        {"webhook-id": "\udcff", "webhook-timestamp": "1000", "webhook-signature": "v1,AAAA"},
        {"webhook-id": "id", "webhook-timestamp": "1000", "webhook-signature": "v1,\udcff"},
        {"X-Signature": b"t=1000", "webhook-id": None, "webhook-signature": ["v1,AAAA"]},
    ],
)
def test_what_is_not_a_signature_verifies_nothing(broken: dict[str, object]) -> None:
    assert not verify(BODY, broken, OLD.secret, now=1_000)


def test_an_event_under_another_id_or_instant_does_not_verify_by_the_standard_scheme() -> None:
    headers = sign(BODY, event_id=EVENT_ID, timestamp=1_000, active=OLD)
    del headers["X-Signature"]

    assert verify(BODY, headers, OLD.secret, now=1_000)
    assert not verify(BODY, headers | {"webhook-id": "other"}, OLD.secret, now=1_000)
    assert not verify(BODY, headers | {"webhook-timestamp": "1001"}, OLD.secret, now=1_000)


@pytest.mark.parametrize("secret", ["", "no base64!", "AAAA", b"short", "é"])
def test_a_secret_that_cannot_be_one_is_refused(secret: str | bytes) -> None:
    with pytest.raises(ValueError, match="signing secret") as caught:
        verify(BODY, {}, secret, now=0)
    assert not secret or str(secret) not in str(caught.value)


def test_receivers_verify_by_the_present_moment() -> None:
    now = int(datetime.now(UTC).timestamp())
    headers = sign(BODY, event_id=EVENT_ID, timestamp=now, active=OLD)

    assert public.verify(BODY, headers, text_of(OLD))
    assert not public.verify(BODY, headers, text_of(NEW))


def test_a_secret_is_in_no_repr() -> None:
    assert text_of(OLD) not in repr(OLD)
    assert repr(OLD.secret) not in repr(OLD)
