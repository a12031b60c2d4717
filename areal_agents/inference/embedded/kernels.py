"""The forward pass of a decoder for a CPU in float32, as machine code compiled by numba.

One call runs every layer for a batch of rows; a row is one token of one slot, prompt or decode alike.
Small models are bound by the launch of operators, not by arithmetic, so everything is one call.

Invariant: a row's result depends on its own slot only, never on the other rows of the call, because each
output element is accumulated over k in one fixed order. Sampling with a seed is therefore reproducible
whatever else the engine is doing, and a chunked or cached prefill equals a whole one bit for bit.

Layouts: matrices are [in, out]; keys and values are [slot, kv head, head_dim, position], so that both the
scores and the weighted sum run along contiguous positions.
"""

from __future__ import annotations

import numba
import numpy as np

_K_TILE = 512
_N_TILE = 256
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


@numba.njit(fastmath={"contract"}, nogil=True, cache=True, error_model="numpy", inline="always")
def _exp(x):
    """exp(x) to 2 ulp in [-87, 88], written so that a loop over it vectorises (Cephes' polynomial)."""
    x = min(max(x, _EXP_MIN), _EXP_MAX)
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power.view(np.float32)


@_exact
def _add_product(a, w, c):
    """c += a @ w for a [M, K], w [K, N], c [M, N]; K is a multiple of 4."""
    rows, depth = a.shape
    width = w.shape[1]
    for n0 in range(0, width, _N_TILE):
        n1 = min(n0 + _N_TILE, width)
        for k0 in range(0, depth, _K_TILE):
            k1 = min(k0 + _K_TILE, depth)
            m = 0
            while m + 4 <= rows:
                _four_rows(a, w, c, m, k0, k1, n0, n1)
                m += 4
            while m < rows:
                _one_row(a, w, c, m, k0, k1, n0, n1)
                m += 1


@_exact
def _four_rows(a, w, c, m, k0, k1, n0, n1):
    c0 = c[m, n0:n1]
    c1 = c[m + 1, n0:n1]
    c2 = c[m + 2, n0:n1]
    c3 = c[m + 3, n0:n1]
    for k in range(k0, k1, 4):
        w0 = w[k, n0:n1]
        w1 = w[k + 1, n0:n1]
        w2 = w[k + 2, n0:n1]
        w3 = w[k + 3, n0:n1]
        a00, a01, a02, a03 = a[m, k], a[m, k + 1], a[m, k + 2], a[m, k + 3]
        a10, a11, a12, a13 = a[m + 1, k], a[m + 1, k + 1], a[m + 1, k + 2], a[m + 1, k + 3]
        a20, a21, a22, a23 = a[m + 2, k], a[m + 2, k + 1], a[m + 2, k + 2], a[m + 2, k + 3]
        a30, a31, a32, a33 = a[m + 3, k], a[m + 3, k + 1], a[m + 3, k + 2], a[m + 3, k + 3]
        for n in range(n1 - n0):
            b0, b1, b2, b3 = w0[n], w1[n], w2[n], w3[n]
            c0[n] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
            c1[n] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
            c2[n] += a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
            c3[n] += a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3


@_exact
def _one_row(a, w, c, m, k0, k1, n0, n1):
    c0 = c[m, n0:n1]
    for k in range(k0, k1, 4):
        w0 = w[k, n0:n1]
        w1 = w[k + 1, n0:n1]
        w2 = w[k + 2, n0:n1]
        w3 = w[k + 3, n0:n1]
        a0, a1, a2, a3 = a[m, k], a[m, k + 1], a[m, k + 2], a[m, k + 3]
        for n in range(n1 - n0):
            c0[n] += a0 * w0[n] + a1 * w1[n] + a2 * w2[n] + a3 * w3[n]


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
def _scores(query_a, query_b, keys, length, out_a, out_b):
    """out_a[t] = query_a · keys[:, t] for t < length, and the same for b; head_dim is a multiple of 4.

    Two queries of one kv head at a time: reading the keys is what costs.
    """
    for t in range(length):
        out_a[t] = np.float32(0.0)
        out_b[t] = np.float32(0.0)
    for d in range(0, query_a.shape[0], 4):
        a0, a1, a2, a3 = query_a[d], query_a[d + 1], query_a[d + 2], query_a[d + 3]
        b0, b1, b2, b3 = query_b[d], query_b[d + 1], query_b[d + 2], query_b[d + 3]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        for t in range(length):
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


