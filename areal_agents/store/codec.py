"""Encodes a turn as a row and decodes it: JSON for messages and settings, little-endian blobs for arrays.

Routed experts, which are by far the largest array, are packed and compressed (codec 2); turns without them
are rows of codec 1. An imported turn (codec 3) has neither logprobs nor versions, and these blobs are empty.
Every row has the number of its codec; decoding an unknown codec raises StoreError.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from sqlalchemy import RowMapping

from areal_agents.core.completion import Completion, Grammar, Routing, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Fork, Turn
from areal_agents.errors import StoreError

PLAIN, COMPRESSED = 1, 2  # codecs: routed experts as int16 values, and packed and compressed
IMPORTED = 3  # codec of a turn that no policy sampled
EMPTIED = 0  # the codec of a turn whose texts and tokens were deleted

_INT32, _FLOAT32, _INT16 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i2")
_UNKNOWN = 255  # -1 among experts that are stored as bytes
_SAMPLING_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(SamplingParams)
    if field.name != "max_new_tokens"
}


def encode_turn(episode_id: str, turn: Turn, created_at: float) -> dict[str, Any]:
    """Return the row of `turn` for the table `turns`, without its sequence number."""
    completion = turn.completion
    versions, routing = completion.versions, completion.routed_experts
    logprobs, is_sampled = completion.logprobs, len(completion) and not completion.is_imported
    return {
        "id": turn.id,
        "episode_id": episode_id,
        "parent": turn.parent,
        "codec": _codec(completion),
        "created_at": created_at,
        "sampled_tokens": len(completion),
        "version_min": int(versions.min()) if is_sampled else None,
        "version_max": int(versions.max()) if is_sampled else None,
        "finish_reason": completion.finish_reason,
        "discarded": turn.discarded or None,
        "constrained": 1 if turn.constrained else None,
        "record": orjson.dumps(_record(turn)),
        "prompt_ids": turn.new_prompt_ids.astype(_INT32).tobytes(),
        "token_ids": completion.token_ids.astype(_INT32).tobytes(),
        "logprobs": b"" if logprobs is None else logprobs.astype(_FLOAT32).tobytes(),
        "versions": b"" if logprobs is None else versions.astype(_INT32).tobytes(),
        "routed_experts": None if routing is None else _compressed(routing),
    }


def decode_turn(row: Mapping[str, Any] | RowMapping) -> Turn:
    """Return the turn that `encode_turn` wrote; without routed experts if the row has no such column.

    Raises StoreError for an unknown codec, a damaged row, or a deleted turn.
    """
    if row["codec"] == EMPTIED:
        raise StoreError(f"the texts and tokens of turn {row['id']} were deleted (store.retain)")
    if row["codec"] not in (PLAIN, COMPRESSED, IMPORTED):
        raise StoreError(
            f"turn {row['id']} was written with codec {row['codec']}, expected {PLAIN} to {IMPORTED}"
        )
    record = orjson.loads(row["record"])
    fork = record.get("fork")
    return Turn(
        id=row["id"],
        parent=row["parent"],
        new_messages=tuple(Message.from_dict(message) for message in record["messages"]),
        new_prompt_ids=np.frombuffer(row["prompt_ids"], _INT32),
        completion=_completion(row, record),
        reply=Message.from_dict(record["reply"]),
        sampling=_sampling(record["sampling"]),
        tools_id=record.get("tools_id", ""),
        label=record.get("label", ""),
        session=record.get("session", ""),
        forked_from=Fork(fork["turn"], fork["reason"], fork["diverged_at"]) if fork else None,
        constrained=record.get("constrained", False),
        overrides=tuple(record.get("overrides", ())),
        has_instructions=record.get("has_instructions", False),
        discarded=row["discarded"] or "",
        recorded_before=record.get("recorded_before"),
        special_tokens_as_text=record.get("special_tokens_as_text", 0),
        volatile_as_first_seen=record.get("volatile_as_first_seen", 0),
    )


def _codec(completion: Completion) -> int:
    if completion.is_imported:
        return IMPORTED
    return PLAIN if completion.routed_experts is None else COMPRESSED


def _completion(row: Mapping[str, Any] | RowMapping, record: Mapping[str, Any]) -> Completion:
    token_ids = np.frombuffer(row["token_ids"], _INT32)
    if row["codec"] == IMPORTED:
        return Completion.imported(token_ids)
    return Completion(
        token_ids,
        np.frombuffer(row["logprobs"], _FLOAT32),
        np.frombuffer(row["versions"], _INT32),
        row["finish_reason"],
        routed_experts=_routing(row, record),
    )


def _record(turn: Turn) -> dict[str, Any]:
    record: dict[str, Any] = {
        "messages": [message.to_dict() for message in turn.new_messages],
        "reply": turn.reply.to_dict(),
        "sampling": _changed_sampling(turn.sampling),
    }
    if turn.tools_id:
        record["tools_id"] = turn.tools_id
    if turn.label:
        record["label"] = turn.label
    if turn.session:
        record["session"] = turn.session
    if turn.forked_from is not None:
        fork = turn.forked_from
        record["fork"] = {"turn": fork.turn, "reason": fork.reason, "diverged_at": fork.diverged_at}
    if turn.constrained:
        record["constrained"] = True
    if turn.overrides:
        record["overrides"] = turn.overrides
    if turn.has_instructions:
        record["has_instructions"] = True
    if turn.recorded_before is not None:
        record["recorded_before"] = turn.recorded_before
    if turn.special_tokens_as_text:
        record["special_tokens_as_text"] = turn.special_tokens_as_text
    if turn.volatile_as_first_seen:
        record["volatile_as_first_seen"] = turn.volatile_as_first_seen
    if turn.completion.routed_experts is not None:
        record["routing"] = turn.completion.routed_experts.shape[1:]
    return record


def _compressed(routing: Routing) -> bytes:
    """Pack [R, layers, k] experts into bytes, or int16 if there are too many experts, and compress them.

    The values are reordered to [layers, R, k], since each layer has an expert distribution of its own. There
    are hardly any repeated sequences, so Huffman coding alone gives the same size as a search for them, in
    less than half the time.
    """
    by_layer = np.ascontiguousarray(routing.transpose(1, 0, 2))
    packed = by_layer.astype(_INT16)
    if not by_layer.size or by_layer.max() < _UNKNOWN:
        packed = np.where(by_layer < 0, _UNKNOWN, by_layer).astype(np.uint8)
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_HUFFMAN_ONLY)
    return bytes([packed.itemsize]) + coder.compress(packed.data) + coder.flush()


def _routing(row: Mapping[str, Any] | RowMapping, record: Mapping[str, Any]) -> Routing | None:
    """Return the routed experts of a row; None if it has none."""
    stored: bytes | None = row.get("routed_experts")
    if stored is None:
        return None
    layers, per_token = record["routing"]
    if row["codec"] == PLAIN:
        return np.frombuffer(stored, _INT16).reshape(-1, layers, per_token)
    try:
        values = np.frombuffer(
            zlib.decompress(stored[1:], -zlib.MAX_WBITS), np.uint8 if stored[0] == 1 else _INT16
        )
        by_layer = values.reshape(layers, -1, per_token)
    except (zlib.error, ValueError, IndexError) as error:
        raise StoreError(f"the routed experts of turn {row['id']} are damaged: {error}") from error
    routing = by_layer.transpose(1, 0, 2).astype(np.int16)
    if values.dtype == np.uint8:
        routing[routing == _UNKNOWN] = -1
    return np.ascontiguousarray(routing)


def _changed_sampling(sampling: SamplingParams) -> dict[str, Any]:
    changed: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens}
    for name, default in _SAMPLING_DEFAULTS.items():
        value = getattr(sampling, name)
        if value != default:
            changed[name] = value
    return changed


def _sampling(record: dict[str, Any]) -> SamplingParams:
    for name in ("stop", "stop_token_ids"):
        if name in record:
            record[name] = tuple(record[name])
    if "grammar" in record:
        record["grammar"] = Grammar(**record["grammar"])
    return SamplingParams(**record)
