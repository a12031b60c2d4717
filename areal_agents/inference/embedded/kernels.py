"""The forward pass of a decoder for a CPU in float32, as machine code compiled by numba.

One call runs every layer for a batch of rows; a row is one token of one slot, prompt or decode alike.
Small models are bound by the launch of operators, not by arithmetic, so everything is one call.

Invariant: a row's result depends on its own slot only, never on the other rows of the call, because each
output element is accumulated over k in one fixed order. Sampling with a seed is therefore reproducible
whatever else the engine is doing, and a chunked or cached prefill equals a whole one bit for bit.

Layouts: matrices are [in, out]; keys and values are [slot, kv head, tile, head_dim, TILE], TILE positions
together, so that attention streams through whole contiguous tiles. Tiles that a slot shares with another (a
common system prompt, copied) are read from that one, where they are in the cache of the CPU already: at 64
sequences the traffic of keys and values is what costs.
"""

from __future__ import annotations

import numba
import numpy as np

TILE = 64
_SUM_BLOCK = 256
_K_TILE = 512
_N_TILE = 512
_ROUND = np.float32(12582912.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_MIN = np.float32(-87.0)
_EXP_MAX = np.float32(88.0)

# `contract` allows fused multiply-add; `reassoc` lets a reduction use vector lanes. The exponential must not
# be reassociated: its range reduction subtracts ln 2 in two parts on purpose.
_exact = numba.njit(fastmath={"contract", "nsz"}, nogil=True, cache=True, error_model="numpy", inline="never")
_reduce = numba.njit(
    fastmath={"contract", "nsz", "reassoc"}, nogil=True, cache=True, error_model="numpy", inline="never"
)
_ordered = numba.njit(fastmath={"nnan", "nsz"}, nogil=True, cache=True, error_model="numpy")


@numba.njit(fastmath={"contract", "nnan"}, nogil=True, cache=True, error_model="numpy", inline="always")
def _exp(x):
    """exp(x) to 1e-7 relative for x in [-87, 88], clamped there, written so that a loop over it vectorises.

    x = n ln 2 + r; the polynomial of Cephes' expf for r, and n added to the exponent bits. Adding 1.5 · 2^23
    rounds to an integer whose low bits are n.
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


# Loops, not slice assignments: those compile the text of an error message too, for seconds.
@_exact
def _copy(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i]


@_exact
def _clear(out):
    for i in range(out.shape[0]):
        out[i] = np.float32(0.0)


@_exact
def _add_product(a, w, c):
    """c += a @ w for a [M, K], w [K, N], c [M, N]; K is a multiple of 8."""
    rows, depth = a.shape
    width = w.shape[1]
    for n0 in range(0, width, _N_TILE):
        n1 = min(n0 + _N_TILE, width)
        for k0 in range(0, depth, _K_TILE):
            k1 = min(k0 + _K_TILE, depth)
            for m in range(0, rows - rows % 4, 4):
                _four_rows(a, w, c, m, k0, k1, n0, n1)
            for m in range(rows - rows % 4, rows):
                _one_row(a, w, c, m, k0, k1, n0, n1)


@_exact
def _four_rows(a, w, c, m, k0, k1, n0, n1):
    """Four rows at a time, eight terms per pass over c: many products between a load and a store."""
    c0, c1, c2, c3 = c[m, n0:n1], c[m + 1, n0:n1], c[m + 2, n0:n1], c[m + 3, n0:n1]
    for k in range(k0, k1, 8):
        w0, w1, w2, w3 = w[k, n0:n1], w[k + 1, n0:n1], w[k + 2, n0:n1], w[k + 3, n0:n1]
        w4, w5, w6, w7 = w[k + 4, n0:n1], w[k + 5, n0:n1], w[k + 6, n0:n1], w[k + 7, n0:n1]
        a00, a01, a02, a03 = a[m, k], a[m, k + 1], a[m, k + 2], a[m, k + 3]
        a04, a05, a06, a07 = a[m, k + 4], a[m, k + 5], a[m, k + 6], a[m, k + 7]
        a10, a11, a12, a13 = a[m + 1, k], a[m + 1, k + 1], a[m + 1, k + 2], a[m + 1, k + 3]
        a14, a15, a16, a17 = a[m + 1, k + 4], a[m + 1, k + 5], a[m + 1, k + 6], a[m + 1, k + 7]
        a20, a21, a22, a23 = a[m + 2, k], a[m + 2, k + 1], a[m + 2, k + 2], a[m + 2, k + 3]
        a24, a25, a26, a27 = a[m + 2, k + 4], a[m + 2, k + 5], a[m + 2, k + 6], a[m + 2, k + 7]
        a30, a31, a32, a33 = a[m + 3, k], a[m + 3, k + 1], a[m + 3, k + 2], a[m + 3, k + 3]
        a34, a35, a36, a37 = a[m + 3, k + 4], a[m + 3, k + 5], a[m + 3, k + 6], a[m + 3, k + 7]
        for n in range(n1 - n0):
            b0, b1, b2, b3, b4, b5, b6, b7 = w0[n], w1[n], w2[n], w3[n], w4[n], w5[n], w6[n], w7[n]
            c0[n] += (
                a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                + a04 * b4 + a05 * b5 + a06 * b6 + a07 * b7
            )  # fmt: skip
            c1[n] += (
                a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
                + a14 * b4 + a15 * b5 + a16 * b6 + a17 * b7
            )  # fmt: skip
            c2[n] += (
                a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
                + a24 * b4 + a25 * b5 + a26 * b6 + a27 * b7
            )  # fmt: skip
            c3[n] += (
                a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3
                + a34 * b4 + a35 * b5 + a36 * b6 + a37 * b7
            )  # fmt: skip


@_exact
def _one_row(a, w, c, m, k0, k1, n0, n1):
    """The rows that are left over, with the same sums in the same order."""
    c0 = c[m, n0:n1]
    for k in range(k0, k1, 8):
        w0, w1, w2, w3 = w[k, n0:n1], w[k + 1, n0:n1], w[k + 2, n0:n1], w[k + 3, n0:n1]
        w4, w5, w6, w7 = w[k + 4, n0:n1], w[k + 5, n0:n1], w[k + 6, n0:n1], w[k + 7, n0:n1]
        a0, a1, a2, a3 = a[m, k], a[m, k + 1], a[m, k + 2], a[m, k + 3]
        a4, a5, a6, a7 = a[m, k + 4], a[m, k + 5], a[m, k + 6], a[m, k + 7]
        for n in range(n1 - n0):
            c0[n] += (
                a0 * w0[n] + a1 * w1[n] + a2 * w2[n] + a3 * w3[n]
                + a4 * w4[n] + a5 * w5[n] + a6 * w6[n] + a7 * w7[n]
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
def _scores(query_a, query_b, tile, out_a, out_b):
    """out_a[t] = query_a · tile[:, t] for a whole tile [head_dim, TILE], and the same for b.

    Two queries of one kv head at a time: reading the keys is what costs. Positions of the tile that are not
    filled give scores that nobody reads.
    """
    for t in range(TILE):
        out_a[t] = np.float32(0.0)
        out_b[t] = np.float32(0.0)
    for d in range(0, query_a.shape[0], 4):
        a0, a1, a2, a3 = query_a[d], query_a[d + 1], query_a[d + 2], query_a[d + 3]
        b0, b1, b2, b3 = query_b[d], query_b[d + 1], query_b[d + 2], query_b[d + 3]
        k0, k1, k2, k3 = tile[d], tile[d + 1], tile[d + 2], tile[d + 3]
        for t in range(TILE):
            out_a[t] += a0 * k0[t] + a1 * k1[t] + a2 * k2[t] + a3 * k3[t]
            out_b[t] += b0 * k0[t] + b1 * k1[t] + b2 * k2[t] + b3 * k3[t]


@_ordered
def _maximum(x, length):
    best = x[0]
    for t in range(1, length):
        best = max(best, x[t])
    return best


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


@_reduce
def _add_weighted(weights_a, weights_b, tile, count, out_a, out_b):
    """out_a[d] += Σ_t weights_a[t] · tile[d, t] over the first `count` positions; the same for b."""
    for d in range(0, out_a.shape[0], 4):
        v0, v1, v2, v3 = tile[d], tile[d + 1], tile[d + 2], tile[d + 3]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
        for t in range(count):
            a, b = weights_a[t], weights_b[t]
            a0 += a * v0[t]
            a1 += a * v1[t]
            a2 += a * v2[t]
            a3 += a * v3[t]
            b0 += b * v0[t]
            b1 += b * v1[t]
            b2 += b * v2[t]
            b3 += b * v3[t]
        out_a[d] += a0
        out_a[d + 1] += a1
        out_a[d + 2] += a2
        out_a[d + 3] += a3
        out_b[d] += b0
        out_b[d + 1] += b1
        out_b[d + 2] += b2
        out_b[d + 3] += b3


@_exact
def _silu_gate(gate_up, out):
    """out = silu(gate) · up for one row of [gate | up]."""
    width = out.shape[0]
    for i in range(width):
        gate = gate_up[i]
        out[i] = gate / (np.float32(1.0) + _exp(-gate)) * gate_up[i + width]


@_exact
def _attend(
    qkv, slot, position, prefix_slot, prefix_length, keys, values, scores, out, heads, kv_heads, head_dim
):
    """Attention of one row over positions 0..position; whole tiles of the prefix are read elsewhere."""
    group = heads // kv_heads
    length = position + 1
    tiles = (length + TILE - 1) // TILE
    shared = prefix_length // TILE
    for kv_head in range(kv_heads):
        last = (kv_head + 1) * group - 1
        for a in range(kv_head * group, last + 1, 2):
            b = min(a + 1, last)  # the last head of an odd group is paired with itself, and the copy dropped
            query_a, query_b = qkv[a * head_dim : (a + 1) * head_dim], qkv[b * head_dim : (b + 1) * head_dim]
            out_a = out[a * head_dim : (a + 1) * head_dim]
            out_b = out[b * head_dim : (b + 1) * head_dim] if b > a else scores[2, :head_dim]
            for i in range(tiles):
                source = prefix_slot if i < shared else slot
                at = i * TILE
                _scores(
                    query_a,
                    query_b,
                    keys[source, kv_head, i],
                    scores[0, at : at + TILE],
                    scores[1, at : at + TILE],
                )
            _softmax(scores[0], length)
            _softmax(scores[1], length)
            _clear(out_a)
            _clear(out_b)
            for i in range(tiles):
                source = prefix_slot if i < shared else slot
                at = i * TILE
                count = min(TILE, length - at)
                _add_weighted(scores[0, at:], scores[1, at:], values[source, kv_head, i], count, out_a, out_b)


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
                values[slot, head, tile, d, offset] = qkv[r, first_value + head * head_dim + d]


@_exact
def forward(
    tokens, slots, positions, prefix_slots, prefix_lengths, output_rows,
    embedding, lm_head, final_norm,
    attention_norm, qkv_weight, qkv_bias, q_norm, k_norm, o_weight,
    mlp_norm, gate_up_weight, down_weight,
    cos, sin, keys, values,
    x, normed, qkv, attended, gate_up, activated, scores, logits,
    shape, eps, scale,
):  # fmt: skip
    """Run all layers for the rows and write the logits of `output_rows`.

    tokens, slots, positions: [N] int32, the rows of one slot in ascending positions.
    prefix_slots, prefix_lengths: [N] int32, a slot that holds equal keys and values for the first positions.
    output_rows: [M] rows whose logits [M, V] are wanted.
    keys, values: caches with the layers in front, updated at the rows' positions.
    x .. activated: work space with N rows; scores: [3, T]. shape: (heads, kv heads, head_dim, head norm?).
    """
    heads, kv_heads, head_dim, _ = shape
    rows = tokens.shape[0]
    for r in range(rows):
        _copy(embedding[tokens[r]], x[r])
    for layer in range(qkv_weight.shape[0]):
        for r in range(rows):
            _rms_norm(x[r], attention_norm[layer], eps, normed[r])
            _copy(qkv_bias[layer], qkv[r])
        _add_product(normed, qkv_weight[layer], qkv)
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
        for r in range(rows):
            _attend(
                qkv[r], slots[r], positions[r], prefix_slots[r], prefix_lengths[r],
                keys[layer], values[layer], scores, attended[r], heads, kv_heads, head_dim,
            )  # fmt: skip
        _add_product(attended, o_weight[layer], x)
        for r in range(rows):
            _rms_norm(x[r], mlp_norm[layer], eps, normed[r])
            _clear(gate_up[r])
        _add_product(normed, gate_up_weight[layer], gate_up)
        for r in range(rows):
            _silu_gate(gate_up[r], activated[r])
        _add_product(activated, down_weight[layer], x)
    for m in range(output_rows.shape[0]):
        _rms_norm(x[output_rows[m]], final_norm, eps, normed[m])
        _clear(logits[m])
    _add_product(normed[: output_rows.shape[0]], lm_head, logits)


@_exact
def copy_prefix(cache, source, target, tiles):
    """Copy the first `tiles` tiles of one slot to another in a cache with the layers in front."""
    for layer in range(cache.shape[0]):
        for head in range(cache.shape[2]):
            for tile in range(tiles):
                for d in range(cache.shape[4]):
                    _copy(cache[layer, source, head, tile, d], cache[layer, target, head, tile, d])


@_exact
def draw(logits, temperature, uniform, tokens, logprobs, scratch):
    """Draw a token from each row of logits [M, V], whole distribution, and give its logprob.

    temperature: [M], 0 is greedy with logprobs at 1. uniform: [M] float64 in [0, 1).
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
    return 0  # nothing compares with NaN; the logprob tells


@_exact
def _invert(mass, goal):
    """The first index at which the running sum of `mass` passes `goal`, at the latest the last with mass."""
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
