"""Statistics of a study with few seeds: equivalence, spread, permutation, noise removal, variance components, power.

Every function takes plain arrays of per-run values and returns floats or small dicts; nothing here knows a file or a model.
Undefined quantities are NaN here (``analyze_results.py`` writes them as null with a reason). Convention for two arms: ``x`` is the
arm under test (say bf16), ``y`` the reference (say fp32); differences are x - y and ratios x / y. A matrix of values is
(runs, tasks).

    python utils_stats.py --calibrate                       # all cells, 2,000 simulated studies each (about 25 minutes on one core)
    python utils_stats.py --calibrate --num_studies 200     # a look, about 3 minutes
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Leave-one-out needs a variance of what is left: two values.
MIN_RUNS_FOR_SPREAD = 3
# A sum of squares below this share of the values' own scale is rounding of float64, not spread.
ZERO_VARIANCE_RELATIVE = 1e-24
# Rows of permuted matrices held at once; bounds memory to about 100 MB at 400 runs x 8 tasks.
PERMUTATION_CHUNK = 2000
# Simulated data sets behind one quantile of the jackknife pivot; its own error is then about 0.3 % coverage.
PIVOT_SIMULATIONS = 20_000
# From this many runs an arm on, Student's t replaces the simulated quantile (they differ by less than 2 %).
PIVOT_MAX_RUNS = 40


# --------------------------------------------------------------------------------------------------------------------
# One and two samples: means

def _values(x: ArrayLike, name: str = "values", minimum: int = 1) -> Array:
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 1 or x.size < minimum:
        raise ValueError(f"{name}: expected at least {minimum} numbers in one dimension, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"{name}: not finite")
    return x


def sample_variance(x: ArrayLike) -> float:
    """Variance with ddof 1; exactly 0 when the values are equal up to float64 rounding of their mean."""
    x = _values(x, minimum=2)
    variance = float(np.var(x, ddof=1))
    scale = float(np.max(np.abs(x)))
    return 0.0 if variance <= ZERO_VARIANCE_RELATIVE * scale * scale else variance


def mean_interval(x: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Student t interval of the mean. Returns (nan, nan) for fewer than two values."""
    from scipy import stats
    x = _values(x)
    if x.size < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.5 + level / 2, x.size - 1)) * math.sqrt(sample_variance(x) / x.size)
    return float(x.mean()) - half, float(x.mean()) + half


def mean_above(x: ArrayLike, value: float = 0.0) -> float:
    """p of the one-sided t test of mean(x) > value (small p: it is above). NaN for fewer than two values."""
    x = _values(x)
    return math.nan if x.size < 2 else _t_p_greater(float(x.mean()) - value, math.sqrt(sample_variance(x) / x.size), x.size - 1)


def _t_p_greater(difference: float, se: float, df: float) -> float:
    """P(T_df >= difference / se). With se = 0 the data hold no noise: 0, 0.5 or 1 by the sign of the difference."""
    from scipy import stats
    if se == 0:
        return 0.0 if difference > 0 else 1.0 if difference < 0 else 0.5
    return float(stats.t.sf(difference / se, df))


def welch(x: ArrayLike, y: ArrayLike, level: float = 0.95) -> dict[str, float]:
    """Welch's t test of mean(x) - mean(y).

    Args:    x, y: per-run values, at least two each. level: of the two-sided interval.
    Returns: difference, se, df, t_statistic, p_value (two-sided), low, high. With zero variance in both: df, t_statistic and p_value
             are NaN unless the means differ (then t is infinite, reported as NaN, and p is 0).
    Source:  Welch 1947; same as scipy.stats.ttest_ind(x, y, equal_var=False).
    """
    from scipy import stats
    x, y = _values(x, "x", 2), _values(y, "y", 2)
    vx, vy = sample_variance(x) / x.size, sample_variance(y) / y.size
    difference, se = float(x.mean() - y.mean()), math.sqrt(vx + vy)
    if se == 0:
        return {"difference": difference, "se": 0.0, "df": math.nan, "t_statistic": math.nan,
                "p_value": 0.0 if difference != 0 else math.nan, "low": difference, "high": difference}
    df = (vx + vy) ** 2 / (vx**2 / (x.size - 1) + vy**2 / (y.size - 1))
    half = float(stats.t.ppf(0.5 + level / 2, df)) * se
    return {"difference": difference, "se": se, "df": df, "t_statistic": difference / se,
            "p_value": float(2 * stats.t.sf(abs(difference / se), df)), "low": difference - half, "high": difference + half}


