"""utils_stats.py against scipy, statsmodels, plain float64 loops and simulation."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats

import utils_stats as st

sm_stats = pytest.importorskip("statsmodels.stats.weightstats", reason="statsmodels is in requirements-dev.txt")

ROOT = Path(__file__).resolve().parents[1]
TIGHT = 1e-8  # asked for by the project: agreement of every statistic with an independent implementation


def arms(seed: int, n: int = 6, m: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return 0.06 + 0.03 * rng.standard_normal(n), 0.05 + 0.01 * rng.standard_normal(m)


def close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=TIGHT, abs=1e-12)


# --- means

@pytest.mark.parametrize("seed", range(3))
def test_welch_agrees_with_scipy(seed):
    x, y = arms(seed)
    ours, theirs = st.welch(x, y), stats.ttest_ind(x, y, equal_var=False)
    low, high = theirs.confidence_interval(0.95)
    for a, b in ((ours["t_statistic"], theirs.statistic), (ours["p_value"], theirs.pvalue), (ours["df"], theirs.df),
                 (ours["low"], low), (ours["high"], high), (st.student_p(x, y), stats.ttest_ind(x, y).pvalue)):
        assert close(a, b)


@pytest.mark.parametrize("seed", range(3))
def test_equivalence_tests_agree_with_statsmodels(seed):
    x, y = arms(seed, 6, 6)
    p, lower, upper = sm_stats.ttost_ind(x, y, -0.02, 0.02, usevar="unequal")
    ours = st.tost_welch(x, y, 0.02)
    assert close(ours["p_value"], p) and close(ours["p_lower"], lower[1]) and close(ours["p_upper"], upper[1])
    p, lower, upper = sm_stats.ttost_paired(x, y, -0.02, 0.02)
    ours = st.tost_paired(x - y, 0.02)
    assert close(ours["p_value"], p) and close(ours["p_lower"], lower[1]) and close(ours["p_upper"], upper[1])


def test_equivalence_and_interval_say_the_same():
    for seed in range(50):
        x, y = arms(seed)
        ours = st.tost_welch(x, y, 0.03)
        assert (ours["p_value"] < 0.05) == (-0.03 < ours["low"] and ours["high"] < 0.03)


def test_ratio_of_means_is_a_welch_test_of_each_contrast():
    x, y = arms(1)
    ours = st.tost_ratio_of_means(x, y, 1.25)
    assert close(ours["p_lower"], stats.ttest_ind(x, y / 1.25, equal_var=False, alternative="greater").pvalue)
    assert close(ours["p_upper"], stats.ttest_ind(x, y * 1.25, equal_var=False, alternative="less").pvalue)
    assert math.isnan(st.tost_ratio_of_means(x, -y, 1.25)["p_value"])


def test_mean_interval_and_test_agree_with_scipy():
    x, _ = arms(2)
    theirs = stats.ttest_1samp(x, 0.01, alternative="greater")
    assert close(st.mean_above(x, 0.01), theirs.pvalue)
    low, high = stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
    assert close(st.mean_interval(x)[0], low) and close(st.mean_interval(x)[1], high)


def test_equal_values_have_exactly_zero_variance():
    # 0.1 + 0.2 - 0.3 style rounding: the mean of equal floats need not be that float.
    assert st.sample_variance([0.1] * 7) == 0.0
    assert st.sample_variance([0.1, 0.1 + 1e-9, 0.1]) > 0


def test_no_noise_means_certainty_not_an_error():
    x, y = np.full(4, 0.06), np.full(4, 0.05)
    assert st.tost_welch(x, y, 0.05)["p_value"] == 0.0 and st.tost_welch(x, y, 0.005)["p_value"] == 1.0
    assert st.mean_above(x) == 0.0 and st.mean_above(-x) == 1.0
    assert math.isnan(st.welch(x, x)["p_value"])


def test_holm_agrees_with_statsmodels_and_skips_missing_tests():
    from statsmodels.stats.multitest import multipletests
    p = [0.04, 0.001, 0.03, 0.5, 0.012]
    assert np.allclose(st.holm(p), multipletests(p, method="holm")[1], rtol=TIGHT)
    with_gap = st.holm([0.04, math.nan, 0.001])
    assert math.isnan(with_gap[1]) and with_gap[0] == pytest.approx(0.04) and with_gap[2] == pytest.approx(0.002)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [[1.0, 2.0]]])
def test_unusable_values_raise(bad):
    with pytest.raises(ValueError):
        st.mean_interval(bad)


# --- spread of one task

@pytest.mark.parametrize("seed", range(3))
def test_brown_forsythe_agrees_with_levene(seed):
    for n, m in ((6, 5), (5, 5), (4, 8), (3, 3)):
        x, y = arms(seed, n, m)
        ours, theirs = st.brown_forsythe(x, y), stats.levene(x, y, center="median")
        assert close(ours["f_statistic"], theirs.statistic) and close(ours["p_value_two_sided"], theirs.pvalue)
        assert (ours["signed_t"] > 0) == (np.abs(x - np.median(x)).mean() > np.abs(y - np.median(y)).mean())


def test_f_test_by_the_book():
    # Variances 2.5 and 1 with 4 and 2 degrees of freedom: F = 2.5; P(F(4,2) > 2.5) = 0.3056 (closed form 1 - (F d1/(d2 + F d1))^(d1/2) (1 + ...)).
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 2, 3])
    ours = st.f_test(x, y)
    assert ours["f_statistic"] == pytest.approx(2.5)
    # For d2 = 2 the survival function is 1 - (d1 F / (d1 F + 2))^(d1/2) exactly: 1 - (10/12)^2.
    assert close(ours["p_value_greater"], 1 - (10 / 12) ** 2)
    assert close(ours["p_value_two_sided"], 2 * (1 - (10 / 12) ** 2))
    assert close(stats.f.cdf(ours["f_statistic"] / ours["low"], 4, 2), 0.975)
    assert close(stats.f.cdf(ours["f_statistic"] / ours["lower_bound"], 4, 2), 0.95)
    assert math.isnan(st.f_test(x, np.ones(3))["f_statistic"])


def test_variance_interval_inverts_the_chi_square_test():
    x, _ = arms(0)
    low, high = st.variance_interval(x)
    assert close(stats.chi2.sf(x.var(ddof=1) * 5 / low, 5), 0.025) and close(stats.chi2.cdf(x.var(ddof=1) * 5 / high, 5), 0.025)


def test_pitman_morgan_agrees_with_pearson():
    x, y = arms(3, 7, 7)
    theirs = stats.pearsonr(x + y, x - y, alternative="greater")
    ours = st.pitman_morgan(x, y)
    assert close(ours["correlation"], theirs.statistic) and close(ours["p_value_greater"], theirs.pvalue)
    assert close(ours["p_value_two_sided"], stats.pearsonr(x + y, x - y).pvalue)
    with pytest.raises(ValueError):
        st.pitman_morgan(x, y[:-1])


def test_bootstrap_is_reproducible_and_points_the_right_way():
    x, y = arms(4, 10, 10)
    first = st.bootstrap_variance_ratio(x, y, 2000, 1)
    assert first == st.bootstrap_variance_ratio(x, y, 2000, 1)
    assert first["p_value_greater"] < 0.05 < 0.5 < st.bootstrap_variance_ratio(y, x, 2000, 1)["p_value_greater"]
    assert first["low"] < x.var(ddof=1) / y.var(ddof=1) < first["high"]
    assert math.isnan(st.bootstrap_variance_ratio(x, np.ones(10), 200, 1)["p_value_greater"])


def test_bound_for_a_zero_denominator_uses_the_largest_hidden_variance():
    # Four equal records on a grid of 0.1 hide at most +-0.05: two at each end have sample variance 4 * 0.05^2 / 3.
    x = np.array([0.0, 1.0, 2.0, 3.0])
    hidden = np.var([-0.05, -0.05, 0.05, 0.05], ddof=1)
    assert close(st.ratio_bound_from_resolution(x, 4, 0.1), x.var(ddof=1) / hidden / stats.f.ppf(0.95, 3, 3))
    worst = max(np.var(c, ddof=1) for c in itertools.product((-0.05, 0.0, 0.05), repeat=5))
    assert close(st.ratio_bound_from_resolution(x, 5, 0.1), x.var(ddof=1) / worst / stats.f.ppf(0.95, 3, 4))
    assert math.isnan(st.ratio_bound_from_resolution(x, 4, math.nan))


# --- many tasks

def brute_force_joint(x: np.ndarray, y: np.ndarray) -> tuple[float, list[float]]:
    """Every relabelling of median-centred runs, with scipy's Levene statistic and its sign."""
    residuals = np.concatenate([x - np.median(x, axis=0), y - np.median(y, axis=0)])
    def signed(a: np.ndarray, b: np.ndarray) -> float:
        sign = np.sign(np.abs(a - np.median(a)).mean() - np.abs(b - np.median(b)).mean())
        return sign * math.sqrt(stats.levene(a, b, center="median").statistic)
    rows = []
    for chosen in itertools.combinations(range(len(residuals)), len(x)):
        other = [i for i in range(len(residuals)) if i not in chosen]
        rows.append([signed(residuals[list(chosen), k], residuals[other, k]) for k in range(x.shape[1])])
    t = np.array(rows)
    joint = t.mean(axis=1)
    return float(np.mean(joint >= joint[0] - 1e-9)), [float(np.mean(t[:, k] >= t[0, k] - 1e-9)) for k in range(x.shape[1])]


