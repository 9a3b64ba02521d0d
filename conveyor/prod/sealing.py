"""Envelope encryption of callers' keys with KMS, with one data key a fleet.

KMS makes the data key and does not keep it. The table holds it, encrypted with the KMS key. Each
process has KMS decrypt it once, when it starts, and then seals and opens callers' keys by itself:
no task waits for KMS, and the table or CONVEYOR_SECRET alone opens no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.refusals import describe
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import DATA_KEY, ROW_SHAPE


async def open_data_key(aws: Aws, table: Table, *, kms_key: str, environment: str) -> bytes:
    """Return the fleet's data key; the first process that asks makes it.

    If it is encrypted with another KMS key, decrypt it with that one, which must still be usable,
    and encrypt it with this one. Raises ConveyorError(unavailable) if KMS refuses.
    """
    context = {"conveyor:environment": environment}
    try:
        item = await table.get(DATA_KEY)
        if item is None:
            item = await _make(aws, table, kms_key, context)
        key = await _decrypt(aws, item, context)
        if item["kms_key"] != kms_key:
            await _reencrypt(aws, table, item, key, kms_key=kms_key, context=context)
    except AwsRefused as refused:
        raise ConveyorError(
            ErrorCode.UNAVAILABLE, f"the fleet's data key cannot be opened: {describe(refused)}"
        ) from None
    return key


async def _make(aws: Aws, table: Table, kms_key: str, context: Mapping[str, str]) -> dict[str, Any]:
    made = await aws.call(
        "kms",
        "generate_data_key_without_plaintext",
        {"KeyId": kms_key, "KeySpec": "AES_256", "EncryptionContext": context},
    )
    item = {"shape": ROW_SHAPE, "kms_key": kms_key, "sealed": made["CiphertextBlob"]}
    try:
        await table.put(DATA_KEY, item, condition="attribute_not_exists(pk)")
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
    # Another process may have been first, or an earlier try of this one: the table decides.
    return await table.get(DATA_KEY) or item


async def _decrypt(aws: Aws, item: Mapping[str, Any], context: Mapping[str, str]) -> bytes:
    answer = await aws.call(
        "kms",
        "decrypt",
        {
            "KeyId": item["kms_key"],
            "CiphertextBlob": item["sealed"],
            "EncryptionContext": context,
        },
    )
    key: bytes = answer["Plaintext"]
    return key


async def _reencrypt(
    aws: Aws,
    table: Table,
    item: Mapping[str, Any],
    key: bytes,
    *,
    kms_key: str,
    context: Mapping[str, str],
) -> None:
    """Encrypt the same data key with another KMS key: sealed keys stay readable."""
    answer = await aws.call(
        "kms", "encrypt", {"KeyId": kms_key, "Plaintext": key, "EncryptionContext": context}
    )
    try:
        await table.update(
            DATA_KEY,
            "SET kms_key = :kms_key, sealed = :sealed",
            condition="sealed = :before",
            kms_key=kms_key,
            sealed=answer["CiphertextBlob"],
            before=item["sealed"],
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
