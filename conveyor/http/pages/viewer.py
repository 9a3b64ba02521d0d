"""The viewer of a page: whose jobs a request sees, and whether it may change anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person before a page.

    `caller_id` names the one caller whose jobs the person sees; None means those of all callers,
    as on the developer's own machine and for operators. `acts` says whether the person may change
    anything. `operator` is the hash of an operator's key, which lines in the log name. `signed_in`
    says whether there is a session to sign out of.
    """

    caller_id: str | None
    acts: bool = True
    operator: str | None = None
    signed_in: bool = False


class Viewers(Protocol):
    """Tells who looks at a page."""

    async def identify(self, request: Request) -> Viewer | None:
        """Return the viewer of a request; None if the person has to sign in first."""
        ...

    def still_sees(self, request: Request, viewer: Viewer) -> bool:
        """Tell whether the person of a request sees what `viewer` does, for what goes on after
        it."""
        ...

    def token(self, request: Request) -> str:
        """Return the token that forms on a page carry, by which they are known as the viewer's."""
        ...

    @property
    def accepts_any(self) -> bool:
        """Tell whether every key signs in."""
        ...

    def keeps_cookies(self, request: Request) -> bool:
        """Tell whether the browser will keep the cookie of a sign-in, which is for https alone."""
        ...