@pytest.mark.parametrize("n,m", [(4, 4), (3, 5), (5, 3)])
def test_permutation_test_agrees_with_brute_force(n, m):
    rng = np.random.default_rng(n)
    x, y = 2 * rng.standard_normal((n, 3)), rng.standard_normal((m, 3))
    ours = st.permutation_spread(x, y, 10_000, 0)
    p, per_task = brute_force_joint(x, y)
    assert ours["exhaustive"] and close(ours["p_value"], p) and np.allclose(ours["per_task_p"], per_task, rtol=TIGHT)
    assert ours["smallest_p"] == 1 / math.comb(n + m, n)


def test_permutation_test_ignores_means_scale_and_order():
    rng = np.random.default_rng(0)
    x, y = 2 * rng.standard_normal((5, 4)), rng.standard_normal((5, 4))
    p = st.permutation_spread(x, y, 1000, 0)["p_value"]
    assert st.permutation_spread(100 * x + 7, 100 * y - 3, 1000, 0)["p_value"] == p
    assert st.permutation_spread(x[::-1], y[[2, 0, 1, 4, 3]], 1000, 0)["p_value"] == p
    assert st.permutation_spread(x[:, ::-1], y[:, ::-1], 1000, 0)["p_value"] == p


def test_sampled_relabellings_approach_all_of_them():
    rng = np.random.default_rng(1)
    x, y = 1.5 * rng.standard_normal((7, 3)), rng.standard_normal((7, 3))
    full, sampled = st.permutation_spread(x, y, 10_000, 0), st.permutation_spread(x, y, 3000, 0)
    assert full["exhaustive"] and not sampled["exhaustive"] and sampled["num_labellings"] == 3001
    # five standard errors of a share estimated from 3,000 draws
    assert abs(full["p_value"] - sampled["p_value"]) < 5 * math.sqrt(0.25 / 3000)


