"""Take secrets out of requests, and find them again in answers, in every usual encoding.

Redacted are API keys, the values of custom_headers, credentials in URLs, and values whose names
look like those of keys, in queries, params and posted forms and documents.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote, unquote_plus

import msgspec

from conveyor.domain.text_rules import MASK
from conveyor.gateway.refusals import MIN_VALUE, in_base64, redactor
from conveyor.ports.gateway import ScrapeRequest
from conveyor.ports.recordings import Asked

# -- names --

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_PARTS = re.compile(
    r"apikey|accesskey|token|secret|passw|passphrase|passcode|credential|signature|authori[sz]"
    r"|sess(?:ion)?id|cookie|jwt|bearer|csrf|xsrf|(?:pwd|auth)$"
)
_SECRET_WORDS = frozenset(
    ["auth", "creds", "hmac", "otp", "pass", "pin", "pwd", "sess", "session", "sid", "sig", "totp"]
)
_LAST_PART = re.compile(r"(?:keys?|pass|session)$")
_NO_SECRETS = frozenset(
    [
        "donkey",
        "hockey",
        "jockey",
        "lackey",
        "mickey",
        "monkey",
        "turkey",
        "whiskey",
        "bypass",
        "compass",
        "encompass",
        "overpass",
        "surpass",
        "trespass",
        "underpass",
        "obsession",
    ]
)
"""Words that end as the names of secrets do."""


def _looks_secret(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    joined = "".join(words)
    if not _SECRET_WORDS.isdisjoint(words) or _SECRET_PARTS.search(joined) is not None:
        return True
    return _LAST_PART.search(joined) is not None and words[-1] not in _NO_SECRETS


class SecretNames(msgspec.Struct, frozen=True):
    """The names of headers and of query values that are secret beside those that look like it."""

    headers: tuple[str, ...] = ()
    query: tuple[str, ...] = ()

    def match(self, name: str) -> bool:
        """Tell whether the value of this name is a secret."""
        if _looks_secret(name):
            return True
        lowered = name.lower()
        return any(lowered == other.lower() for other in (*self.headers, *self.query))


USUAL_NAMES = SecretNames()


def usual_names() -> SecretNames:
    """Return the names that are secret without any choice."""
    return USUAL_NAMES


class GrowingNames:
    """The names that a source gives, with all that it gave before: a secret stays one."""

    def __init__(self, source: Callable[[], SecretNames]) -> None:
        self._source = source
        self._known = USUAL_NAMES

    def __call__(self) -> SecretNames:
        """Return the present names."""
        given, known = self._source(), self._known
        headers = dict.fromkeys((*known.headers, *given.headers))
        query = dict.fromkeys((*known.query, *given.query))
        self._known = SecretNames(tuple(headers), tuple(query))
        return self._known


# -- values --

_USUAL = """
    accept admin age all alive anonymous any application apng avif basic bearer br cache charset
    client close content deflate demo en example false form guest gzip html http https identity
    image immutable iso javascript json keep latin local localhost max multipart no none null off
    on plain png
    public reload root store svg test text transform true undefined urlencoded user username utf
    webp www xhtml xml xmlhttprequest zstd
