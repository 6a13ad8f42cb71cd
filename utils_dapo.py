"""DAPO's formulas on plain tensors: advantages, dynamic-sampling filter, overlong penalty, clipped token-level loss.

Source: Yu et al. 2025, https://arxiv.org/abs/2503.14476. No KL term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is far outside any clip range and finite in float32; exp(100) is not


def mixed_groups(correct: Tensor) -> Tensor:
    """Dynamic sampling: True for groups with 0 < number correct < G.

    Args: correct: (N, G) bool. Correctness, never the shaped reward: a length penalty makes an all-wrong group look mixed.
    Returns: (N,) bool.
    """
    return correct.any(dim=1) & ~correct.all(dim=1)


def group_advantages(rewards: Tensor, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(r - mean of its group) / (standard deviation of its group + eps).

    Args:    rewards: (N, G) float. ddof: 1 sample, 0 population standard deviation.
    Returns: (N, G) float32; 0 in a group of one, and in a group of equal rewards (compared exactly, never by a float deviation).
    """
    rewards = rewards.to(torch.float32)
    if rewards.shape[1] == 1:
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = centred / (rewards.std(dim=1, correction=ddof, keepdim=True) + eps)
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(equal, torch.zeros_like(advantages), advantages)


def overlong_penalty(lengths: Tensor, max_response_length: int, buffer_len: int) -> Tensor:
    """Soft overlong punishment: 0 up to max - buffer, then linear down to -1 at max.

    Args:    lengths: any shape, int, response tokens with EOS. buffer_len: tokens over which it grows (0: no penalty).
    Returns: float32 of the same shape in [-1, 0].
    """
    if buffer_len == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32, device=lengths.device)
    start = max_response_length - buffer_len
    return ((start - lengths).to(torch.float32) / buffer_len).clamp(-1.0, 0.0)


@dataclass
class LossStats:
    """Sums over the True positions of one micro-batch, to be added up over a step."""

    tokens: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    kl_k1: float = 0.0  # sum of old - new log-probability: KL(old || new), nats
    kl_k3: float = 0.0

    def __add__(self, other: "LossStats") -> "LossStats":
        return LossStats(*(a + b for a, b in zip(self.values(), other.values())))

    def values(self) -> tuple[float, ...]:
        return self.tokens, self.clipped_low, self.clipped_high, self.kl_k1, self.kl_k3


def dapo_loss_sum(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_ratio_low: float = 0.2,
                  clip_ratio_high: float = 0.28, dual_clip: float = 0.0, weights: Tensor | None = None) -> tuple[Tensor, LossStats]:
    """Sum over tokens of -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - old_logprobs).

    The caller divides by the number of True positions of the whole optimizer step.

    Args:    logprobs, old_logprobs: (B, R) float32, natural log-probabilities of the sampled tokens.
             advantages: (B,) float32. mask: (B, R) bool, tokens that enter the loss.
             dual_clip: for A < 0 the loss is at most dual_clip * |A| (0: off). weights: (B, R) importance weights, constants.
    Returns: scalar float32 and the step's counts. A token is "clipped" where the clipped term is the smaller one, so that
             its gradient is zero.
    """
    # Masked positions get ratio 1 before exp: 0 * inf would be NaN in the gradient.
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantage = advantages[:, None]
    clipped_ratio = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    if dual_clip:
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, dual_clip * advantage), surrogate)
    if weights is not None:
        surrogate = surrogate * weights
    loss_sum = -torch.where(mask, surrogate, torch.zeros_like(surrogate)).sum()
    with torch.no_grad():
        low = mask & (ratio < 1.0 - clip_ratio_low) & (advantage < 0)
        high = mask & (ratio > 1.0 + clip_ratio_high) & (advantage > 0)
        counts = torch.stack([mask.sum(), low.sum(), high.sum(), -log_ratio.sum(), (torch.expm1(log_ratio) - log_ratio).sum()])
        return loss_sum, LossStats(*counts.tolist())


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, clip_ratio_low: float, clip_ratio_high: float) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the sampler's at the same weights.

    Args:    old_logprobs (trainer), rollout_logprobs (sampler): (T,) float32, response tokens of the whole step.
    Returns: k1 and k3 of KL(sampler || trainer) in nats per token, largest |difference| in nats, share of tokens whose
             ratio lies outside the clip range, effective sample size of the token weights as a share.
    """
    log_ratio = (old_logprobs - rollout_logprobs).double()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch/kl_k1_nats_per_token": float(-log_ratio.mean()),
        "mismatch/kl_k3_nats_per_token": float((torch.expm1(log_ratio) - log_ratio).mean()),
        "mismatch/max_abs_nats": float(log_ratio.abs().max()),
        "mismatch/outside_clip_share": float(((ratio < 1 - clip_ratio_low) | (ratio > 1 + clip_ratio_high)).double().mean()),
        "mismatch/ess_share": float(ratio.sum() ** 2 / (ratio ** 2).sum() / len(ratio)),
    }