def test_three_seeds_can_never_reach_five_percent():
    rng = np.random.default_rng(2)
    x, y = 1e6 * rng.standard_normal((3, 7)), rng.standard_normal((3, 7))
    result = st.permutation_spread(x, y, 10_000, 0)
    assert result["p_value"] >= result["smallest_p"] == 0.05
    assert st.decide_spread(result["p_value"], result["smallest_p"], 5.0, 9.0, 0.05, 1.5) == st.INCONCLUSIVE
    # nor may a tight upper bound decide it
    assert st.decide_spread(1.0, result["smallest_p"], -9.0, -5.0, 0.05, 1.5) == st.INCONCLUSIVE


def test_tasks_without_spread_are_left_out_of_the_joint_test():
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((4, 2)), rng.standard_normal((4, 2))
    flat = np.full((4, 1), 0.25)
    with_flat = st.permutation_spread(np.hstack([x, flat]), np.hstack([y, flat]), 1000, 0)
    assert with_flat["p_value"] == st.permutation_spread(x, y, 1000, 0)["p_value"]
    assert with_flat["tasks_used"] == 2 and math.isnan(with_flat["per_task_p"][2])
    assert math.isnan(st.permutation_spread(flat, flat, 1000, 0)["p_value"])
    one_sided = st.permutation_spread(x[:, :1], flat, 1000, 0)  # the reference arm never moved: as extreme as it gets
    assert one_sided["p_value"] < 0.2
    with pytest.raises(ValueError):
        st.permutation_spread(x[:2], y, 1000, 0)


