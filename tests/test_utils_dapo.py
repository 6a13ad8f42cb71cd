"""utils_dapo: hand-worked values, gradients against a float64 loop, and what must not matter."""

import math

import pytest
import torch

from utils_dapo import LossStats, dapo_loss_sum, group_advantages, mismatch_metrics, mixed_groups, overlong_penalty


def test_advantages_by_hand():
    # G = 8, one right, +1/-1: mean -0.75, sample variance (3.0625 + 7 * 0.0625) / 7 = 0.5; 1.75 / sqrt(0.5) = 2.474874
    rewards = torch.full((1, 8), -1.0)
    rewards[0, 0] = 1.0
    advantages = group_advantages(rewards, ddof=1, eps=0.0)
    assert float(advantages[0, 0]) == pytest.approx(1.75 / math.sqrt(0.5), rel=1e-6)
    assert float(advantages[0, 1]) == pytest.approx(-0.25 / math.sqrt(0.5), rel=1e-6)
    # population: variance 3.5 / 8 = 0.4375
    assert float(group_advantages(rewards, ddof=0, eps=0.0)[0, 0]) == pytest.approx(1.75 / math.sqrt(0.4375), rel=1e-6)
    # 0/1 rewards of the same group, eps 1e-6 added to 0.353553: 0.875 / 0.353554 = 2.474867
    assert float(group_advantages((rewards + 1) / 2, ddof=1, eps=1e-6)[0, 0]) == pytest.approx(0.875 / (math.sqrt(0.125) + 1e-6), rel=1e-6)


def test_advantages_of_one_and_of_equal_rewards_are_zero():
    assert group_advantages(torch.tensor([[3.0]])).item() == 0.0
    # 0.1 is not exact in binary: a float standard deviation of equal values need not be zero
    assert group_advantages(torch.full((2, 7), 0.1)).abs().max() == 0.0
    assert float(group_advantages(torch.randn(5, 8)).sum(1).abs().max()) < 1e-5  # they sum to zero but for rounding


def test_dynamic_sampling_keeps_mixed_groups_only():
    correct = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 1]]).bool()
    assert mixed_groups(correct).tolist() == [False, False, True, True]


def test_overlong_penalty_at_its_boundaries():
    # max 20, buffer 8: nothing up to 12, -1/8 at 13, -1 at 20 and beyond
    lengths = torch.tensor([0, 12, 13, 16, 20, 25])
    assert overlong_penalty(lengths, 20, 8).tolist() == [0.0, 0.0, -0.125, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20, 0).tolist() == [0.0] * 6


def test_loss_by_hand():
    # lengths 1 and 3, ratio 1, advantages +1 and -1: -(1 - 3) / 4 = 0.5; a mean of means would give 0
    mask = torch.tensor([[True, False, False], [True, True, True]])
    zeros = torch.zeros(2, 3)
    loss, stats = dapo_loss_sum(zeros, zeros, torch.tensor([1.0, -1.0]), mask)
    assert float(loss) / int(mask.sum()) == 0.5
    assert stats == LossStats(4.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("ratio, advantage, expected, low, high", [
    (1.5, 1.0, -1.28, 0, 1),    # above the range, good: clipped at 1.28
    (1.5, -1.0, 1.5, 0, 0),     # above the range, bad: not clipped
    (0.5, 1.0, -0.5, 0, 0),     # below the range, good: not clipped
    (0.5, -1.0, 0.8, 1, 0),     # below the range, bad: clipped at 0.8
])
def test_clip_higher_by_hand(ratio, advantage, expected, low, high):
    new = torch.tensor([[math.log(ratio)]])
    loss, stats = dapo_loss_sum(new, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool))
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert (stats.clipped_low, stats.clipped_high) == (low, high)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    new = torch.tensor([[math.log(9.0)]])
    args = (torch.zeros(1, 1), torch.tensor([-2.0]), torch.ones(1, 1, dtype=torch.bool))
    assert float(dapo_loss_sum(new, *args)[0]) == pytest.approx(18.0, rel=1e-6)
    assert float(dapo_loss_sum(new, *args, dual_clip=3.0)[0]) == pytest.approx(6.0, rel=1e-6)


def reference_loss(new, old, advantages, mask, low, high):
    """The paper's objective as plain Python loops in float64, with its analytic gradient."""
    total, gradient = 0.0, torch.zeros_like(new, dtype=torch.float64)
    for i in range(new.shape[0]):
        for t in range(new.shape[1]):
            if not mask[i, t]:
                continue
            a, r = float(advantages[i]), math.exp(float(new[i, t]) - float(old[i, t]))
            clipped = min(max(r, 1 - low), 1 + high)
            total -= min(r * a, clipped * a)
            if r * a <= clipped * a:
                gradient[i, t] = -r * a
    return total, gradient


def test_loss_and_gradient_equal_a_float64_loop():
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(6, 9, generator=generator, dtype=torch.float64) * 0.5 - 1
    old = torch.randn(6, 9, generator=generator, dtype=torch.float64) * 0.5 - 1
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) < 0.7
    expected, gradient = reference_loss(new, old, advantages, mask, 0.2, 0.28)
    variable = new.clone().requires_grad_()
    loss, _ = dapo_loss_sum(variable, old, advantages, mask)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-10)
    assert float((variable.grad - gradient).abs().max()) < 1e-10


def test_extreme_log_ratios_stay_finite_in_value_and_gradient():
    new = torch.tensor([[100.0, -100.0, 100.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])  # the last one is masked: exp(100) there must not reach the gradient
    for advantage in (1.0, -1.0):
        new.grad = None
        loss, stats = dapo_loss_sum(new, torch.zeros(1, 3), torch.tensor([advantage]), mask)
        loss.backward()
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(new.grad).all()) and new.grad[0, 2] == 0
        assert math.isfinite(stats.kl_k3)


def test_weights_scale_each_token():
    new = torch.zeros(1, 2, requires_grad=True)
    weights = torch.tensor([[0.5, 2.0]])
    loss, _ = dapo_loss_sum(new, torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2, dtype=torch.bool), weights=weights)
    loss.backward()
    assert new.grad.tolist() == [[-0.5, -2.0]]


def test_mismatch_metrics_by_hand():
    # ratios 1 and 1.5: k1 = -ln(1.5)/2, k3 = (0.5 - ln 1.5)/2, ESS = 2.5^2 / 3.25 / 2
    metrics = mismatch_metrics(torch.tensor([0.0, math.log(1.5)]), torch.zeros(2), 0.2, 0.28)
    assert metrics["mismatch/kl_k1_nats_per_token"] == pytest.approx(-math.log(1.5) / 2, rel=1e-6)
    assert metrics["mismatch/kl_k3_nats_per_token"] == pytest.approx((0.5 - math.log(1.5)) / 2, rel=1e-6)
    assert metrics["mismatch/outside_clip_share"] == 0.5
    assert metrics["mismatch/ess_share"] == pytest.approx(2.5 ** 2 / 3.25 / 2, rel=1e-6)
