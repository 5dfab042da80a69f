import math

import torch


def slow_sinusoid(position, channels, layout="halves", temperature=10_000.0):
    out = [0.0] * channels
    for k in range(channels // 2):
        angle = position / temperature ** (2 * k / channels)
        sine, cosine = (k, channels // 2 + k) if layout == "halves" else (2 * k, 2 * k + 1)
        out[sine], out[cosine] = math.sin(angle), math.cos(angle)
    return out


def added(encoding, context, tokens, batch=1):
    return encoding("tokens", torch.zeros(batch, tokens, encoding.width).double(), context)


def close(found, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