def student_p(x: ArrayLike, y: ArrayLike) -> float:
    """Two-sided p of Student's pooled t test, NaN when both variances are zero."""
    from scipy import stats
    x, y = _values(x, "x", 2), _values(y, "y", 2)
    df = x.size + y.size - 2
    pooled = ((x.size - 1) * sample_variance(x) + (y.size - 1) * sample_variance(y)) / df
    if pooled == 0:
        return math.nan
    t = float(x.mean() - y.mean()) / math.sqrt(pooled * (1 / x.size + 1 / y.size))
    return float(2 * stats.t.sf(abs(t), df))


def tost_welch(x: ArrayLike, y: ArrayLike, margin: float, alpha: float = 0.05) -> dict[str, float]:
    """Two one-sided Welch tests of |mean(x) - mean(y)| < margin.

    Args:    margin: > 0, in the unit of x.
    Returns: p_value (the larger of the two one-sided p), p_lower (difference > -margin), p_upper (difference < margin), low and high of the
             1 - 2 alpha interval, difference, se, df. Equivalent at level alpha iff p_value < alpha iff the interval lies inside.
    Source:  Schuirmann 1987; same as statsmodels.stats.weightstats.ttost_ind(usevar="unequal").
    """
    test = welch(x, y, 1 - 2 * alpha)
    p_lower = _t_p_greater(test["difference"] + margin, test["se"], test["df"])
    p_upper = _t_p_greater(margin - test["difference"], test["se"], test["df"])
    return {"margin": margin, "p_value": max(p_lower, p_upper), "p_lower": p_lower, "p_upper": p_upper,
            **{k: test[k] for k in ("difference", "se", "df", "low", "high")}}


def tost_paired(differences: ArrayLike, margin: float, alpha: float = 0.05) -> dict[str, float]:
    """Two one-sided paired t tests of |mean difference| < margin, on differences matched by seed. Returns as tost_welch.

    Source: Schuirmann 1987; same as statsmodels.stats.weightstats.ttost_paired.
    """
    d = _values(differences, "differences", 2)
    mean, se = float(d.mean()), math.sqrt(sample_variance(d) / d.size)
    low, high = mean_interval(d, 1 - 2 * alpha)
    p_lower, p_upper = _t_p_greater(mean + margin, se, d.size - 1), _t_p_greater(margin - mean, se, d.size - 1)
    return {"margin": margin, "p_value": max(p_lower, p_upper), "p_lower": p_lower, "p_upper": p_upper, "difference": mean,
            "se": se, "df": float(d.size - 1), "low": low, "high": high}


def tost_ratio_of_means(x: ArrayLike, y: ArrayLike, ratio_margin: float) -> dict[str, float]:
    """Two one-sided tests of 1/ratio_margin < mean(x)/mean(y) < ratio_margin on the raw scale, for a positive mean(y).

    Each side is a Welch test of a linear contrast (mean(x) - theta mean(y)), so no logarithm is taken and values may be negative.

    Returns: p_value, p_lower, p_upper, ratio (NaN where mean(y) <= 0; then no test either, p NaN).
    Source:  Sasabuchi 1988; Hauschke, Kieser and Hothorn 1999 (unequal variances).
    """
    x, y = _values(x, "x", 2), _values(y, "y", 2)
    if y.mean() <= 0:
        return {"margin": ratio_margin, "p_value": math.nan, "p_lower": math.nan, "p_upper": math.nan, "ratio": math.nan}
    def p_above(theta: float, sign: float) -> float:
        vx, vy = sample_variance(x) / x.size, theta**2 * sample_variance(y) / y.size
        df = (vx + vy) ** 2 / (vx**2 / (x.size - 1) + vy**2 / (y.size - 1)) if vx + vy > 0 else math.nan
        return _t_p_greater(sign * float(x.mean() - theta * y.mean()), math.sqrt(vx + vy), df)
    p_lower, p_upper = p_above(1 / ratio_margin, 1.0), p_above(ratio_margin, -1.0)
    return {"margin": ratio_margin, "p_value": max(p_lower, p_upper), "p_lower": p_lower, "p_upper": p_upper,
            "ratio": float(x.mean() / y.mean())}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values, in the order given; NaN entries stay NaN and are not counted as tests.

    Source: Holm 1979; same as statsmodels.stats.multitest.multipletests(method="holm").
    """
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(p.shape, math.nan)
    valid = np.flatnonzero(~np.isnan(p))
    running = 0.0
    for rank, index in enumerate(valid[np.argsort(p[valid], kind="stable")]):
        running = max(running, min(1.0, (valid.size - rank) * float(p[index])))
        adjusted[index] = running
    return [float(a) for a in adjusted]


# --------------------------------------------------------------------------------------------------------------------
# Spread of one task

def variance_interval(x: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Chi-square interval of a variance (exact for normal values only); (nan, nan) for fewer than two values."""
    from scipy import stats
    x = _values(x)
    if x.size < 2:
        return math.nan, math.nan
    sum_squares, df = sample_variance(x) * (x.size - 1), x.size - 1
    return float(sum_squares / stats.chi2.ppf(0.5 + level / 2, df)), float(sum_squares / stats.chi2.ppf(0.5 - level / 2, df))