@_reduce
def _weighted_sums(weights_a, weights_b, values, length, scale_a, scale_b, out_a, out_b):
    """out_a[d] = scale_a · Σ_t weights_a[t] · values[d, t], and the same for b."""
    for d in range(0, out_a.shape[0], 2):
        v0, v1 = values[d], values[d + 1]
        a0 = a1 = b0 = b1 = np.float32(0.0)
        for t in range(length):
            a0 += weights_a[t] * v0[t]
            a1 += weights_a[t] * v1[t]
            b0 += weights_b[t] * v0[t]
            b1 += weights_b[t] * v1[t]
        out_a[d], out_a[d + 1] = a0 * scale_a, a1 * scale_a
        out_b[d], out_b[d + 1] = b0 * scale_b, b1 * scale_b


@_exact
def _silu_gate(gate_up, out):
    """out = silu(gate) · up for one row of [gate | up]."""
    width = out.shape[0]
    for i in range(width):
        gate = gate_up[i]
        out[i] = gate / (np.float32(1.0) + _exp(-gate)) * gate_up[i + width]


@_exact
def _attend(qkv, slot, position, keys, values, scores, out, heads, kv_heads, head_dim):
    """Attention of one row over positions 0..position of its slot."""
    group = heads // kv_heads
    length = position + 1
    for kv_head in range(kv_heads):
        last = (kv_head + 1) * group - 1
        for a in range(kv_head * group, last + 1, 2):
            b = min(a + 1, last)  # an odd group computes its last head twice
            _scores(
                qkv[a * head_dim : (a + 1) * head_dim],
                qkv[b * head_dim : (b + 1) * head_dim],
                keys[slot, kv_head], length, scores[0], scores[1],
            )  # fmt: skip
            for i in range(2):
                _exponentials(scores[i], length, _maximum(scores[i], length))
            _weighted_sums(
                scores[0],
                scores[1],
                values[slot, kv_head],
                length,
                np.float32(1.0) / _sum(scores[0], length),
                np.float32(1.0) / _sum(scores[1], length),
                out[a * head_dim : (a + 1) * head_dim],
                out[b * head_dim : (b + 1) * head_dim],
            )


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
        for head in range(kv_heads):
            for d in range(head_dim):
                keys[slot, head, d, position] = qkv[r, (heads + head) * head_dim + d]
                values[slot, head, d, position] = qkv[r, first_value + head * head_dim + d]


@_exact
def forward(
    tokens, slots, positions, output_rows,
    embedding, lm_head, final_norm,
    attention_norm, qkv_weight, qkv_bias, q_norm, k_norm, o_weight,
    mlp_norm, gate_up_weight, down_weight,
    cos, sin, keys, values,
    x, normed, qkv, attended, gate_up, activated, scores, logits,
    shape, eps, scale,
):  # fmt: skip
    """Run all layers for the rows and write the logits of `output_rows`.

    tokens, slots, positions: [N] int32, the rows of one slot in ascending positions.
    output_rows: [M] rows whose logits [M, V] are wanted.
    keys, values: [L, S, kv heads, head_dim, T] caches, updated at the rows' positions.
    x .. scores: work space with N rows. shape: (heads, kv heads, head_dim, query and key norm?).
    """
    heads, kv_heads, head_dim, _ = shape
    rows = tokens.shape[0]
    for r in range(rows):
        x[r] = embedding[tokens[r]]
    for layer in range(qkv_weight.shape[0]):
        for r in range(rows):
            _rms_norm(x[r], attention_norm[layer], eps, normed[r])
            qkv[r] = qkv_bias[layer]
        _add_product(normed, qkv_weight[layer], qkv)
        _project_heads(
            qkv, slots, positions, keys[layer], values[layer], q_norm[layer], k_norm[layer], cos, sin, shape, eps, scale
        )
        for r in range(rows):
            _attend(
                qkv[r], slots[r], positions[r], keys[layer], values[layer], scores, attended[r],
                heads, kv_heads, head_dim,
            )  # fmt: skip
        _add_product(attended, o_weight[layer], x)
        for r in range(rows):
            _rms_norm(x[r], mlp_norm[layer], eps, normed[r])
            gate_up[r] = np.float32(0.0)
        _add_product(normed, gate_up_weight[layer], gate_up)
        for r in range(rows):
            _silu_gate(gate_up[r], activated[r])
        _add_product(activated, down_weight[layer], x)
    for m in range(output_rows.shape[0]):
        _rms_norm(x[output_rows[m]], final_norm, eps, normed[m])
        logits[m] = np.float32(0.0)
    _add_product(normed[: output_rows.shape[0]], lm_head, logits)


@_exact
def copy_prefix(cache, source, target, length):
    """Copy positions 0..length of one slot to another in a cache [L, S, kv heads, head_dim, T]."""
    layers, _, heads, head_dim, _ = cache.shape
    for layer in range(layers):
        for head in range(heads):
            for d in range(head_dim):
                cache[layer, target, head, d, :length] = cache[layer, source, head, d, :length]