"""
_WORDS = frozenset(_USUAL.split())
_SPLIT = re.compile(r"[^0-9a-zA-Z]+")
_LANGUAGE = r"(?:[a-z]{2}(?:-[A-Za-z]{2})?|\*)(?:;q=[01](?:\.[0-9])?)?"
_LANGUAGES = re.compile(f"{_LANGUAGE}(?:, ?{_LANGUAGE})*")


def _is_ordinary(value: str) -> bool:
    """Tell whether a value consists of words that everybody uses, so that it is no secret and
    stands in many pages: a type, a language, the key `local`."""
    if _LANGUAGES.fullmatch(value) is not None:
        return True
    words = [word.lower() for word in _SPLIT.split(value) if word]
    known = [word for word in words if word in _WORDS]
    return bool(known) and all(word in _WORDS or len(word) == 1 for word in words)


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*[ ]+(.+)", re.DOTALL)
_PAIR = re.compile(r"[^=;,]+=\"?([^;,\"]*)")


class _Secrets:
    """The values that were taken out of one request."""

    def __init__(self, names: SecretNames, api_key: str) -> None:
        self.names = names
        self._found: set[str] = set()
        self._beside: set[str] = set()
        self.add(api_key)

    def add(self, value: str, *, is_hidden: bool = True) -> None:
        """Remember a value in each of its spellings. One that is not hidden is looked for in
        answers, and no secret where calls are listed."""
        for spelt in (value, unquote(value), unquote_plus(value), value.strip()):
            if len(spelt) >= MIN_VALUE and not _is_ordinary(spelt):
                (self._found if is_hidden else self._beside).add(spelt)

    def add_header(self, name: str, value: str) -> None:
        """Remember the value of a header; of credentials and cookies also their parts, of others
        what stands in it."""
        is_secret = self.names.match(name)
        self.add(value, is_hidden=is_secret)
        if not is_secret:
            _text(value, self, 1)
            return
        scheme = _SCHEME.fullmatch(value)
        if scheme is not None:
            self.add(scheme[1])
            self.add_pair(_decoded(scheme[1]))
        for part in _PAIR.findall(value):
            self.add(part)

    def add_pair(self, pair: str) -> None:
        """Remember a user and a password, apart and together."""
        user, colon, password = pair.partition(":")
        for value in (pair, password) if colon else (pair,):
            self.add(value)
        if colon:
            self.add(user, is_hidden=False)
        self.add(f"{unquote(user)}:{unquote(password)}")

    @property
    def found(self) -> tuple[str, ...]:
        """Return all of them, the longest first."""
        return _longest_first(self._found | self._beside)

    @property
    def hidden(self) -> tuple[str, ...]:
        """Return those that are secrets wherever they stand, the longest first."""
        return _longest_first(self._found)


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def _decoded(text: str) -> str:
    """Return the user and password in the credentials of the scheme Basic; nothing for others."""
    try:
        return b64decode(text, validate=True).decode()
    except ValueError:
        return ""


# -- finding --

_ESCAPE = re.compile(
    rb"%([0-9A-Fa-f]{2})"
    rb"|((?:\\u[0-9A-Fa-f]{4})+)"
    rb"|\\u\{([0-9A-Fa-f]{1,6})\}"
    rb"|\\x([0-9A-Fa-f]{2})"
    rb"|\\([\"'/\\bfnrt])"
    rb"|(&#[0-9]{1,7};?|&#[xX][0-9A-Fa-f]{1,6};?|&[A-Za-z][A-Za-z0-9]{1,31};)"
)
_CONTROLS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
ROUNDS = 3
"""Times that a text may be escaped on top of itself, as JSON within JSON is."""
_MOST_SPELT = 40
"""Bytes that a byte of a secret may take."""
_LEAST_RUN = 8
_STANDARD = bytes.maketrans(b"-_", b"+/")
_HEX_RUN = re.compile(rb"[0-9A-Fa-f]{8,}")
MOST_HELD = 262_144


def _unescaped(match: re.Match[bytes]) -> bytes:
    percent, units, braced, byte, control, reference = match.groups()
    if percent or byte:
        return bytes.fromhex((percent or byte).decode())
    if units:
        pairs = bytes.fromhex(units.replace(rb"\u", b"").decode())
        return pairs.decode("utf-16-be", "replace").encode()
    if braced:
        code = int(braced, 16)
        return chr(code).encode("utf-8", "replace") if code <= 0x10FFFF else b""
    if control:
        return _CONTROLS.get(control, control)
    return html.unescape(reference.decode()).encode("utf-8", "replace")


class SecretScanner:
    """Looks for secrets in bytes that come in pieces: plain, percent-encoded, in base 64, in
    hexadecimal, escaped for JSON or HTML, and in several of these at once."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._plain: list[bytes] = []
        self._base64: list[bytes] = []
        self._hex: list[bytes] = []
        for secret in secrets:
            self._learn(secret)
        lengths = [len(secret) for secret in self._plain]
        longest = max(lengths, default=0)
        least = max(min(lengths, default=0) * 4 // 3, _LEAST_RUN)
        self._packed = re.compile(rb"[0-9A-Za-z+/]{%d,}" % least)
        self._overlap = min(longest * _MOST_SPELT, MOST_HELD)
        self._tail = b""

    def _learn(self, secret: str) -> None:
        data = secret.encode("utf-8", "replace")
        self._plain.append(data)
        if " " in secret:
            self._plain.append(data.replace(b" ", b"+"))
        if not secret.isascii():
            self._plain.append(secret.encode("latin-1", "replace"))
        self._hex.append(data.hex().encode())
        for spelt in in_base64(data):
            self._base64 += {spelt, spelt.translate(bytes.maketrans(b"+/", b"-_"))}

    def restarted(self) -> SecretScanner:
        """Return a scanner for the same secrets at the start of another text."""
        other = SecretScanner(())
        other._plain, other._base64, other._hex = self._plain, self._base64, self._hex
        other._overlap, other._packed = self._overlap, self._packed
        return other

    def feed(self, piece: bytes) -> bool:
        """Read the next piece; return whether a secret stands in it, or across its start."""
        if not self._plain:
            return False
        text = self._tail + piece
        self._tail = text[-self._overlap :]
        return self.finds(text)

    def finds(self, text: bytes) -> bool:
        """Return whether a secret stands in a text."""
        texts = [text]
        for _ in range(ROUNDS):
            if any(self._stands(text) for text in texts):
                return True
            texts = [plainer for text in texts for plainer in self._plainer(text)]
        return any(self._stands(text) for text in texts)

    def _plainer(self, text: bytes) -> Iterable[bytes]:
        """Yield what a text says if it is escaped, and what is packed in it, at any place."""
        plainer = _ESCAPE.sub(_unescaped, text)
        if plainer != text:
            yield plainer
        unbroken = text.translate(_STANDARD, b"\r\n")
        packed: list[bytes] = self._packed.findall(unbroken)
        for start in range(4 if packed else 0):
            # Padding that is no padding: what follows a text does no harm.
            filled = (run[start:] + b"A" * ((start - len(run)) % 4) for run in packed)
            yield b64decode(b"".join(filled))
        digits: list[bytes] = _HEX_RUN.findall(unbroken)
        for start in range(2 if digits else 0):
            even = (run[start : len(run) - (len(run) - start) % 2] for run in digits)
            yield bytes.fromhex(b"".join(even).decode())

    def _stands(self, text: bytes) -> bool:
        if b"\0" in text and self._stands(text.replace(b"\0", b"")):
            return True
        if any(secret in text for secret in self._plain):
            return True
        unbroken = text.translate(None, b"\r\n")
        if any(secret in unbroken for secret in self._base64):
            return True
        lowered = unbroken.lower()
        return any(secret in lowered for secret in self._hex)


@lru_cache(maxsize=64)
def _scanner_of(secrets: tuple[str, ...]) -> SecretScanner:
    return SecretScanner(secrets)


# -- requests --

_URL = re.compile(
    r"((?:[A-Za-z][A-Za-z0-9+.-]*:[/\\]*|[/\\]{2,})?)((?<=[:/\\])[^/\\?#]*)?([^?#]*)(\?[^#]*)?(#.*)?",
    re.DOTALL,
)
_IN_PATH = re.compile(r"(?:^|(?<=[/;,&]))([^=;/,&]+)=([^;/,&]*)")
_USER_IN_PATH = re.compile(r"(:/{1,2})([^/@]+)@")
_NESTED = 4


class Redacted(msgspec.Struct, frozen=True):
    """A request without its secrets, and what finds these again.

    In `plain` the values that are secrets are redacted in their own places alone: it is only for
    comparing, and never written. `masked` names the parts in which `asked` differs from it.
    """

    asked: Asked
    secrets: tuple[str, ...]
    plain: Asked
    masked: tuple[str, ...]

    def scanner(self) -> SecretScanner:
        """Return a scanner for the answer."""
        return _scanner_of(self.secrets).restarted()


def redacted(request: ScrapeRequest, names: SecretNames = USUAL_NAMES) -> Redacted:
    """Take the secrets out of a request."""
    secrets = _Secrets(names, request.api_key)
    url, params, content_type, posted = _taken_apart(request, secrets)
    found = secrets.found
    scanner = _scanner_of(found)

    def clean(text: str) -> str:
        data = text.encode("utf-8", "replace")
        if not scanner.finds(data):
            return data.decode()
        masked = redactor("", found)(data.decode())
        return MASK if scanner.finds(masked.encode()) else masked

    plain = _asked(request, url, params, (content_type, posted))
    cleaned = {clean(name): clean(value) for name, value in params.items()}
    asked = _asked(request, clean(url), cleaned, (clean(content_type), clean(posted)))
    differs = {
        "url": asked.url != plain.url,
        "params": asked.params != plain.params,
        "posted": asked.body != plain.body,
    }
    masked = tuple(part for part, is_other in differs.items() if is_other)
    return Redacted(asked, found, plain, masked)


def _taken_apart(request: ScrapeRequest, secrets: _Secrets) -> tuple[str, dict[str, str], str, str]:
    """Remember the secrets of a request; return its URL, params, type and content without them."""
    url = _url(request.url, secrets)
    params = {name: _param(name, value, secrets) for name, value in sorted(request.params.items())}
    if request.body is None:
        return url, params, "", ""
    content_type = request.body.content_type
    return url, params, content_type, _posted(request.body.content, content_type, secrets)


def secrets_of(request: ScrapeRequest, names: SecretNames = USUAL_NAMES) -> tuple[str, ...]:
    """Return the values of a request that nobody may see, the longest first."""
    secrets = _Secrets(names, request.api_key)
    _taken_apart(request, secrets)
    return secrets.hidden


def _asked(
    request: ScrapeRequest, url: str, params: dict[str, str], posted: tuple[str, str]
) -> Asked:
    body = "" if request.body is None else _digest(list(posted))
    key = _digest([request.method, url, body, sorted(params.items())])
    return Asked(key, request.order, request.method, url, params, body)


def _digest(parts: list[Any]) -> str:
    # Characters that are half of one may stand in a text, and have no bytes of their own.
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _url(url: str, secrets: _Secrets, depth: int = 0) -> str:
    parts = _URL.fullmatch(url)
    if parts is None:
        return url
    scheme, authority, path, query, fragment = parts.groups("")
    user, at, host = authority.rpartition("@")
    if user:
        secrets.add_pair(user)
        authority = f"{MASK}{at}{host}"
    shown = scheme + authority + _path(path, secrets, depth)
    if query:
        shown += "?" + _query(query[1:], secrets, depth)
    if fragment:
        route, mark, query = fragment[1:].partition("?")
        shown += "#" + _query(route, secrets, depth) + mark + _query(query, secrets, depth)
    return shown


def _path(path: str, secrets: _Secrets, depth: int) -> str:
    """Redact pairs and URLs that stand in a path."""

    def pair(found: re.Match[str]) -> str:
        name, value = found.groups()
        if not secrets.names.match(unquote(name)):
            return found[0]
        secrets.add(value)
        return f"{name}={MASK}"

    def user(found: re.Match[str]) -> str:
        secrets.add_pair(found[2])
        return f"{found[1]}{MASK}@"

    path = _USER_IN_PATH.sub(user, _IN_PATH.sub(pair, path))
    if "%" not in path:
        return path
    return "/".join(_value(part, secrets, depth + 1) for part in path.split("/"))


def _value(value: str, secrets: _Secrets, depth: int) -> str:
    """Redact a value that is a URL, a query or a document, or holds one, escaped or not."""
    if depth > _NESTED:
        return value
    if value.lstrip()[:1] in _BEGINS:
        return _document_text(value, secrets, depth)
    shown = _url(value, secrets, depth)
    plain = unquote(value)
    if shown != value or plain == value:
        return shown
    if "+" in plain and plain.lstrip()[:1] in _BEGINS:
        plain = unquote_plus(value)
    inner = _value(plain, secrets, depth + 1)
    return value if inner == plain else quote(inner, safe="")


_BEGINS = ("{", "[", "<", '"')
"""The first characters of documents, and of texts of JSON."""
_SPACE = re.compile(r"\s")
_FORM = re.compile(r"[^\s=&?#/:;,{}<>\"]+=[^\s?#]*")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>()\[\]{}\\|^`]+")


def _text(text: str, secrets: _Secrets, depth: int) -> str:
    """Redact a text of a document, a form or a header, which may be one of these itself, a query or
    a URL, or have URLs in it."""
    if depth > _NESTED or not text:
        return text
    if is_form_in_parts(text, ""):
        return _posted(text, "", secrets, depth)
    if _FORM.fullmatch(text) is not None:
        return _query(text, secrets, depth)
    if not _SPACE.search(text.strip()):
        return _value(text, secrets, depth)
    if text.lstrip()[:1] in _BEGINS:
        return _document_text(text, secrets, depth)
    return _URL_IN_TEXT.sub(lambda found: _url(found[0], secrets, depth), text)


def _document_text(text: str, secrets: _Secrets, depth: int) -> str:
    """Redact a document of JSON or with markup; one without a secret stays as it is spelt."""
    if text.lstrip()[:1] == "<":
        return _markup(text, secrets, depth)
    try:
        shown = _json(text, secrets, depth)
        return text if shown == json.dumps(json.loads(text), sort_keys=True) else shown
    except (ValueError, RecursionError):
        return _marked(_MEMBER, text, secrets, depth)


_OAUTH = frozenset(
    [
        "client_id",
        "code_verifier",
        "grant_type",
        "iss",
        "redirect_uri",
        "scope",
        "session_state",
        "state",
    ]
)
"""Names beside which `code` is the secret of a sign-in; elsewhere it is that of a product."""


def _query(text: str, secrets: _Secrets, depth: int = 0) -> str:
    pairs = text.split("&")
    if any(pair.partition("=")[0] in _OAUTH for pair in pairs):
        pairs = [_without_code(pair, secrets) for pair in pairs]
    return "&".join(_pair(pair, secrets, depth) for pair in pairs)


def _without_code(pair: str, secrets: _Secrets) -> str:
    name, _, value = pair.partition("=")
    if name != "code":
        return pair
    secrets.add(value)
    return f"{name}={MASK}"


def _pair(pair: str, secrets: _Secrets, depth: int) -> str:
    """Redact a pair of a query; one that is separated by semicolons from the first secret on."""
    shown: list[str] = []
    rest = pair
    while rest:
        name, equals, value = rest.partition("=")
        if equals and secrets.names.match(unquote_plus(name)):
            secrets.add(value)
            return "".join([*shown, name, "=", MASK])
        first, semicolon, rest = rest.partition(";")
        shown.append(_nested(first, secrets, depth) + semicolon)
    return "".join(shown)


def _nested(pair: str, secrets: _Secrets, depth: int) -> str:
    """Redact what stands in a query as a value."""
    name, equals, value = pair.partition("=")
    return name + equals + _value(value, secrets, depth + 1)


def _param(name: str, value: str, secrets: _Secrets) -> str:
    if name == "custom_headers":
        return _custom_headers(value, secrets)
    if secrets.names.match(name):
        secrets.add(value)
        return MASK
    return _text(value, secrets, 0)


def _custom_headers(text: str, secrets: _Secrets) -> str:
    try:
        given = msgspec.json.decode(text, type=dict[str, str | int | float | bool])
    except (msgspec.DecodeError, UnicodeError):
        secrets.add(text)
        return MASK
    for name, value in given.items():
        shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        secrets.add_header(name, shown)
    return json.dumps({name.lower(): MASK for name in sorted(given, key=str.lower)})


_HEAD = re.compile(r"(?:\A|\n)--([^\r\n]*)\r?\n((?:[^\r\n]+\r?\n)+)\r?\n")
_BOUNDARY = re.compile(r"(?i:boundary)\s*=\s*(?:\"([^\"]+)\"|([^\s;\"]+))")
_NAME = re.compile(r"(?<![\w*-])(?i:name)(\*?)\s*=\s*(?:\"((?:[^\"\\\r\n]|\\.)*)\"|([^\";\r\n]+))")
_TYPE = re.compile(r"(?im:^content-type)\s*:\s*([^\r\n]*)")
_ELEMENT = re.compile(r"<([\w:.-]+)(?:\s[^<>]*)?>(?:<!\[CDATA\[)?([^<\]]+)")
_ATTRIBUTE = re.compile(r"(?<![\w:.-])([\w:.-]+)\s*=\s*(?:\"([^\"<]*)\"|'([^'<]*)')")
_MEMBER = re.compile(r"\"([^\"\\]{1,256})\"\s*:\s*(?:\"((?:[^\"\\]|\\.)*)\"?|([^\s\",{}\[\]]+))")


def _posted(text: str, content_type: str, secrets: _Secrets, depth: int = 0) -> str:
    """Redact what is posted, by its look: people send documents under any type."""
    if depth > _NESTED:
        return text
    kind, begin = content_type.lower(), text.lstrip()[:1]
    if is_form_in_parts(text, content_type):

        def part(name: str, value: str, kind: str) -> str:
            if not secrets.names.match(name):
                return _posted(value, kind or "text/plain", secrets, depth + 1)
            secrets.add(value)
            return MASK

        return replaced_in_form(text, content_type, part)
    if begin == "<":
        return _markup(text, secrets, depth)
    if begin in ("{", "[") or "json" in kind:
        try:
            return _json(text, secrets, depth)
        except (ValueError, RecursionError):
            if begin in ("{", "["):
                return "\n".join(_json_line(line, secrets, depth) for line in text.split("\n"))
    is_form = "x-www-form-urlencoded" in kind or not _SPACE.search(text.strip())
    return _query(text if is_form else _text(text, secrets, depth), secrets, depth)


def is_form_in_parts(text: str, content_type: str) -> bool:
    """Tell whether a text is a form in parts, by its type or its look."""
    if "multipart/" in content_type.lower():
        return True
    return text.lstrip()[:2] == "--" and "content-disposition" in text[:_LOOKED_AT].lower()


_LOOKED_AT = 4_096
"""Characters of a text in which a form in parts shows itself."""


def replaced_in_form(text: str, content_type: str, replaced: Callable[[str, str, str], str]) -> str:
    """Replace the values of a form in parts by what a function of name, value and type returns."""
    given = _BOUNDARY.search(content_type)
    shown: list[str] = []
    at = 0
    while (head := _HEAD.search(text, at)) is not None:
        boundary = (given[1] or given[2]) if given is not None else head[1].rstrip()
        # A line that begins like one is part of a value, but for the boundary itself.
        found = re.compile(rf"\r?\n--{re.escape(boundary)}").search(text, head.end() - 2)
        start = head.end()
        end = len(text) if found is None else max(found.start(), start)
        kind = _TYPE.search(head[2])
        value = replaced(_part_name(head[2]), text[start:end], "" if kind is None else kind[1])
        shown += [text[at:start], value]
        at = end
    return "".join([*shown, text[at:]])


def _part_name(head: str) -> str:
    found = _NAME.search(head)
    if found is None:
        return ""
    name: str = found[3] if found[2] is None else re.sub(r"\\(.)", r"\1", found[2])
    # That with a star has a character set and a language before it.
    return unquote(name.rpartition("'")[2] if found[1] else name.strip("'"))


def _json_line(line: str, secrets: _Secrets, depth: int) -> str:
    try:
        return _json(line, secrets, depth)
    except (ValueError, RecursionError):
        return _marked(_MEMBER, line, secrets, depth)


def _markup(text: str, secrets: _Secrets, depth: int) -> str:
    text = _marked(_ELEMENT, text, secrets, depth)
    return _marked(_ATTRIBUTE, text, secrets, depth)


def _marked(pattern: re.Pattern[str], text: str, secrets: _Secrets, depth: int) -> str:
    """Redact values that a pattern finds behind their names, and what stands within others."""

    def value(found: re.Match[str]) -> str:
        name, *values = (part for part in found.groups() if part is not None)
        if not values:
            return found[0]
        start = found.start(found.lastindex or 0) - found.start()
        end = found.end(found.lastindex or 0) - found.start()
        if secrets.names.match(name):
            secrets.add(values[0])
            secrets.add(html.unescape(values[0]))
            return found[0][:start] + MASK + found[0][end:]
        plain = html.unescape(values[0])
        shown = _text(plain, secrets, depth + 1)
        return found[0] if shown == plain else found[0][:start] + shown + found[0][end:]

    return pattern.sub(value, text)


class _Members(list[tuple[str, Any]]):
    """The members of an object, of which several may have one name."""


def _json(text: str, secrets: _Secrets, depth: int) -> str:
    document = json.loads(text, object_pairs_hook=_Members)
    return json.dumps(_document(document, secrets, depth), sort_keys=True)


def _document(value: Any, secrets: _Secrets, depth: int) -> Any:
    if isinstance(value, str):
        # Shorter than the document that it is in, however many documents lie within one another.
        return _text(value, secrets, depth)
    if not isinstance(value, _Members):
        is_list = isinstance(value, list)
        return [_document(item, secrets, depth) for item in value] if is_list else value
    shown: dict[str, Any] = {}
    for name, item in value:
        if name == "fill" and isinstance(item, list) and len(item) == 2:
            # An instruction for a page: what is typed into which field.
            if secrets.names.match(str(item[0])):
                _add_all(item[1], secrets)
            shown[name] = [item[0], MASK]
        elif item is not None and secrets.names.match(name):
            _add_all(item, secrets)
            shown[name] = MASK
        else:
            shown[name] = _document(item, secrets, depth)
    return shown


def _add_all(value: Any, secrets: _Secrets) -> None:
    """Remember all texts and numbers of a document."""
    if isinstance(value, _Members):
        value = [item for _, item in value]
    if not isinstance(value, list):
        secrets.add(str(value))
        return
    for item in value:
        _add_all(item, secrets)