def f_test(x: ArrayLike, y: ArrayLike, level: float = 0.95) -> dict[str, float]:
    """F test of var(x) against var(y), ddof 1. Exact for normal values only: its size breaks with skewed or heavy-tailed ones.

    Returns: f_statistic = var(x)/var(y), p_value_greater (var(x) > var(y)), p_value_two_sided, low and high of the ratio's interval,
             lower_bound (one-sided, at ``level``). All NaN where var(y) = 0.
    Source:  Snedecor and Cochran; scipy.stats.f.
    """
    from scipy import stats
    x, y = _values(x, "x", 2), _values(y, "y", 2)
    vx, vy = sample_variance(x), sample_variance(y)
    if vy == 0:
        return dict.fromkeys(("f_statistic", "p_value_greater", "p_value_two_sided", "low", "high", "lower_bound"), math.nan)
    ratio, dof = vx / vy, (x.size - 1, y.size - 1)
    greater, less = float(stats.f.sf(ratio, *dof)), float(stats.f.cdf(ratio, *dof))
    return {"f_statistic": ratio, "p_value_greater": greater, "p_value_two_sided": min(1.0, 2 * min(greater, less)),
            "low": ratio / float(stats.f.ppf(0.5 + level / 2, *dof)), "high": ratio / float(stats.f.ppf(0.5 - level / 2, *dof)),
            "lower_bound": ratio / float(stats.f.ppf(level, *dof))}


def ratio_bound_from_resolution(x: ArrayLike, n_reference: int, resolution: float, level: float = 0.95) -> float:
    """One-sided lower bound of var(x)/var(y) when all ``n_reference`` values of y are recorded as equal.

    A score is a multiple of ``resolution`` (1 / (problems x draws)), so equal recorded values can hide a spread of at most half a step to
    either side; the largest sample variance this allows replaces the zero denominator, and the F quantile does the rest.

    Returns: the bound, NaN where resolution is not known (0 or NaN) or an arm has fewer than two runs.
    """
    from scipy import stats
    x = _values(x)
    if x.size < 2 or n_reference < 2 or not resolution > 0:
        return math.nan
    half = n_reference // 2  # half of the values at one end of the step, half at the other: the largest sum of squares
    largest = resolution**2 * half * (n_reference - half) / n_reference / (n_reference - 1)
    return float(sample_variance(x) / largest / stats.f.ppf(level, x.size - 1, n_reference - 1))


def brown_forsythe(x: ArrayLike, y: ArrayLike) -> dict[str, float]:
    """Brown-Forsythe test of equal spread: a t test on distances from the arm's own median.

    Returns: signed_t (positive: x spreads more), f_statistic = signed_t^2, p_value_two_sided, p_value_greater. NaN where no distance
             varies within an arm.
    Source:  Brown and Forsythe 1974; f_statistic is scipy.stats.levene(x, y, center="median").
    """
    from scipy import stats
    x, y = _values(x, "x", 2), _values(y, "y", 2)
    t = float(_signed_brown_forsythe((x - np.median(x))[None, None], (y - np.median(y))[None, None])[0, 0])
    if not math.isfinite(t):
        return dict.fromkeys(("signed_t", "f_statistic", "p_value_two_sided", "p_value_greater"), math.nan)
    df = x.size + y.size - 2
    return {"signed_t": t, "f_statistic": t * t, "p_value_two_sided": float(2 * stats.t.sf(abs(t), df)),
            "p_value_greater": float(stats.t.sf(t, df))}


def pitman_morgan(x: ArrayLike, y: ArrayLike) -> dict[str, float]:
    """Pitman-Morgan test of equal variances of values paired by seed: the correlation of sums and differences.

    Returns: correlation, t_statistic, p_value_greater (var(x) > var(y)), p_value_two_sided. NaN for fewer than three pairs or where
             the sum or the difference is constant.
    Source:  Pitman 1939, Morgan 1939; scipy.stats.pearsonr(x + y, x - y).
    """
    from scipy import stats
    x, y = _values(x, "x"), _values(y, "y")
    if x.size != y.size:
        raise ValueError(f"pairs: got {x.size} and {y.size} values")
    undefined = dict.fromkeys(("correlation", "t_statistic", "p_value_greater", "p_value_two_sided"), math.nan)
    if x.size < 3 or sample_variance(x + y) == 0 or sample_variance(x - y) == 0:
        return undefined
    r = float(np.clip(np.corrcoef(x + y, x - y)[0, 1], -1, 1))
    df = x.size - 2
    if 1 - r * r <= 0:
        return {**undefined, "correlation": r, "p_value_greater": 0.0 if r > 0 else 1.0, "p_value_two_sided": 0.0}
    t = r * math.sqrt(df / (1 - r * r))
    return {"correlation": r, "t_statistic": t, "p_value_greater": float(stats.t.sf(t, df)),
            "p_value_two_sided": float(2 * stats.t.sf(abs(t), df))}


