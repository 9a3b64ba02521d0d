"""Routes that the contract reserves and this version does not serve yet.

They look like the rest from outside: no answer without a key, none about somebody else's job.
"""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.call import Call, Handler
from conveyor.service.unbuilt import not_implemented


def _reserved(what: str) -> Handler:
    async def refuse(call: Call) -> Response:
        if "job_id" in call.request.path_params:
            await call.service.listing.require_job(call.caller_id, call.job_id)
        raise not_implemented(what)

    return refuse


_keys = _reserved("signing keys")
_schedules = _reserved("schedules")
_webhooks = _reserved("webhooks")

ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/schedule": {"PUT": _schedules},
    "/v1/jobs/{job_id}/schedule/state": {"POST": _schedules},
    "/v1/jobs/{job_id}/webhook": {"GET": _webhooks, "PUT": _webhooks, "DELETE": _webhooks},
    "/v1/hmac/keys": {"GET": _keys},
    "/v1/hmac/keys/rotate": {"POST": _keys, "DELETE": _keys},
    "/v1/hmac/keys/rotate/finalize": {"POST": _keys},
    "/v1/webhook/test": {"POST": _webhooks},
}
