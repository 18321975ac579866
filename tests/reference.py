"""The model's parts written down plainly, in float64 and with loops: what the real ones are compared with."""

import numpy as np

FLOAT32 = 2e-5  # relative to an array's scale: float32 sums in another order
BFLOAT16 = 3e-2


def worst(actual, expected) -> float:
    """Largest difference over the largest expected magnitude; NaN counts as infinite."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = np.max(np.abs(expected), initial=0.0)
    error = np.max(np.abs(actual - expected), initial=0.0) / (scale if scale else 1.0)
    return float(error) if np.isfinite(error) else float("inf")


def silu(x):
    return x / (1 + np.exp(-x))


def root_softplus(x):
    return np.sqrt(np.logaddexp(0, x))


def route(x, router, bias, k, scale):
    """(experts [n, K] best first, lower index first at ties; weights [n, K]) by sqrt(softplus) scores."""
    scores = root_softplus(np.asarray(x, np.float64) @ np.asarray(router, np.float64))
    experts, weights = [], []
    for row in scores:
        chosen = sorted(range(len(row)), key=lambda e: (-(row[e] + bias[e]), e))[:k]
        experts.append(chosen)
        weights.append(scale * row[chosen] / (row[chosen].sum() + 1e-20))
    return np.array(experts), np.array(weights)


def expert(x, gate, up, down, limit):
    """One clamped SwiGLU expert on one token: gate, up [D, F], down [F, D]."""
    return (silu(np.minimum(x @ gate, limit)) * np.clip(x @ up, -limit, limit)) @ down


def routed(x, experts, weights, p, limit):
    """Each token through each of its experts: x [n, D], p with gate and up [E, D, F], down [E, F, D] -> [n, D]."""
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, p.gate, p.up, p.down))
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(experts[t], weights[t], strict=True):
            out[t] += w * expert(x[t], gate[e], up[e], down[e], limit)
    return out


def attention(q, kv, entries, seen, sinks, segments, window):
    """q [B, S, H, C], kv [B, S, C], entries [B, T, C], seen [B, S, T] -> [B, S, H, C]; one softmax and a sink."""
    q, kv, entries = (np.asarray(a, np.float64) for a in (q, kv, entries))
    out = np.zeros_like(q)
    for b, s, h in np.ndindex(q.shape[:3]):
        keys = [kv[b, t] for t in range(max(0, s - window + 1), s + 1) if segments[b, t] == segments[b, s]]
        keys += [entries[b, w] for w in range(entries.shape[1]) if seen[b, s, w]]
        logits = np.array([q[b, s, h] @ key for key in keys]) / np.sqrt(q.shape[-1])
        top = max(logits.max(initial=-np.inf), sinks[h])
        weights = np.exp(logits - top) / (np.exp(logits - top).sum() + np.exp(sinks[h] - top))
        out[b, s, h] = sum(w * key for w, key in zip(weights, keys, strict=True))
    return out


def pooled(values, gates, bias, ratio, overlap):
    """Entries of one document [S, M] -> [S // ratio, C]: softmax over the window's slots, channel by channel."""
    values, gates, bias = (np.asarray(a, np.float64) for a in (values, gates, bias))
    width = values.shape[1] // 2 if overlap else values.shape[1]
    out = []
    for w in range(len(values) // ratio):
        own = slice(w * ratio, (w + 1) * ratio)
        scores, content = gates[own, -width:] + bias[:, -width:], values[own, -width:]
        if overlap and w:
            before = slice((w - 1) * ratio, w * ratio)
            scores = np.concatenate([gates[before, :width] + bias[:, :width], scores])
            content = np.concatenate([values[before, :width], content])
        weights = np.exp(scores - scores.max(0))
        out.append((weights / weights.sum(0) * content).sum(0))
    return np.array(out).reshape(-1, width)


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def turned(x, positions, frequencies, back=False):
    """x [S, ..., C]: the last channels, pair by pair, as complex numbers turned by position times frequency."""
    out = np.array(x, np.float64)
    first = out.shape[-1] - 2 * len(frequencies)
    for s, i in np.ndindex(len(out), len(frequencies)):
        at = first + 2 * i
        angle = float(positions[s]) * float(frequencies[i])
        pair = (out[s, ..., at] + 1j * out[s, ..., at + 1]) * np.exp(-1j * angle if back else 1j * angle)
        out[s, ..., at], out[s, ..., at + 1] = pair.real, pair.imag
    return out


def entries(p, x, ratio, overlap, frequencies):
    """Compressed keys of one document [S, D] -> [S // ratio, C], each turned as its window's first token."""
    x = np.asarray(x, np.float64)
    kept = rms(pooled(x @ p.wkv, x @ p.wgate, p.position_bias, ratio, overlap)) * p.norm
    return turned(kept, np.arange(len(kept)) * ratio, frequencies)


def chosen(p, x, q_low, ratio, k, frequencies):
    """The indexer on one document: which entries each token keeps, [S, S // ratio]; the first of equals."""
    keys = entries(p.compressor, x, ratio, True, frequencies)
    queries = turned(np.einsum("sq,qhc->shc", np.asarray(q_low, np.float64), p.wq_b), np.arange(len(x)), frequencies)
    heads = np.asarray(x, np.float64) @ p.weights_proj / np.sqrt(p.weights_proj.shape[-1])
    kept = np.zeros((len(x), len(keys)), bool)
    for t in range(len(x)):
        scores = np.maximum(queries[t] @ keys.T, 0) / np.sqrt(keys.shape[-1])
        score = heads[t] @ scores
        best = sorted(range((t + 1) // ratio), key=lambda w, score=score: (-score[w], w))
        kept[t, best[:k]] = True
    return kept


def sinkhorn(logits, rounds, epsilon):
    """One matrix: row softmax plus epsilon, columns, then `rounds - 1` times rows and columns."""
    m = np.exp(logits - logits.max(-1, keepdims=True))
    m = m / m.sum(-1, keepdims=True) + epsilon
    m = m / (m.sum(-2, keepdims=True) + epsilon)
    for _ in range(rounds - 1):
        m = m / (m.sum(-1, keepdims=True) + epsilon)
        m = m / (m.sum(-2, keepdims=True) + epsilon)
    return m