def bootstrap_variance_ratio(x: ArrayLike, y: ArrayLike, num_resamples: int, seed: int, level: float = 0.95) -> dict[str, float]:
    """Bootstrap of the variance ratio, runs drawn anew within each arm. Shown for comparison: too narrow with few seeds.

    Returns: p_value_greater (null: both arms' residuals scaled to one common variance), low and high of the percentile interval of
             var(x)/var(y). NaN where an arm has fewer than three runs or no spread.
    """
    x, y = _values(x, "x", 2), _values(y, "y", 2)
    vx, vy = sample_variance(x), sample_variance(y)
    if min(x.size, y.size) < MIN_RUNS_FOR_SPREAD or vx == 0 or vy == 0:
        return dict.fromkeys(("p_value_greater", "low", "high"), math.nan)
    rng = np.random.default_rng(seed)
    sx = x[rng.integers(0, x.size, (num_resamples, x.size))].var(axis=1, ddof=1)
    sy = y[rng.integers(0, y.size, (num_resamples, y.size))].var(axis=1, ddof=1)
    usable = (sx > 0) & (sy > 0)
    if not usable.any():
        return dict.fromkeys(("p_value_greater", "low", "high"), math.nan)
    log_ratio = np.log(sx[usable]) - np.log(sy[usable])
    observed = math.log(vx / vy)
    # Under the null the residuals are rescaled to equal variances, which shifts each resampled log ratio by -observed.
    p = (1 + int((log_ratio - observed >= observed).sum())) / (1 + log_ratio.size)
    low, high = np.quantile(log_ratio, [0.5 - level / 2, 0.5 + level / 2])
    return {"p_value_greater": p, "low": float(np.exp(low)), "high": float(np.exp(high))}


# --------------------------------------------------------------------------------------------------------------------
# Spread over many tasks: whole runs relabelled

def smallest_attainable_p(n_x: int, n_y: int, num_resamples: int) -> float:
    """Smallest p a one-sided permutation test can give: 1 / number of labellings, or 1 / (resamples + 1) where they are sampled."""
    labellings = math.comb(n_x + n_y, n_x)
    return 1 / labellings if labellings <= num_resamples else 1 / (num_resamples + 1)


def relabellings(n_x: int, n_y: int, num_resamples: int, seed: int) -> NDArray[np.int64]:
    """Rows of run indices; the first n_x of a row are labelled x. Row 0 is the labelling observed.

    All labellings where there are at most ``num_resamples`` of them, else the observed one and ``num_resamples`` random ones.
    """
    total = n_x + n_y
    if math.comb(total, n_x) <= num_resamples:
        chosen = np.array(list(itertools.combinations(range(total), n_x)), dtype=np.int64)
        is_x = np.zeros((len(chosen), total), dtype=bool)
        np.put_along_axis(is_x, chosen, True, axis=1)
        return np.argsort(~is_x, axis=1, kind="stable")  # combinations() starts with 0..n_x-1: the observed labelling
    rng = np.random.default_rng(seed)
    rows = rng.permuted(np.tile(np.arange(total), (num_resamples + 1, 1)), axis=1)
    rows[0] = np.arange(total)
    return rows


