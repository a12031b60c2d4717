"""The forward pass of a decoder on a CPU in float32, compiled to machine code by numba.

One call runs every layer for a batch of rows. A row is one token of one slot, of a prompt or of a decode.
For small models, launching operators takes longer than the arithmetic, so everything is one call.

Invariant: a row's result depends on its own slot only, never on the other rows of the call, because each
output element is accumulated over k in one fixed order. Sampling with a seed is therefore reproducible
whatever else the engine is doing, and a chunked or cached prefill equals a whole one bit for bit.

Layouts: matrices are [in, out]. Keys are [slot, kv head, tile, head_dim, TILE] and values [slot, kv head,
tile, TILE, head_dim]; a tile has TILE positions, and scores and weighted sums are products with a tile. Rows
are processed in blocks, and a tile is read once for all rows of a block that share it: the rows of a prompt,
or those of many slots that share a system prompt.
"""

from __future__ import annotations

import numba
import numpy as np

from areal_agents.inference.embedded.model.products import product

TILE = 64
BLOCK = 16  # rows whose attention is computed together
_FLOAT = 4  # bytes
_SUM_BLOCK = 256
_ROUND = np.float32(12582912.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _MAGNITUDE, _INFINITE = np.int32(-(2**31)), np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_EXP_MIN = np.float32(-87.0)
_EXP_MAX = np.float32(88.0)

# `contract` allows fused multiply-add; `reassoc` lets a reduction use vector lanes. The exponential must not
# be reassociated: its range reduction subtracts ln 2 in two parts on purpose.
_exact = numba.njit(fastmath={"contract", "nsz"}, nogil=True, cache=True, error_model="numpy", inline="never")
_reduce = numba.njit(
    fastmath={"contract", "nsz", "reassoc"}, nogil=True, cache=True, error_model="numpy", inline="never"
)


@numba.njit(fastmath={"contract", "nnan"}, nogil=True, cache=True, error_model="numpy", inline="always")
def _exp(x):
    """exp(x) with a relative error of 1e-7 for x in [-87, 88]; other x are clamped. Loops over it vectorise.

    With x = n ln 2 + r, exp(r) is the polynomial of Cephes' expf, and n is added to the exponent bits. Adding
    1.5 · 2^23 rounds to an integer whose low bits are n.
    """
    x = x if x > _EXP_MIN else _EXP_MIN
    x = x if x < _EXP_MAX else _EXP_MAX
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    exponent = np.int32(np.float32(shifted).view(np.int32) << np.int32(23))
    return np.int32(np.float32(p).view(np.int32) + exponent).view(np.float32)


# Loops, not slice assignments, which would add seconds to the compilation for their error messages.
@_exact
def _copy(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i]


@_exact
def _multiply(a, w, c, fresh):
    """c += a @ w, or c = a @ w if `fresh`, for a [M, K], w [K, N], c [M, N]."""
    product(
        a.ctypes.data, a.shape[1], w.ctypes.data, w.shape[1], c.ctypes.data, c.shape[1],
        a.shape[0], a.shape[1], w.shape[1], fresh,
    )  # fmt: skip


@_reduce
def _sum_squares(x):
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@_exact
def _rms_norm(x, weight, eps, out):
    """RMS norm of one row; float32 throughout, as transformers computes it."""
    scale = np.float32(1.0) / np.sqrt(_sum_squares(x) / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = weight[i] * (x[i] * scale)


@_exact
def _rotate(head, cos, sin):
    """Rotary embedding of one head in place, in the half-split form of the three architectures."""
    half = head.shape[0] // 2
    for i in range(half):
        low, high = head[i], head[i + half]
        head[i] = low * cos[i] - high * sin[i]
        head[i + half] = high * cos[i] + low * sin[i]


@_exact
def _maximum(x, length):
    """Return the largest of the first `length` elements, NaN if one of them is NaN.

    They are compared as integers with the same order, because only a maximum of integers is vectorised.
    """
    best, farthest = _LOWEST, np.int32(0)
    for t in range(length):
        bits = np.float32(x[t]).view(np.int32)
        best = max(best, _in_order(bits))
        farthest = max(farthest, np.int32(bits & _MAGNITUDE))
    if farthest > _INFINITE:
        return np.float32(np.nan)
    return np.int32(_in_order(best)).view(np.float32)


@numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _in_order(bits):
    """Map the bits of a float32 to an integer with the same order, and such an integer back to the bits."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _MAGNITUDE))


@_exact
def _exponentials(x, length, shift):
    for t in range(length):
        x[t] = _exp(x[t] - shift)


@_reduce
def _sum(x, length):
    total = np.float32(0.0)
    for t in range(length):
        total += x[t]
    return total


@_exact
def _softmax(x, length):
    _exponentials(x, length, _maximum(x, length))
    scale = np.float32(1.0) / _sum(x, length)
    for t in range(length):
        x[t] *= scale


@_exact
def _silu_gate(gate_up, out):
    """out = silu(gate) · up for one row of [gate | up]."""
    width = out.shape[0]
    for i in range(width):
        gate = gate_up[i]
        out[i] = gate / (np.float32(1.0) + _exp(-gate)) * gate_up[i + width]


@_exact
def _shared_tiles(slots, positions, prefix_slots, prefix_lengths):
    """Return a slot, and the number of leading tiles that all rows read from it completely."""
    root = prefix_slots[0] if prefix_lengths[0] >= TILE else slots[0]
    shared = (positions[0] + 1) // TILE
    for r in range(slots.shape[0]):
        own = positions[r] + 1
        if slots[r] != root:
            own = min(own, prefix_lengths[r]) if prefix_slots[r] == root else 0
        shared = min(shared, own // TILE)
    return root, shared


@_exact
def _end_of_run(slots, begin):
    """Return the end of the run of rows that begins at `begin` and belongs to one slot."""
    end = begin + 1
    while end < slots.shape[0] and slots[end] == slots[begin]:
        end += 1
    return end


@_exact
def _attend(
    qkv, slots, positions, prefix_slots, prefix_lengths, keys, values, queries, scores, sums, out,
    heads, kv_heads, head_dim,
):  # fmt: skip
    """Attention of at most BLOCK rows, each over its slot's positions up to its own.

    queries, sums: [BLOCK · group · head_dim] work space; scores: [BLOCK · group, T]. A tile that all rows
    read from one slot is processed once for all of them, and any other tile once for the rows of its slot.
    Values after the first of these rows are added row by row, so that no row adds a later value, not even
    multiplied by zero.
    """
    group = heads // kv_heads
    width, stride, size = group * head_dim, scores.shape[1], head_dim * TILE
    slot_size = keys.shape[1] * keys.shape[2] * size
    query, score, total = queries.ctypes.data, scores.ctypes.data, sums.ctypes.data
    rows = slots.shape[0] * group
    root, shared = _shared_tiles(slots, positions, prefix_slots, prefix_lengths)
    for kv_head in range(kv_heads):
        key, value = keys[0, kv_head].ctypes.data, values[0, kv_head].ctypes.data
        for r in range(slots.shape[0]):
            for i in range(width):
                queries[r * width + i] = qkv[r, kv_head * width + i]
        for i in range(shared):
            product(
                query, head_dim, key + _FLOAT * (root * slot_size + i * size), TILE,
                score + _FLOAT * i * TILE, stride, rows, head_dim, TILE, True,
            )  # fmt: skip
        begin = 0
        while begin < slots.shape[0]:
            end = _end_of_run(slots, begin)
            first, many, length = begin * group, (end - begin) * group, positions[end - 1] + 1
            for i in range(shared, (length + TILE - 1) // TILE):
                source = prefix_slots[begin] if i < prefix_lengths[begin] // TILE else slots[begin]
                product(
                    query + _FLOAT * first * head_dim, head_dim,
                    key + _FLOAT * (source * slot_size + i * size), TILE,
                    score + _FLOAT * (first * stride + i * TILE), stride, many, head_dim, TILE, True,
                )  # fmt: skip
            for r in range(begin, end):
                for q in range(r * group, (r + 1) * group):
                    _softmax(scores[q], positions[r] + 1)
            begin = end
        for i in range(shared):
            product(
                score + _FLOAT * i * TILE, stride, value + _FLOAT * (root * slot_size + i * size), head_dim,
                total, head_dim, rows, TILE, head_dim, i == 0,
            )  # fmt: skip
        begin = 0
        while begin < slots.shape[0]:
            end = _end_of_run(slots, begin)
            first, many, common = begin * group, (end - begin) * group, positions[begin] + 1
            for i in range(shared, (common + TILE - 1) // TILE):
                source = prefix_slots[begin] if i < prefix_lengths[begin] // TILE else slots[begin]
                product(
                    score + _FLOAT * (first * stride + i * TILE), stride,
                    value + _FLOAT * (source * slot_size + i * size), head_dim,
                    total + _FLOAT * first * head_dim, head_dim,
                    many, min(TILE, common - i * TILE), head_dim, i == 0,
                )  # fmt: skip
            for r in range(begin + 1, end):
                at = common
                while at <= positions[r]:
                    i = at // TILE
                    until = min((i + 1) * TILE, positions[r] + 1)
                    place = slots[r] * slot_size + i * size + (at - i * TILE) * head_dim
                    product(
                        score + _FLOAT * (r * group * stride + at), stride, value + _FLOAT * place, head_dim,
                        total + _FLOAT * r * group * head_dim, head_dim,
                        group, until - at, head_dim, False,
                    )  # fmt: skip
                    at = until
            begin = end
        for r in range(slots.shape[0]):
            for i in range(width):
                out[r, kv_head * width + i] = sums[r * width + i]


@_exact
def _project_heads(qkv, slots, positions, keys, values, q_norm, k_norm, cos, sin, shape, eps, scale):
    """Norm and rotate the rows' queries and keys in place; store keys and values in the cache."""
    heads, kv_heads, head_dim, normed = shape
    for r in range(qkv.shape[0]):
        slot, position = slots[r], positions[r]
        for head in range(heads + kv_heads):
            vector = qkv[r, head * head_dim : (head + 1) * head_dim]
            if normed:
                _rms_norm(vector, q_norm if head < heads else k_norm, eps, vector)
            _rotate(vector, cos[position], sin[position])
            if head < heads:
                for d in range(head_dim):
                    vector[d] *= scale
        first_value = (heads + kv_heads) * head_dim
        tile, offset = position // TILE, position % TILE
        for head in range(kv_heads):
            for d in range(head_dim):
                keys[slot, head, tile, d, offset] = qkv[r, (heads + head) * head_dim + d]
                values[slot, head, tile, offset, d] = qkv[r, first_value + head * head_dim + d]


@_exact
def forward(
    tokens, slots, positions, prefix_slots, prefix_lengths, output_rows,
    embedding, lm_head, final_norm,
    attention_norm, qkv_weight, qkv_bias, q_norm, k_norm, o_weight,
    mlp_norm, gate_up_weight, down_weight,
    cos, sin, keys, values,
    x, normed, qkv, attended, gate_up, activated, queries, scores, sums, logits,
    shape, eps, scale,
):  # fmt: skip
    """Run all layers for the rows and write the logits of `output_rows`.

    tokens, slots, positions: [N] int32, the rows of one slot in ascending positions.
    prefix_slots, prefix_lengths: [N] int32, a slot that holds equal keys and values for the first positions.
    output_rows: [M] rows whose logits [M, V] are computed.
    keys, values: caches with the layers in front, updated at the rows' positions.
    x .. activated: work space with N rows; queries, scores, sums: see _attend.
    shape: (heads, kv heads, head_dim, head norm?).
    """
    heads, kv_heads, head_dim, _ = shape
    rows = tokens.shape[0]
    for r in range(rows):
        _copy(embedding[tokens[r]], x[r])
    for layer in range(qkv_weight.shape[0]):
        for r in range(rows):
            _rms_norm(x[r], attention_norm[layer], eps, normed[r])
            _copy(qkv_bias[layer], qkv[r])
        _multiply(normed, qkv_weight[layer], qkv, False)
        _project_heads(
            qkv,
            slots,
            positions,
            keys[layer],
            values[layer],
            q_norm[layer],
            k_norm[layer],
            cos,
            sin,
            shape,
            eps,
            scale,
        )
        for first in range(0, rows, BLOCK):
            last = min(first + BLOCK, rows)
            _attend(
                qkv[first:last], slots[first:last], positions[first:last],
                prefix_slots[first:last], prefix_lengths[first:last],
                keys[layer], values[layer], queries, scores, sums, attended[first:last],
                heads, kv_heads, head_dim,
            )  # fmt: skip
        _multiply(attended, o_weight[layer], x, False)
        for r in range(rows):
            _rms_norm(x[r], mlp_norm[layer], eps, normed[r])
        _multiply(normed, gate_up_weight[layer], gate_up, True)
        for r in range(rows):
            _silu_gate(gate_up[r], activated[r])
        _multiply(activated, down_weight[layer], x, False)
    for m in range(output_rows.shape[0]):
        _rms_norm(x[output_rows[m]], final_norm, eps, normed[m])
    _multiply(normed[: output_rows.shape[0]], lm_head, logits, True)


@_exact
def copy_prefix(cache, source, target, tiles):
    """Copy the first `tiles` tiles of one slot to another in a cache with the layers in front."""
    for layer in range(cache.shape[0]):
        for head in range(cache.shape[2]):
            for tile in range(tiles):
                for d in range(cache.shape[4]):
                    _copy(cache[layer, source, head, tile, d], cache[layer, target, head, tile, d])


@_exact
def sample(logits, temperature, uniform, tokens, logprobs, scratch):
    """Sample a token from the whole distribution of each row of logits [M, V], with its logprob.

    temperature: [M]; 0 is greedy, with logprobs at temperature 1. uniform: [M] float64 in [0, 1).
    tokens, logprobs: [M] out. scratch: [V] work space.
    """
    for m in range(logits.shape[0]):
        row = logits[m]
        width = row.shape[0]
        greedy = temperature[m] == 0.0
        inverse = np.float32(1.0) if greedy else np.float32(1.0) / temperature[m]
        shift = _maximum(row, width)
        _scaled_exponentials(row, shift, inverse, scratch)
        total = np.float64(0.0)
        for first in range(0, width, _SUM_BLOCK):
            total += _sum(scratch[first:], min(_SUM_BLOCK, width - first))
        token = _first_at_least(row, shift) if greedy else _invert(scratch, uniform[m] * total)
        tokens[m] = token
        logprobs[m] = (row[token] - shift) * inverse - np.float32(np.log(total))


@_exact
def _scaled_exponentials(x, shift, factor, out):
    for i in range(x.shape[0]):
        out[i] = _exp((x[i] - shift) * factor)


@_exact
def _first_at_least(x, bound):
    for i in range(x.shape[0]):
        if x[i] >= bound:
            return i
    return 0  # the maximum is NaN, and so is the logprob


@_exact
def _invert(mass, goal):
    """Return the first index at which the running sum of `mass` exceeds `goal`, else the last with mass."""
    width = mass.shape[0]
    below = np.float64(0.0)
    last = 0
    for first in range(0, width, _SUM_BLOCK):
        count = min(_SUM_BLOCK, width - first)
        block = np.float64(_sum(mass[first:], count))
        if below + block > goal:
            for i in range(first, first + count):
                below += np.float64(mass[i])
                if mass[i] > 0.0:
                    last = i
                if below > goal:
                    return i
            return last
        below += block
        if block > 0.0:
            last = first + count - 1
    return last