def test_log_variance_contrast_is_a_jackknife():
    rng = np.random.default_rng(4)
    x, y = 2 * rng.standard_normal((6, 3)), rng.standard_normal((5, 3))
    def jackknife(a: np.ndarray) -> tuple[float, float]:
        left = np.array([np.log(np.delete(a, i, 0).var(0, ddof=1)).mean() for i in range(len(a))])
        return np.log(a.var(0, ddof=1)).mean(), (len(a) - 1) / len(a) * ((left - left.mean()) ** 2).sum()
    (ex, vx), (ey, vy) = jackknife(x), jackknife(y)
    ours = st.log_variance_contrast([x, y], [1, -1])
    assert close(ours["estimate"], ex - st.log_variance_bias(6) - ey + st.log_variance_bias(5)) and close(ours["se"], math.sqrt(vx + vy))
    scaled = st.log_variance_contrast([3 * x + 1, y], [1, -1])
    assert close(scaled["estimate"], ours["estimate"] + math.log(9)) and close(scaled["se"], ours["se"])
    assert ours["low"] < ours["lower_bound"] < ours["estimate"] < ours["upper_bound"] < ours["high"]
    with pytest.raises(ValueError):
        st.log_variance_contrast([x, np.ones((5, 3))], [1, -1])


def test_log_variance_bias_is_the_mean_of_log_chi_square():
    for n in (3, 5, 10):
        direct = stats.chi2(n - 1).expect(lambda v: math.log(v / (n - 1)))
        assert st.log_variance_bias(n) == pytest.approx(direct, rel=1e-6)


# --- evaluation noise

def test_evaluation_noise_is_the_residual_mean_square_of_a_two_way_anova():
    import pandas as pd
    import statsmodels.formula.api as smf
    rng = np.random.default_rng(5)
    scores = rng.integers(0, 2, (4, 5, 3)).astype(float)
    squares, df = 0.0, 0
    for problem in range(5):
        table = pd.DataFrame([(r, d, scores[r, problem, d]) for r in range(4) for d in range(3)], columns=["run", "draw", "y"])
        fit = smf.ols("y ~ C(run) + C(draw)", table).fit()
        squares, df = squares + fit.ssr, df + int(fit.df_resid)
    ours = st.evaluation_noise(scores)
    assert close(ours["interaction_mean_square"], squares / df) and ours["df"] == df
    assert close(ours["noise_variance"], squares / df / 15)