def _distance_sums(values: Array) -> tuple[Array, Array]:
    """Sum of |v - median| and of (v - median)^2 over the last axis."""
    n = values.shape[-1]
    ordered = np.sort(values, axis=-1)
    median = 0.5 * (ordered[..., (n - 1) // 2] + ordered[..., n // 2])
    absolute = ordered[..., (n + 1) // 2:].sum(-1) - ordered[..., :n // 2].sum(-1)
    square = (ordered * ordered).sum(-1) - 2 * median * ordered.sum(-1) + n * median * median
    return absolute, np.maximum(square, 0)


def _signed_brown_forsythe(x: Array, y: Array) -> Array:
    """Signed square root of the Brown-Forsythe statistic over the last axis; +-inf or 0 where no distance varies within arms."""
    n, m = x.shape[-1], y.shape[-1]
    (ax, qx), (ay, qy) = _distance_sums(x), _distance_sums(y)
    difference = ax / n - ay / m
    within = qx - ax * ax / n + qy - ay * ay / m
    scale = qx + qy
    within = np.where(within <= 1e-12 * scale, 0.0, within)  # float64 cancellation of sums of squares, not spread
    difference = np.where(np.abs(difference) <= 1e-12 * np.sqrt(scale), 0.0, difference)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = difference / np.sqrt(within / (n + m - 2) * (1 / n + 1 / m))
    return np.where(np.isnan(t), 0.0, t)


def permutation_spread(x: ArrayLike, y: ArrayLike, num_resamples: int, seed: int) -> dict[str, Any]:
    """Joint one-sided test that runs of x spread more than runs of y, over all tasks at once.

    Each task's values are centred at their arm's median (means may differ), whole runs are relabelled (so tasks of one run stay together
    and their correlation is kept), each task's signed Brown-Forsythe statistic is computed anew, and the mean over tasks is compared.

    Args:    x: (n, K), y: (m, K) float, n and m at least 3. num_resamples: random relabellings unless all can be enumerated.
    Returns: statistic (mean signed t), p_value, per_task_p (K floats, NaN where a task has no spread in either arm), tasks_used,
             smallest_p, exhaustive, num_labellings. p_value is NaN where no task has spread.
    Raises:  ValueError for fewer than three runs or different numbers of tasks.
    Source:  Brown and Forsythe 1974; Manly 2007 (residual permutation); Pesarin and Salmaso 2010 (combination over variables).
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < MIN_RUNS_FOR_SPREAD:
        raise ValueError(f"expected (runs >= {MIN_RUNS_FOR_SPREAD}, tasks) in both arms, got {x.shape} and {y.shape}")
    used = np.array([sample_variance(x[:, k]) > 0 or sample_variance(y[:, k]) > 0 for k in range(x.shape[1])], dtype=bool)
    labellings = math.comb(len(x) + len(y), len(x))
    result: dict[str, Any] = {"statistic": math.nan, "p_value": math.nan, "per_task_p": [math.nan] * x.shape[1],
                              "tasks_used": int(used.sum()), "smallest_p": smallest_attainable_p(len(x), len(y), num_resamples),
                              "exhaustive": labellings <= num_resamples, "num_labellings": min(labellings, num_resamples + 1)}
    if not used.any():
        return result
    residuals = np.concatenate([x - np.median(x, axis=0), y - np.median(y, axis=0)])[:, used].T   # (K, runs)
    rows = relabellings(len(x), len(y), num_resamples, seed)
    chunk = max(1, PERMUTATION_CHUNK * 3200 // (residuals.size or 1))
    t = np.concatenate([_signed_brown_forsythe(residuals[:, part[:, :len(x)]], residuals[:, part[:, len(x):]])
                        for part in np.array_split(rows, max(1, -(-len(rows) // chunk)))], axis=1)   # (K, labellings)
    # An infinite statistic (no spread left within either arm) is more extreme than any finite one but must not make a mean undefined.
    finite = np.abs(t[np.isfinite(t)])
    t = np.clip(t, -1e3 * (1 + finite.max(initial=0)), 1e3 * (1 + finite.max(initial=0)))
    joint = t.mean(axis=0)
    result["statistic"], result["p_value"] = float(joint[0]), _share_as_extreme(joint)
    for k, row in zip(np.flatnonzero(used), t):
        result["per_task_p"][k] = _share_as_extreme(row)
    return result


def _share_as_extreme(statistics: Array) -> float:
    """Share of labellings with a statistic at least the observed one (entry 0, itself counted); ties up to float rounding count."""
    return float(np.mean(statistics >= statistics[0] - 1e-9 * (1 + abs(statistics[0]))))


# --------------------------------------------------------------------------------------------------------------------
# Spread over many tasks: size of the effect, with an interval

def log_variance_bias(n: int) -> float:
    """E[log s^2] - log sigma^2 of n normal values (ddof 1): digamma((n-1)/2) - log((n-1)/2)."""
    from scipy import special
    return float(special.digamma((n - 1) / 2) - math.log((n - 1) / 2))


def _jackknife_log_variance(x: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted sum over tasks of log s^2 and its jackknife variance, over the axes (..., runs, tasks)."""
    n = x.shape[-2]
    centred = x - x.mean(axis=-2, keepdims=True)
    squares = centred * centred
    total = squares.sum(axis=-2)
    left = np.maximum(total[..., None, :] - squares * (n / (n - 1)), 1e-300) / (n - 2)   # variance without run i
    left_out = np.log(left) @ weights
    estimate = np.log(total / (n - 1)) @ weights
    spread = left_out - left_out.mean(axis=-1, keepdims=True)
    return estimate, (n - 1) / n * (spread * spread).sum(axis=-1)


@functools.lru_cache(maxsize=512)
def _pivot_quantiles(n: int, m: int, weights: tuple[float, ...], correlation: float, probabilities: tuple[float, ...]) -> tuple[float, ...]:
    """Quantiles of (estimate - truth) / jackknife error for normal runs of n and m (0: one arm only), tasks equally correlated."""
    rng = np.random.default_rng(20_240_229)  # fixed: a quantile is a constant of the design, not of the study
    w = np.array(weights)
    size = min(PIVOT_SIMULATIONS, max(2000, 8_000_000 // ((n + m) * len(w))))
    def arm(runs: int) -> tuple[Array, Array]:
        common = rng.standard_normal((size, runs, 1))
        own = rng.standard_normal((size, runs, len(w)))
        estimate, variance = _jackknife_log_variance(math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own, w)
        return estimate - log_variance_bias(runs) * w.sum(), variance
    estimate, variance = arm(n)
    if m:
        other, other_variance = arm(m)
        estimate, variance = estimate - other, variance + other_variance
    return tuple(float(q) for q in np.quantile(estimate / np.sqrt(variance), probabilities))


def _common_correlation(arms: Sequence[Array]) -> float:
    """Correlation rho >= 0 whose square is the mean squared correlation between tasks, less what chance alone gives, on a grid of 0.1.

    Log variances of two normal tasks correlate by rho^2, whatever its sign, so squares are what is averaged.
    """
    df = sum(len(a) - 1 for a in arms)
    scaled = np.concatenate([(a - a.mean(0)) / np.std(a, axis=0, ddof=1) for a in arms])
    r = scaled.T @ scaled / df
    pairs = r[np.triu_indices(r.shape[0], 1)] ** 2
    if pairs.size == 0 or df < 2:
        return 0.0
    rho_square = (float(pairs.mean()) * df - 1) / (df - 1)
    return min(0.9, round(math.sqrt(max(rho_square, 0.0)), 1))


def log_variance_contrast(arms: Sequence[ArrayLike], signs: Sequence[float], weights: Sequence[float] | None = None,
                          level: float = 0.95) -> dict[str, float]:
    """sum over arms of sign x (weighted sum over tasks of log variance), with a jackknife interval.

    With arms (x, y), signs (1, -1) and weights 1/K it is the mean log variance ratio over K tasks. The standard error is the jackknife
    over runs (robust against kurtosis and correlated tasks); the quantiles of estimate/error come from simulated normal data with this
    number of runs and tasks and this correlation between tasks, so that the interval covers its level there even with three runs.

    Args:    arms: one (runs, K) matrix each, at least three runs, every column with spread. weights: K floats (default 1/K).
    Returns: estimate (less the small-sample bias of log s^2, which cancels between equally large arms), se, low and high (two-sided at
             ``level``), lower_bound and upper_bound (one-sided at ``level``), p_value_greater (of Student's t with the Welch df, for
             display), correlation.
    Raises:  ValueError where a column has no spread or an arm fewer than three runs.
    Source:  Miller 1968 (jackknifing variances); Hall 1992 (bootstrap t).
    """
    from scipy import stats
    mats = [np.asarray(a, dtype=np.float64) for a in arms]
    k = mats[0].shape[1]
    w = np.full(k, 1 / k) if weights is None else np.asarray(weights, dtype=np.float64)
    for a in mats:
        if a.shape[1] != k or len(a) < MIN_RUNS_FOR_SPREAD:
            raise ValueError(f"expected (runs >= {MIN_RUNS_FOR_SPREAD}, {k} tasks) in every arm, got {a.shape}")
        if any(sample_variance(a[:, j]) == 0 for j in range(k)):
            raise ValueError("a task has no spread: its log variance is undefined")
    parts = [_jackknife_log_variance(a, w) for a in mats]
    estimate = float(sum(s * (float(e) - log_variance_bias(len(a)) * w.sum()) for s, (e, _), a in zip(signs, parts, mats)))
    variances = [s * s * float(v) for s, (_, v) in zip(signs, parts)]
    se = math.sqrt(sum(variances))
    df = sum(variances) ** 2 / sum(v * v / (len(a) - 1) for v, a in zip(variances, mats)) if se > 0 else math.nan
    correlation = _common_correlation(mats)
    probabilities = (0.5 - level / 2, 1 - level, level, 0.5 + level / 2)
    sizes = [len(a) for a in mats]
    if max(sizes) <= PIVOT_MAX_RUNS and len(mats) <= 2 and (len(mats) == 1 or signs[0] * signs[1] < 0):
        q = _pivot_quantiles(sizes[0], sizes[1] if len(mats) == 2 else 0, tuple(float(v) for v in w), correlation, probabilities)
    else:
        q = tuple(float(stats.t.ppf(p, df)) for p in probabilities)
    return {"estimate": estimate, "se": se, "df": df, "low": estimate - q[3] * se, "high": estimate - q[0] * se,
            "lower_bound": estimate - q[2] * se, "upper_bound": estimate - q[1] * se,
            "p_value_greater": _t_p_greater(estimate, se, df), "correlation": correlation}


# --------------------------------------------------------------------------------------------------------------------
# Evaluation noise: what of the spread between runs is sampling of answers

def evaluation_noise(scores: ArrayLike) -> dict[str, float]:
    """Variance that the sampling of answers adds to a run's mean score, from runs that share their random numbers.

    Column j of every run used the same random numbers, so what problem i's draw j does to all runs alike moves no run against another.
    The noise between runs is what is left within problems after the effects of run and of draw: the run x draw interaction.

    Args:    scores: (runs, problems, draws) float; same problems in the same order in every run.
    Returns: noise_variance: interaction mean square / (problems x draws), to be subtracted from the variance between runs' means;
             own_sampling_variance: mean over runs of the variance a run alone would state (draws within problems), for comparison;
             interaction_mean_square: mean over problems; df: its degrees of freedom. NaN for one run or one draw.
    Source:  two-way layout without replication within each problem (Scheffe 1959, ch. 4).
    """
    s = np.asarray(scores, dtype=np.float64)
    if s.ndim != 3:
        raise ValueError(f"scores: expected (runs, problems, draws), got shape {s.shape}")
    runs, problems, draws = s.shape
    if draws < 2:
        return dict.fromkeys(("noise_variance", "own_sampling_variance", "interaction_mean_square", "df"), math.nan)
    own = float((s.var(axis=2, ddof=1).mean(axis=1) / (problems * draws)).mean())
    if runs < 2:
        return {"noise_variance": math.nan, "own_sampling_variance": own, "interaction_mean_square": math.nan, "df": math.nan}
    residual = s - s.mean(axis=2, keepdims=True) - s.mean(axis=0, keepdims=True) + s.mean(axis=(0, 2), keepdims=True)
    df = (runs - 1) * (draws - 1)
    mean_square = float((residual * residual).sum() / (df * problems))
    return {"noise_variance": mean_square / (problems * draws), "own_sampling_variance": own,
            "interaction_mean_square": mean_square, "df": float(df * problems)}


def between_run_variance(values: ArrayLike, noise_variance: float) -> float:
    """Moment estimate of the variance between runs with the noise taken out. Not cut at zero, so that it is right on average."""
    return sample_variance(values) - noise_variance


def _weighted(y: Array, v: Array, tau2: float) -> tuple[Array, float, float]:
    """Weights 1/(v + tau2), the weighted mean, and Q = sum of weighted squared deviations."""
    w = 1 / (v + tau2)
    mean = float((w * y).sum() / w.sum())
    return w, mean, float((w * (y - mean) ** 2).sum())


def reml_variance(values: ArrayLike, noise_variances: ArrayLike) -> float:
    """REML estimate (>= 0) of the variance between runs whose means carry known noise variances.

    Args:    values, noise_variances: one per run; the latter positive. With equal ones it is max(0, s^2 - noise).
    Source:  Viechtbauer 2005.
    """
    from scipy import optimize
    y, v = _values(values, minimum=2), np.broadcast_to(np.asarray(noise_variances, dtype=np.float64), np.shape(values))
    if not (v > 0).all():
        raise ValueError("noise variances must be positive")
    def score(tau2: float) -> float:
        w, mean, _ = _weighted(y, v, tau2)
        return float((w * w * (y - mean) ** 2).sum() - w.sum() + (w * w).sum() / w.sum())
    def cost(tau2: float) -> float:
        w, _, q = _weighted(y, v, tau2)
        return float(-np.log(w).sum() + np.log(w.sum()) + q)
    high = 4 * float(np.ptp(y)) ** 2 + float(v.max())
    grid = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 200) * high])
    best = int(np.argmin([cost(t) for t in grid]))
    low_t, high_t = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    if score(low_t) <= 0:
        return float(low_t) if best <= 1 else float(grid[best])
    return float(optimize.brentq(score, low_t, high_t, xtol=1e-18, rtol=1e-14))


def q_profile_interval(values: ArrayLike, noise_variances: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Interval of the variance between runs by inverting the Q statistic; ends below zero are reported as 0.

    Args:    values, noise_variances: one per run; the latter positive.
    Source:  Viechtbauer 2007. Setting Q to its mean instead of a quantile gives the Paule-Mandel estimate.
    """
    from scipy import stats
    y = _values(values, minimum=2)
    quantiles = stats.chi2.ppf([0.5 + level / 2, 0.5 - level / 2], y.size - 1)
    return tuple(solve_q(y, noise_variances, float(q)) for q in quantiles)  # type: ignore[return-value]


def solve_q(values: ArrayLike, noise_variances: ArrayLike, target: float) -> float:
    """The variance between runs at which Q equals ``target``; 0 where Q is below it already without any."""
    from scipy import optimize
    y, v = _values(values, minimum=2), np.broadcast_to(np.asarray(noise_variances, dtype=np.float64), np.shape(values))
    if not (v > 0).all():
        raise ValueError("noise variances must be positive")
    if _weighted(y, v, 0.0)[2] <= target:
        return 0.0
    high = float(((y - y.mean()) ** 2).sum() / target + v.max())
    while _weighted(y, v, high)[2] > target:
        high *= 2
    return float(optimize.brentq(lambda t: _weighted(y, v, t)[2] - target, 0.0, high, xtol=1e-18, rtol=1e-14))


# --------------------------------------------------------------------------------------------------------------------
# Variance components and the 2 x 2 of storage and compute

def nested_components(groups: Sequence[ArrayLike], noise_variance: float = math.nan) -> dict[str, float]:
    """Variance of single runs split into seed, floating-point noise and evaluation noise.

    Args:    groups: per seed the values of its replicates (runs that differ in floating-point noise only), unequal numbers allowed.
             noise_variance: of a single run's value, NaN where not known (then float noise includes it).
    Returns: seed, float_noise, evaluation_noise (variances, not cut at zero), total, f_statistic and p_value of "no variance between
             seeds", num_seeds, num_runs. NaN where no seed has a replicate or there is one seed.
    Source:  one-way random effects, Searle, Casella and McCulloch 1992, ch. 3 (unbalanced).
    """
    from scipy import stats
    data = [_values(g) for g in groups]
    sizes = np.array([g.size for g in data], dtype=np.float64)
    total_runs, seeds = int(sizes.sum()), len(data)
    result = {"seed": math.nan, "float_noise": math.nan, "evaluation_noise": noise_variance, "total": math.nan,
              "f_statistic": math.nan, "p_value": math.nan, "num_seeds": seeds, "num_runs": total_runs}
    if seeds < 2 or total_runs == seeds:
        return result
    grand = float(np.concatenate(data).mean())
    within = sum(float(((g - g.mean()) ** 2).sum()) for g in data) / (total_runs - seeds)
    between = sum(g.size * (float(g.mean()) - grand) ** 2 for g in data) / (seeds - 1)
    effective = (total_runs - float((sizes**2).sum()) / total_runs) / (seeds - 1)
    seed = (between - within) / effective
    known = 0.0 if math.isnan(noise_variance) else noise_variance
    result.update(seed=seed, float_noise=within - known, total=seed + within)
    if within > 0:
        result.update(f_statistic=between / within, p_value=float(stats.f.sf(between / within, seeds - 1, total_runs - seeds)))
    return result


def contrast(cells: Sequence[ArrayLike], coefficients: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Linear contrast of cell means with unequal variances.

    Returns: estimate, se, df (Satterthwaite), t_statistic, p_value (two-sided), low, high.
    Source:  Welch-Satterthwaite; se equals HC2 of the cell-means regression.
    """
    from scipy import stats
    data = [_values(c, minimum=2) for c in cells]
    estimate = float(sum(c * x.mean() for c, x in zip(coefficients, data)))
    parts = [c * c * sample_variance(x) / x.size for c, x in zip(coefficients, data)]
    se = math.sqrt(sum(parts))
    if se == 0:
        return {"estimate": estimate, "se": 0.0, "df": math.nan, "t_statistic": math.nan, "p_value": math.nan, "low": estimate, "high": estimate}
    df = sum(parts) ** 2 / sum(p * p / (x.size - 1) for p, x in zip(parts, data))
    half = float(stats.t.ppf(0.5 + level / 2, df)) * se
    return {"estimate": estimate, "se": se, "df": df, "t_statistic": estimate / se,
            "p_value": float(2 * stats.t.sf(abs(estimate / se), df)), "low": estimate - half, "high": estimate + half}


# The four cells in the order (fp32, bf16_mixed, bf16_storage, bf16) and the signs of each effect (x - y: bf16 minus float32).
FACTORIAL_ARMS = ("fp32", "bf16_mixed", "bf16_storage", "bf16")
FACTORIAL_EFFECTS = {"storage": (-0.5, -0.5, 0.5, 0.5), "compute": (-0.5, 0.5, -0.5, 0.5), "interaction": (1.0, -1.0, -1.0, 1.0)}
