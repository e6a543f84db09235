"""A realistic result without a model: correlated, heavy-tailed divergences of the size that a trained hybrid gives."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from quantize_state.evals.growth import fit_exponent
from quantize_state.evals.metrics import KLMeter
from quantize_state.evals.result import (
    Arm,
    BytesPerElement,
    ErrorBucket,
    ErrorPoint,
    Exponents,
    Layer,
    Model,
    Perplexity,
    Policy,
    Provenance,
    Result,
    Text,
    TopOne,
)

# name, policy, mean KL at the end, growth exponent of KL, layer error, growth of the state error, resident, moved
ARMS = (
    ("reference", Policy("fp32", None, 1), 0.0, 0.0, 0.0, 0.0, 4.0, 8.0),
    ("reference-again", Policy("fp32", None, 1), 3e-12, 0.0, 2e-7, 0.0, 4.0, 8.0),
    ("replay-fp32", Policy("fp32", None, 16), 5e-12, 0.0, 3e-7, 0.0, 4.0, 4.25),
    ("coupled-nvfp4", Policy("nvfp4", None, 1), 0.149, 0.55, 0.21, 0.30, 0.5625, 1.125),
    ("coupled-nvfp4-w16", Policy("nvfp4", None, 16), 0.0027, 0.35, 0.07, 0.18, 0.5625, 0.5977),
    ("coupled-fp8", Policy("fp8_e4m3", None, 1), 0.0021, 0.30, 0.05, 0.20, 1.03125, 2.0625),
    ("decoupled-nvfp4", Policy("fp32", "nvfp4", 16), 0.00024, 0.0, 0.042, 0.0, 4.5625, 1.0625),
    ("decoupled-fp8", Policy("fp32", "fp8_e4m3", 16), 0.000017, 0.0, 0.011, 0.0, 5.03125, 1.53125),
)


def correlated(random: np.random.Generator, shape: tuple[int, int], phi: float) -> np.ndarray:
    """AR(1) rows of variance one, started in their stationary distribution."""
    noise = random.standard_normal(shape) * math.sqrt(1 - phi * phi)
    noise[:, 0] /= math.sqrt(1 - phi * phi)
    for t in range(1, shape[1]):
        noise[:, t] += phi * noise[:, t - 1]
    return noise


def fake_arm(row: tuple, index: int, *, sequences: int, tokens: int, layers: int) -> Arm:
    name, policy, size, growth, error, drift, resident, moved = row
    random = np.random.default_rng(index)
    position = np.arange(tokens)
    curve = size * ((position + 16) / tokens) ** growth
    kl = curve * np.exp(1.6 * correlated(random, (sequences, tokens), 0.9) - 1.28)
    meter = KLMeter(resamples=200)
    for i in range(sequences):
        columns = {"kl": kl[i], "reverse": kl[i] * 1.02, "agree": np.ones(tokens), "tied": np.zeros(tokens)}
        meter._chunks[i].append((0, columns | {"nll_reference": kl[i] * math.nan, "nll_arm": kl[i] * math.nan}))
    evidence = meter.result()
    disagree = min(0.4, 0.45 * math.sqrt(evidence.kl.mean))
    extra = 0.8 * evidence.kl.mean
    return Arm(
        name=name,
        policy=policy,
        kl=evidence.kl,
        top1_agreement=TopOne(1 - disagree, 3 + index, sequences * tokens - 3 - index),
        ppl=Perplexity(
            arm=3.31 * math.exp(extra),
            reference=3.31,
            ratio=math.exp(extra),
            ratio_ci95=(math.exp(extra * 0.7), math.exp(extra * 1.3)),
            bits_per_token=1.727 + extra / math.log(2),
            reference_bits_per_token=1.727,
            bits_per_byte=1.727 + extra / math.log(2),
            reference_bits_per_byte=1.727,
        ),
        bytes_per_element=BytesPerElement(resident, moved),
        layers=[_layer(i, name, error, drift, random, tokens) for i in range(layers)],
        seconds=12.5 + index,
    )


def _layer(i: int, policy: str, error: float, drift: float, random: np.random.Generator, tokens: int) -> Layer:
    scale = error * (0.5 + 0.9 * i / 6) * math.exp(0.25 * random.standard_normal())
    output, state, low = [], [], 0
    high = 16
    while low < tokens:
        middle = math.sqrt(max(low, 4) * high)
        output.append(
            ErrorBucket(
                low, min(high, tokens), scale * (middle / 16) ** drift * math.exp(0.05 * random.standard_normal())
            )
        )
        if high <= tokens:
            exact = policy.startswith(("reference", "replay", "decoupled"))
            state.append(
                ErrorPoint(
                    high, 0.0 if policy.startswith("decoupled") else scale * (1 if exact else (high / 16) ** drift)
                )
            )
        low, high = high, 2 * high
    exponents = Exponents(
        state=fit_exponent([(p.position, p.error) for p in state]),
        output=fit_exponent([(math.sqrt(b.start * b.stop), b.error) for b in output if b.start >= 16]),
    )
    return Layer(f"model.layers.{i}.mixer", "gdn", policy, scale, state[-1].error, output, state, exponents)


def fake_result(
    model: str = "tiny-gdn",
    *,
    sequences: int = 4,
    tokens: int = 4096,
    layers: int = 6,
    arms: tuple = ARMS,
    scale: float = 1.0,
) -> Result:
    """A complete result; ``scale`` multiplies every divergence."""
    rows = [(r[0], r[1], r[2] * scale, *r[3:]) for r in arms]
    return Result(
        model=Model(model, 5_612_448, {"gdn": layers, "attention": 2}, "ab" * 32, {"model.safetensors": "ab" * 32}),
        text=Text("pydoc", tokens, sequences, "cd" * 32, "teacher-forced on the text"),
        arms=[fake_arm(r, i, sequences=sequences, tokens=tokens, layers=layers) for i, r in enumerate(rows)],
        provenance=Provenance(
            quantize_state="0.1.0",
            git_commit="0123456789abcdef0123456789abcdef01234567",
            git_dirty=False,
            versions={"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.24.0", "triton": "3.9.0"},
            device="cpu (x86_64)",
            threads=2,
            dtype="float32",
            engine="scan",
            window=16,
            seeds={"text": 0, "rounding": 0, "bootstrap": 0},
            sha256={"weights": "ab" * 32, "text": "cd" * 32},
            command=f"quantize-state eval {model} --tokens {tokens} --sequences {sequences}",
            started="2026-11-30T11:26:00+00:00",
            finished="2026-11-30T11:29:12+00:00",
        ),
        status="complete",
        layer_errors="in-model",
    )


def renamed(result: Result, name: str) -> Result:
    return dataclasses.replace(result, model=dataclasses.replace(result.model, name=name))