def test_noise_removal_recovers_what_was_planted_and_own_variance_does_not():
    # Runs share half of their randomness: what a run alone calls its sampling variance is about twice what separates runs.
    data = st.simulate_scores("normal", 6, 6, 400, 1.0, 11)
    y = data["delta_j"][:, 6:, 0]
    planted = data["true_score"][:, 6:, 0].var(axis=1, ddof=1).mean()
    moment = np.mean([st.between_run_variance(v, s) for v, s in zip(y, data["noise_variance"][:, 1, 0])])
    wrong = np.mean([st.sample_variance(v) - s for v, s in zip(y, data["own_variance"][:, 1, 0])])
    # relative standard error of a mean of 400 variances with 5 degrees of freedom: sqrt(2/5/400) = 3.2 %, times 1.5 for the noise removed
    assert moment == pytest.approx(planted, rel=0.1)
    assert wrong < 0.85 * planted
    assert data["own_variance"][:, 1, 0].mean() > 1.3 * data["noise_variance"][:, 1, 0].mean()


def test_one_draw_or_one_run_gives_no_noise_estimate():
    assert math.isnan(st.evaluation_noise(np.ones((3, 4, 1)))["noise_variance"])
    assert math.isnan(st.evaluation_noise(np.ones((1, 4, 2)))["noise_variance"])
    with pytest.raises(ValueError):
        st.evaluation_noise(np.ones((3, 4)))


def restricted_likelihood(tau2: float, y: np.ndarray, v: np.ndarray) -> float:
    w = 1 / (v + tau2)
    mu = (w * y).sum() / w.sum()
    return 0.5 * (np.log(w).sum() - np.log(w.sum()) - (w * (y - mu) ** 2).sum())


@pytest.mark.parametrize("seed", range(5))
def test_reml_maximises_the_restricted_likelihood(seed):
    rng = np.random.default_rng(seed)
    v = rng.uniform(0.5, 2, 8)
    y = rng.standard_normal(8) * np.sqrt(v + 1.0)
    best = optimize.minimize_scalar(lambda t: -restricted_likelihood(t, y, v), bounds=(0, 50), method="bounded", options={"xatol": 1e-10}).x
    assert st.reml_variance(y, v) == pytest.approx(best, abs=2e-5)  # bounded search resolves a flat top to about the root of its tolerance


def test_reml_with_equal_noise_is_the_cut_moment_estimate():
    x, _ = arms(6)
    s2 = st.sample_variance(x)
    assert close(st.reml_variance(x, np.full(6, 0.3 * s2)), 0.7 * s2)
    assert st.reml_variance(x, np.full(6, 2 * s2)) == 0.0


def test_q_profile_agrees_with_paule_mandel_and_its_definition():
    from statsmodels.stats.meta_analysis import combine_effects
    rng = np.random.default_rng(7)
    v = rng.uniform(0.5, 2, 9)
    y = 4 * rng.standard_normal(9)
    theirs = combine_effects(y, v, method_re="iterated")
    assert st.solve_q(y, v, 8.0) == pytest.approx(theirs.tau2, rel=1e-4)  # statsmodels stops its iteration at 1e-5
    low, high = st.q_profile_interval(y, v)
    for tau2, quantile in ((low, 0.975), (high, 0.025)):
        w = 1 / (v + tau2)
        assert close((w * (y - (w * y).sum() / w.sum()) ** 2).sum(), stats.chi2.ppf(quantile, 8))


# --- components

def test_balanced_components_agree_with_reml_of_a_mixed_model():
    import pandas as pd
    import statsmodels.formula.api as smf
    rng = np.random.default_rng(8)
    groups = [2 * rng.standard_normal() + rng.standard_normal(4) for _ in range(12)]
    table = pd.DataFrame([(i, v) for i, g in enumerate(groups) for v in g], columns=["seed", "y"])
    fit = smf.mixedlm("y ~ 1", table, groups="seed").fit(reml=True, method=["powell", "lbfgs"])
    ours = st.nested_components(groups)
    # In balanced data the two coincide when positive; the tolerance is that of the optimiser.
    assert ours["seed"] == pytest.approx(float(fit.cov_re.iloc[0, 0]), rel=1e-3)
    assert ours["float_noise"] == pytest.approx(fit.scale, rel=1e-3)
    f = stats.f_oneway(*groups)
    assert close(ours["f_statistic"], f.statistic) and close(ours["p_value"], f.pvalue)


