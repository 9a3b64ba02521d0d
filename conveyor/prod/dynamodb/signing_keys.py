"""The signing keys port: one item a caller, with the attributes of both slots."""

from __future__ import annotations

from conveyor.domain.errors import candidate_pending, no_candidate
from conveyor.ports.signing_keys import SigningKey, SigningKeys, SigningSlots
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Table, decodes_row
from conveyor.prod.dynamodb.schema import ROW_SHAPE, signing_key

_ACTIVE, _CANDIDATE = "active", "candidate"
_FIELDS = ("kid", "created_at", "sealed")


class DynamoSigningKeys(SigningKeys):
    """The signing keys port."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def get_signing_keys(self, caller: str) -> SigningSlots:
        item = await self._table.get(signing_key(caller))
        return SigningSlots() if item is None else _read(item)

    async def add_signing_key(self, caller: str, key: SigningKey) -> None:
        if await self._set(caller, _ACTIVE, key, condition="attribute_not_exists(active_kid)"):
            return
        # No step empties the active slot, so the candidate's is the only one left.
        beside = "attribute_not_exists(candidate_kid) AND active_kid <> :kid"
        if await self._set(caller, _CANDIDATE, key, condition=beside):
            return
        slots = await self.get_signing_keys(caller)
        # An earlier try of this call may have written the key.
        if key.kid not in [one.kid for one in (slots.active, slots.candidate) if one is not None]:
            raise candidate_pending()

    async def promote_signing_key(self, caller: str, kid: str) -> SigningKey:
        promoted = await self._change(
            caller,
            "SET "
            + ", ".join(f"{_ACTIVE}_{field} = {_CANDIDATE}_{field}" for field in _FIELDS)
            + " REMOVE "
            + ", ".join(f"{_CANDIDATE}_{field}" for field in _FIELDS),
            kid,
        )
        slots = await self.get_signing_keys(caller) if promoted is None else _read(promoted)
        # An earlier try of this call may have promoted it.
        if slots.active is None or slots.active.kid != kid:
            raise no_candidate()
        return slots.active

    async def drop_signing_key(self, caller: str, kid: str) -> None:
        removed = ", ".join(f"{_CANDIDATE}_{field}" for field in _FIELDS)
        await self._change(caller, f"REMOVE {removed}", kid)

    async def _set(self, caller: str, slot: str, key: SigningKey, *, condition: str) -> bool:
        try:
            await self._table.update(
                signing_key(caller),
                f"SET #shape = :shape, {slot}_kid = :kid, {slot}_created_at = :created_at, "
                f"{slot}_sealed = :sealed",
                condition=condition,
                shape=ROW_SHAPE,
                kid=key.kid,
                created_at=key.created_at,
                sealed=key.sealed,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return False
        return True

    async def _change(self, caller: str, expression: str, kid: str) -> Item | None:
        """Change the item if its candidate is this key, and return it; else return None."""
        try:
            return await self._table.update(
                signing_key(caller), expression, condition="candidate_kid = :kid", kid=kid
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return None


@decodes_row
def _read(item: Item) -> SigningSlots:
    return SigningSlots(_slot(item, _ACTIVE), _slot(item, _CANDIDATE))


def _slot(item: Item, slot: str) -> SigningKey | None:
    if f"{slot}_kid" not in item:
        return None
    return SigningKey(*(item[f"{slot}_{field}"] for field in _FIELDS))