def test_unbalanced_components_recover_what_was_planted():
    found = st.calibrate_decompositions(600, 3)
    for name, part in found["nested"].items():
        # mean of 600 estimates; the seed part has a standard error of about 3.5 % of its value
        assert part["mean_estimate"] == pytest.approx(part["planted"], rel=0.12), name
    for name, part in found["factorial"].items():
        assert part["mean_estimate"] == pytest.approx(part["planted"], abs=0.003), name
        assert 0.92 <= part["coverage"] <= 0.98, name


def test_no_replicates_no_components():
    assert math.isnan(st.nested_components([[1.0], [2.0], [4.0]])["seed"])
    assert math.isnan(st.nested_components([[1.0, 2.0]])["seed"])


def test_contrast_agrees_with_heteroscedastic_regression():
    import statsmodels.api as sm
    rng = np.random.default_rng(9)
    cells = [m + s * rng.standard_normal(k) for m, s, k in ((0.1, 1, 5), (0.3, 2, 4), (0.0, 1.5, 6), (0.2, 0.5, 5))]
    design = np.repeat(np.eye(4), [len(c) for c in cells], axis=0)
    fit = sm.OLS(np.concatenate(cells), design).fit(cov_type="HC2")
    for signs in st.FACTORIAL_EFFECTS.values():
        ours = st.contrast(cells, signs)
        assert close(ours["estimate"], float(fit.params @ np.array(signs))) and close(ours["se"], float(fit.t_test(np.array(signs)).sd.item()))
    two = st.contrast(cells[:2], (1, -1))
    assert close(two["p_value"], stats.ttest_ind(*cells[:2], equal_var=False).pvalue)


# --- power

def test_welch_power_agrees_with_statsmodels_at_equal_variances():
    from statsmodels.stats.power import TTestIndPower
    for n, effect in ((5, 1.0), (10, 0.7)):
        theirs = TTestIndPower().power(effect_size=effect, nobs1=n, alpha=0.05, ratio=1, alternative="two-sided")
        assert st.welch_power(effect * 0.02, 0.02, 0.02, n, n) == pytest.approx(theirs, rel=1e-6)
    d = st.smallest_difference(0.02, 0.03, 5, 6)
    assert st.welch_power(d, 0.02, 0.03, 5, 6) == pytest.approx(0.8, abs=1e-6)


def test_equivalence_power_agrees_with_simulation():
    rng = np.random.default_rng(10)
    hits = sum(st.tost_welch(0.03 * rng.standard_normal(6), 0.03 * rng.standard_normal(6), 0.05)["p_value"] < 0.05 for _ in range(3000))
    # 4 standard errors of the simulated share; the formula fixes the Welch df at its value for the true variances
    assert st.tost_power(0.05, 0.03, 0.03, 6, 6) == pytest.approx(hits / 3000, abs=4 * math.sqrt(0.25 / 3000))
    margin = st.smallest_margin(0.03, 0.03, 6, 6)
    assert st.tost_power(margin, 0.03, 0.03, 6, 6) == pytest.approx(0.8, abs=1e-4)
    needed = st.seeds_for_margin(0.05, 0.03, 0.03)
    assert st.tost_power(0.05, 0.03, 0.03, needed, needed) >= 0.8 > st.tost_power(0.05, 0.03, 0.03, needed - 1, needed - 1)


def test_f_power_agrees_with_simulation_and_its_inverse():
    rng = np.random.default_rng(11)
    x, y = math.sqrt(5) * rng.standard_normal((4000, 8)), rng.standard_normal((4000, 8))
    share = np.mean(stats.f.sf(x.var(1, ddof=1) / y.var(1, ddof=1), 7, 7) < 0.05)
    assert st.f_power(5, 8, 8) == pytest.approx(share, abs=4 * math.sqrt(0.25 / 4000))
    assert st.f_power(st.smallest_ratio_f(8, 8), 8, 8) == pytest.approx(0.8)


def test_power_of_the_spread_rule_is_that_of_the_shipped_functions():
    rng = np.random.default_rng(12)
    hits, studies = 0, 150
    for s in range(studies):
        x, y = math.sqrt(5) * rng.standard_normal((5, 4)), rng.standard_normal((5, 4))
        test, effect = st.permutation_spread(x, y, 10_000, s), st.log_variance_contrast([x, y], [1, -1])
        hits += st.decide_spread(test["p_value"], test["smallest_p"], effect["lower_bound"], effect["upper_bound"], 0.05, 1.5) == st.SUPPORTED
    power = st.spread_rule_power(5.0, 5, 5, 4, 0.0)
    assert power == pytest.approx(hits / studies, abs=4 * math.sqrt(0.25 / studies + 0.25 / st.POWER_STUDIES))
    assert st.spread_rule_power(1.0, 5, 5, 4, 0.0) < power < st.spread_rule_power(50.0, 5, 5, 4, 0.0)
    assert st.spread_rule_power(100.0, 3, 3, 4, 0.0) == 0.0 and math.isnan(st.smallest_spread_ratio(3, 3, 4, 0.0))


def test_first_finds_the_first():
    assert [st._first(5, lambda i, k=k: i >= k) for k in range(6)] == [0, 1, 2, 3, 4, None]


# --- decisions and calibration

def test_equal_means_need_both_arms_above_zero():
    good, flat = np.array([0.06, 0.061, 0.059, 0.06]), np.array([0.01, -0.01, 0.02, -0.02])
    def decide(x, y):
        return st.decide_equal_means(st.tost_welch(x, y, 0.05), (x, y), 0.05, 0.05)
    assert decide(good, good + 0.001) == st.SUPPORTED
    assert decide(flat, flat + 0.001) == st.INCONCLUSIVE          # equal, but nothing was learned
    assert decide(-good, -good) == st.NOT_SUPPORTED               # equal, and worse than before
    assert decide(good + 0.2, good) == st.NOT_SUPPORTED


def test_all_of_never_supports_an_empty_set():
    assert st.all_of([]) == st.INCONCLUSIVE
    assert st.all_of([st.SUPPORTED, st.INCONCLUSIVE]) == st.INCONCLUSIVE
    assert st.all_of([st.NOT_SUPPORTED, st.INCONCLUSIVE]) == st.NOT_SUPPORTED


def test_a_calibration_cell_holds_its_level_and_the_older_rule_does_not():
    cell = st.calibrate_cell("normal", 5, 150, 199, seed=5)
    # 150 studies: five in a hundred plus 3.5 standard errors
    limit = 0.05 + 3.5 * math.sqrt(0.05 * 0.95 / 150)
    assert all(v <= limit for v in cell["false_supported"].values()), cell["false_supported"]
    assert cell["shown_beside"]["seed rule H2 false"] > 0.2
    assert cell["power"]["20"]["H2"] > 0.8


def test_three_seeds_never_support_h2_in_simulation():
    cell = st.calibrate_cell("skewed", 3, 20, 199, seed=6)
    assert cell["false_supported"]["H2 false"] == 0 and all(p["H2"] == 0 for p in cell["power"].values())


def test_command_without_a_task_is_a_bad_request():
    done = subprocess.run([sys.executable, "utils_stats.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--calibrate" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_calibrate_command_writes_its_tables(tmp_path):
    done = subprocess.run([sys.executable, "utils_stats.py", "--calibrate", "--num_studies", "10", "--output_path", str(tmp_path / "c.json")],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.json").is_file() and "| normal | 3 |" in (tmp_path / "c.md").read_text()
