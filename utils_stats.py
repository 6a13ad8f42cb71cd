"""Statistics of a study with few seeds: equivalence, spread, permutation, noise removal, variance components, power.

Every function takes plain arrays of per-run values and returns floats or small dicts; nothing here knows a file or a model.
Undefined quantities are NaN here (``analyze_results.py`` writes them as null with a reason). Convention for two arms: ``x`` is the
arm under test (say bf16), ``y`` the reference (say fp32); differences are x - y and ratios x / y. A matrix of values is
(runs, tasks).

    python utils_stats.py --calibrate                       # all cells, 2,000 simulated studies each (about 9 minutes on one free core)
    python utils_stats.py --calibrate --num_studies 200     # a look, a minute
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Callable, Sequence

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
    # Only the halves on either side of the median are needed; for short rows a full sort is as quick.
    halves = np.sort(values, axis=-1) if n <= 16 else np.partition(values, ((n - 1) // 2, n // 2), axis=-1)
    median = 0.5 * (halves[..., (n - 1) // 2] + halves[..., n // 2])
    below, above = halves[..., :n // 2].sum(-1), halves[..., (n + 1) // 2:].sum(-1)
    total = below + above + (halves[..., n // 2] if n % 2 else 0.0)
    square = np.einsum("...i,...i->...", values, values) - 2 * median * total + n * median * median
    return above - below, np.maximum(square, 0)


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
    size = min(PIVOT_SIMULATIONS, max(2000, 3_000_000 // ((n + m) * len(w))))
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


def _spread_quantiles(sizes: Sequence[int], w: Array, correlation: float, probabilities: tuple[float, ...], signs: Sequence[float] = (1, -1),
                      df: float = math.nan) -> tuple[float, ...]:
    """Quantiles of the jackknife pivot: simulated for one or two small arms, Student's t with ``df`` for large ones and longer contrasts."""
    from scipy import stats
    if max(sizes) <= PIVOT_MAX_RUNS and (len(sizes) == 1 or len(sizes) == 2 and signs[0] == -signs[1]):
        return _pivot_quantiles(sizes[0], sizes[1] if len(sizes) == 2 else 0, tuple(float(v) for v in w), correlation, probabilities)
    return tuple(float(stats.t.ppf(p, df if df == df else sum(sizes) - len(sizes))) for p in probabilities)


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
    q = _spread_quantiles([len(a) for a in mats], w, correlation, (0.5 - level / 2, 1 - level, level, 0.5 + level / 2), signs, df)
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


# --------------------------------------------------------------------------------------------------------------------
# Decisions shared by the analysis and its calibration

SUPPORTED, NOT_SUPPORTED, INCONCLUSIVE = "supported", "not_supported", "inconclusive"


def decide_equal_means(tost: dict[str, float], means: Sequence[ArrayLike], margin: float, alpha: float) -> str:
    """H1 on one task: equivalent within the margin, and every arm's mean shown to be above 0."""
    if any(mean_above(-np.asarray(m, dtype=np.float64)) < alpha for m in means):
        return NOT_SUPPORTED
    if tost["low"] > margin or tost["high"] < -margin:
        return NOT_SUPPORTED
    return SUPPORTED if tost["p_value"] < alpha and all(mean_above(m) < alpha for m in means) else INCONCLUSIVE


def decide_spread(p_value: float, smallest_p: float, lower_bound: float, upper_bound: float, alpha: float, ratio_margin: float) -> str:
    """H2 (and the off-task part of H3): joint p below alpha and the lower bound of the mean log variance ratio above 0.

    Not supported where the upper bound lies below log(ratio_margin). Inconclusive whatever the data where no p below alpha can be reached.
    """
    if not smallest_p < alpha or math.isnan(p_value) or math.isnan(lower_bound):
        return INCONCLUSIVE
    if p_value < alpha and lower_bound > 0:
        return SUPPORTED
    return NOT_SUPPORTED if upper_bound < math.log(ratio_margin) else INCONCLUSIVE


def all_of(verdicts: Sequence[str]) -> str:
    """Supported if all are, not supported if one is not, else inconclusive; nothing at all is inconclusive."""
    if verdicts and all(v == SUPPORTED for v in verdicts):
        return SUPPORTED
    return NOT_SUPPORTED if NOT_SUPPORTED in verdicts else INCONCLUSIVE


# --------------------------------------------------------------------------------------------------------------------
# Power: what this many seeds could have found

POWER = 0.8
MAX_SEEDS = 1000  # searches stop here; the answer is then "more than that"
SPREAD_SEEDS = (4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 25, 30, 40)  # seeds an arm tried for the simulated rule
SPREAD_RATIOS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0)
POWER_STUDIES = 200  # simulated studies behind one power; standard error 2.8 points at 80 %
POWER_STUDIES_LARGE = 100  # from 20 seeds an arm on, where a study is costly and power is seldom near 80 %
POWER_LABELLINGS = 119  # random relabellings in those: few, which understates power by one or two points


def _mean_over_se(value: Callable[[float], float], df: float, top: float = math.inf) -> float:
    """Expectation of ``value(u)`` over u = estimated / true standard error, df u^2 chi-square; 0 above ``top``.

    Used instead of scipy's noncentral t, which is NaN for some small df.
    """
    from scipy import integrate, special
    log_constant = math.log(2) + df / 2 * math.log(df / 2) - float(special.gammaln(df / 2))
    def integrand(u: float) -> float:
        return value(u) * math.exp(log_constant + (df - 1) * math.log(u) - df * u * u / 2) if u > 0 else 0.0
    end = min(top, 1 + 12 / math.sqrt(df))  # the density is below 1e-30 beyond
    peaks = [p for p in (0.25, 0.5, 1.0, 1.5) if p < end]
    return float(integrate.quad(integrand, 0, end, points=peaks or None, limit=200, epsabs=1e-12, epsrel=1e-11)[0])


def _phi(z: float) -> float:
    """Standard normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _welch_se(sd_x: float, sd_y: float, n: int, m: int) -> tuple[float, float]:
    """(standard error, Welch df) at the true standard deviations."""
    vx, vy = sd_x**2 / n, sd_y**2 / m
    return math.sqrt(vx + vy), (vx + vy) ** 2 / (vx**2 / (n - 1) + vy**2 / (m - 1)) if vx + vy > 0 else math.nan


def welch_power(difference: float, sd_x: float, sd_y: float, n: int, m: int, alpha: float = 0.05) -> float:
    """Power of the two-sided Welch test, by the noncentral t with the Welch df at the true variances."""
    from scipy import stats
    se, df = _welch_se(sd_x, sd_y, n, m)
    if se == 0:
        return 1.0 if difference else alpha
    critical = float(stats.t.ppf(1 - alpha / 2, df))
    return _mean_over_se(lambda u: _phi(difference / se - critical * u) + _phi(-difference / se - critical * u), df)


def smallest_difference(sd_x: float, sd_y: float, n: int, m: int, alpha: float = 0.05, power: float = POWER) -> float:
    """Smallest difference of means that the two-sided Welch test finds with this power; 0 without spread, NaN below two runs."""
    from scipy import optimize
    if min(n, m) < 2:
        return math.nan
    se, _ = _welch_se(sd_x, sd_y, n, m)
    if se == 0:
        return 0.0
    return float(optimize.brentq(lambda d: welch_power(d * se, sd_x, sd_y, n, m, alpha) - power, 0.0, 100.0, xtol=1e-8)) * se


def tost_power(margin: float, sd_x: float, sd_y: float, n: int, m: int, alpha: float = 0.05) -> float:
    """Power of the Welch equivalence test when the true difference is 0: P(|D| < margin - t SE), SE drawn with the Welch df."""
    from scipy import stats
    se, df = _welch_se(sd_x, sd_y, n, m)
    if se == 0:
        return 1.0
    critical = float(stats.t.ppf(1 - alpha, df))
    return _mean_over_se(lambda u: max(0.0, 2 * _phi(margin / se - critical * u) - 1), df, top=margin / se / critical)


def smallest_margin(sd_x: float, sd_y: float, n: int, m: int, alpha: float = 0.05, power: float = POWER) -> float:
    """Smallest equivalence margin that equal means would meet with this power; 0 without spread, NaN below two runs."""
    from scipy import optimize
    if min(n, m) < 2:
        return math.nan
    se, _ = _welch_se(sd_x, sd_y, n, m)
    if se == 0:
        return 0.0
    return float(optimize.brentq(lambda k: tost_power(k * se, sd_x, sd_y, n, m, alpha) - power, 0.1, 100.0, xtol=1e-6)) * se


def seeds_for_margin(margin: float, sd_x: float, sd_y: float, alpha: float = 0.05, power: float = POWER) -> int | None:
    """Seeds an arm at which equal means are shown to be equal within ``margin`` with this power; None above MAX_SEEDS."""
    return next((n for n in _seed_numbers() if tost_power(margin, sd_x, sd_y, n, n, alpha) >= power), None)


def _seed_numbers() -> list[int]:
    """2, 3, ... with steps that grow to 5 %."""
    numbers, n = [], 2
    while n <= MAX_SEEDS:
        numbers.append(n)
        n = max(n + 1, int(n * 1.05))
    return numbers


def f_power(ratio: float, n: int, m: int, alpha: float = 0.05) -> float:
    """Power of the one-sided F test at a true variance ratio, for normal values."""
    from scipy import stats
    return float(stats.f.sf(stats.f.ppf(1 - alpha, n - 1, m - 1) / ratio, n - 1, m - 1))


def smallest_ratio_f(n: int, m: int, alpha: float = 0.05, power: float = POWER) -> float:
    """Smallest variance ratio that the one-sided F test of one task finds with this power; NaN below two runs."""
    from scipy import stats
    return math.nan if min(n, m) < 2 else float(stats.f.ppf(1 - alpha, n - 1, m - 1) / stats.f.ppf(1 - power, n - 1, m - 1))


def seeds_for_ratio_f(ratio: float, alpha: float = 0.05, power: float = POWER) -> int | None:
    """Seeds an arm at which the F test of one task finds ``ratio`` with this power; None above MAX_SEEDS."""
    return next((n for n in _seed_numbers() if f_power(ratio, n, n, alpha) >= power), None)


@functools.lru_cache(maxsize=1024)
def spread_rule_power(ratio: float, n: int, m: int, tasks: int, correlation: float, alpha: float = 0.05, studies: int = POWER_STUDIES) -> float:
    """Share of simulated studies in which the rule of H2 says "supported".

    Args:    ratio: true variance ratio on every task, normal values. tasks: number of off-task benchmarks. correlation: between tasks of
             one run, 0 to 0.9.
    Returns: power, with a standard error of sqrt(power (1 - power) / studies). 0 below three runs an arm.
    """
    if min(n, m) < MIN_RUNS_FOR_SPREAD:
        return 0.0
    studies = min(studies, POWER_STUDIES_LARGE) if n + m >= 40 else studies
    rng = np.random.default_rng([20_240_301, n, m, tasks])  # fixed, and common to all ratios, so that power grows with the ratio
    g = math.sqrt(correlation) * rng.standard_normal((studies, n + m, 1)) + math.sqrt(1 - correlation) * rng.standard_normal((studies, n + m, tasks))
    x, y = g[:, :n] * math.sqrt(ratio), g[:, n:]
    rows = relabellings(n, m, 1000 if math.comb(n + m, n) <= 1000 else POWER_LABELLINGS, 0)
    residuals = np.concatenate([x - np.median(x, axis=1, keepdims=True), y - np.median(y, axis=1, keepdims=True)], axis=1).transpose(0, 2, 1)
    p = np.concatenate([_joint_p(part, rows, n) for part in np.array_split(residuals, max(1, residuals.size * len(rows) // 4_000_000))])
    w = np.full(tasks, 1 / tasks)
    (ex, vx), (ey, vy) = _jackknife_log_variance(x, w), _jackknife_log_variance(y, w)
    quantile = _spread_quantiles([n, m], w, correlation, (1 - alpha,))[0]
    lower = ex - log_variance_bias(n) - ey + log_variance_bias(m) - quantile * np.sqrt(vx + vy)
    return float(np.mean((p < alpha) & (lower > 0)))


def _joint_p(residuals: Array, rows: NDArray[np.int64], n: int) -> Array:
    """Joint permutation p of many studies at once; residuals (studies, tasks, runs)."""
    t = _signed_brown_forsythe(residuals[..., rows[:, :n]], residuals[..., rows[:, n:]]).mean(axis=1)   # (studies, labellings)
    return np.mean(t >= t[:, :1] - 1e-9 * (1 + np.abs(t[:, :1])), axis=1)


def smallest_spread_ratio(n: int, m: int, tasks: int, correlation: float, alpha: float = 0.05, power: float = POWER) -> float:
    """Smallest variance ratio (the same on every task) that the rule of H2 finds with this power; NaN where none can be found."""
    if smallest_attainable_p(n, m, 10**6) >= alpha or tasks == 0:
        return math.nan
    first = _first(len(SPREAD_RATIOS), lambda i: spread_rule_power(SPREAD_RATIOS[i], n, m, tasks, correlation, alpha) >= power)
    if first is None:
        return math.nan
    ratio, previous = SPREAD_RATIOS[first], SPREAD_RATIOS[first - 1] if first else 1.0
    reached = spread_rule_power(ratio, n, m, tasks, correlation, alpha)
    before = spread_rule_power(previous, n, m, tasks, correlation, alpha)
    return math.exp(math.log(previous) + (power - before) / (reached - before) * math.log(ratio / previous))


def _first(count: int, reached: Callable[[int], bool]) -> int | None:
    """Smallest i in 0..count-1 with reached(i), for a condition that stays true once it is; by bisection."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return low if low < count else None


def seeds_for_spread_ratio(ratio: float, tasks: int, correlation: float, alpha: float = 0.05, power: float = POWER) -> int | None:
    """Seeds an arm at which the rule of H2 finds ``ratio`` with this power; None above the largest number tried."""
    first = _first(len(SPREAD_SEEDS), lambda i: spread_rule_power(ratio, SPREAD_SEEDS[i], SPREAD_SEEDS[i], tasks, correlation, alpha) >= power)
    return None if first is None else SPREAD_SEEDS[first]


@functools.lru_cache(maxsize=64)
def measured_size(n: int, m: int, alpha: float = 0.05, studies: int = 1000) -> dict[str, dict[str, float]]:
    """How often each per-task test calls equal variances different at level ``alpha``, by simulation.

    Returns: {"normal": {...}, "skewed": {...}} (skewed: exponential values), each with f_test, brown_forsythe, permutation, bootstrap;
             standard error about 0.7 points at 5 %. Empty below three runs an arm.
    """
    if min(n, m) < MIN_RUNS_FOR_SPREAD:
        return {}
    from scipy import stats
    sizes: dict[str, dict[str, float]] = {}
    for kind in ("normal", "skewed"):
        rng = np.random.default_rng([20_240_302, n, m])
        values = rng.standard_normal((studies, n + m)) if kind == "normal" else rng.standard_exponential((studies, n + m))
        x, y = values[:, :n], values[:, n:]
        f = stats.f.sf(x.var(1, ddof=1) / y.var(1, ddof=1), n - 1, m - 1)
        residuals = np.concatenate([x - np.median(x, axis=1, keepdims=True), y - np.median(y, axis=1, keepdims=True)], axis=1)
        t = _signed_brown_forsythe(residuals[:, None, :n], residuals[:, None, n:])[:, 0]
        rows = relabellings(n, m, 1000 if math.comb(n + m, n) <= 1000 else POWER_LABELLINGS, 0)
        permutation = np.concatenate([_joint_p(part[:, None], rows, n) for part in np.array_split(residuals, 20)])
        draws = [np.stack([a[:, rng.integers(0, a.shape[1], a.shape[1])].var(axis=1, ddof=1) for _ in range(POWER_LABELLINGS)]) for a in (x, y)]
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.log(draws[0] / draws[1]) - 2 * np.log(x.var(1, ddof=1) / y.var(1, ddof=1))
        bootstrap = (1 + (excess >= 0).sum(0)) / (1 + np.isfinite(excess).sum(0))
        sizes[kind] = {"f_test": float(np.mean(f < alpha)), "brown_forsythe": float(np.mean(stats.t.sf(t, n + m - 2) < alpha)),
                       "permutation": float(np.mean(permutation < alpha)), "bootstrap": float(np.mean(bootstrap < alpha))}
    return sizes


# --------------------------------------------------------------------------------------------------------------------
# Calibration: how often the rules are wrong, on studies whose truth is known

CALIBRATION_SEEDS = (3, 5, 10)
CALIBRATION_KINDS = ("normal", "skewed", "bounded")
CALIBRATION_OFF_TASKS = 6
CALIBRATION_PROBLEMS, CALIBRATION_DRAWS = 64, 4
TASK_CORRELATION = 0.3    # between tasks of one run
SHARED_DRAWS = 0.5        # correlation of one draw's outcome between runs, on the scale behind the threshold
RUN_SD = 0.03             # spread of a run's true score in the reference arm; evaluation noise adds about as much again
ON_TASK_GAIN, NULL_DIFFERENCE = 0.15, 0.05
KL_LOG_SD = 0.15          # spread of log KL between runs of the reference arm
PLANTED_RATIOS = (2.0, 5.0, 20.0)
SIMULATION_CHUNK = 100    # studies drawn at once: about 60 MB at 20 runs


def _problem_difficulties(kind: str) -> Array:
    """Chance of a right answer per task and problem before training, (1 + off-task, problems); the same in every study."""
    rng = np.random.default_rng(7)
    # bounded: like a competition set for a small model, most problems near 0, so that scores pile up at the floor.
    a, b = (0.25, 3.0) if kind == "bounded" else (3.0, 4.0)
    return rng.beta(a, b, (1 + CALIBRATION_OFF_TASKS, CALIBRATION_PROBLEMS))


def _run_effects(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> Array:
    """Standardised effects of runs on tasks, (studies, runs, tasks): normal, or exponential (skewness 2); correlated over tasks."""
    from scipy import special
    studies, runs, tasks = shape
    g = math.sqrt(TASK_CORRELATION) * rng.standard_normal((studies, runs, 1)) + math.sqrt(1 - TASK_CORRELATION) * rng.standard_normal(shape)
    return -special.log_ndtr(-g) - 1 if kind == "skewed" else g


def simulate_scores(kind: str, n: int, m: int, studies: int, ratio: float, seed: int) -> dict[str, Array]:
    """Studies with arms of n (x, under test) and m (y, reference) runs, scored on problems by draws that runs share in part.

    x's true scores spread ``ratio`` times as much (variance) as y's on every off-task benchmark and equally on task 0, the on-task one,
    whose true mean is NULL_DIFFERENCE higher under x.

    Returns: delta_j and true_score (studies, runs, tasks), noise_variance and own_variance (studies, 2 arms, tasks); runs of x first.
    """
    from scipy import special
    rng = np.random.default_rng([seed, n, m, CALIBRATION_KINDS.index(kind), int(1000 * ratio)])
    base = _problem_difficulties(kind)
    tasks, problems = base.shape
    scale = np.full((n + m, tasks), RUN_SD)
    scale[:n, 1:] *= math.sqrt(ratio)
    shift = np.zeros((n + m, tasks))
    shift[:, 0] = ON_TASK_GAIN
    shift[:n, 0] += NULL_DIFFERENCE
    out: dict[str, list[Array]] = {k: [] for k in ("delta_j", "true_score", "noise_variance", "own_variance")}
    for start in range(0, studies, SIMULATION_CHUNK):
        size = min(SIMULATION_CHUNK, studies - start)
        effect = shift + scale * _run_effects(kind, (size, n + m, tasks), rng)
        p = np.clip(base + effect[..., None], 0, 1)                                           # (studies, runs, tasks, problems)
        threshold = special.ndtri(p).astype(np.float32)[..., None]
        shared = math.sqrt(SHARED_DRAWS) * rng.standard_normal((size, 1, tasks, problems, CALIBRATION_DRAWS), dtype=np.float32)
        own = math.sqrt(1 - SHARED_DRAWS) * rng.standard_normal((size, n + m, tasks, problems, CALIBRATION_DRAWS), dtype=np.float32)
        scores = (shared + own < threshold).astype(np.float32)
        at_base = shared + math.sqrt(1 - SHARED_DRAWS) * rng.standard_normal(shared.shape, dtype=np.float32) < special.ndtri(base)[..., None]
        out["delta_j"].append(scores.mean((3, 4), dtype=np.float64) - at_base.mean((3, 4)))
        out["true_score"].append(p.mean(-1))
        noise = [[[evaluation_noise(scores[s, arm, k]) for k in range(tasks)] for arm in (slice(0, n), slice(n, None))] for s in range(size)]
        for key, name in (("noise_variance", "noise_variance"), ("own_variance", "own_sampling_variance")):
            out[key].append(np.array([[[cell[name] for cell in arm] for arm in study] for study in noise]))
    return {k: np.concatenate(v) for k, v in out.items()}


def simulate_log_kl(kind: str, n: int, m: int, studies: int, ratio: float, log_difference: float, seed: int) -> Array:
    """log KL of runs, (studies, runs, tasks): as simulate_scores, with mean log KL on-task ``log_difference`` higher under x."""
    rng = np.random.default_rng([seed, 1, n, m, CALIBRATION_KINDS.index(kind), int(1000 * ratio)])
    scale = np.full((n + m, 1 + CALIBRATION_OFF_TASKS), KL_LOG_SD)
    scale[:n, 1:] *= math.sqrt(ratio)
    if kind == "bounded":  # KL as a gamma variable, bounded by zero: shape 1/sd^2 gives log KL about this spread, skewed to the left
        shape = 1 / scale**2
        values = np.log(rng.gamma(shape, 1 / shape, (studies, n + m, 1 + CALIBRATION_OFF_TASKS)))
    else:
        values = scale * _run_effects(kind, (studies, n + m, 1 + CALIBRATION_OFF_TASKS), rng)
    values[:, :n, 0] += log_difference
    return values


def _family_decision(x: Array, y: Array, num_resamples: int, seed: int, alpha: float, ratio_margin: float) -> tuple[str, float, dict[str, float]]:
    """Verdict of the rule of H2, its joint p, and the interval of the mean log variance ratio (NaN where a task has no spread)."""
    test = permutation_spread(x, y, num_resamples, seed)
    spread = [k for k in range(x.shape[1]) if sample_variance(x[:, k]) > 0 and sample_variance(y[:, k]) > 0]
    effect = log_variance_contrast([x[:, spread], y[:, spread]], [1, -1]) if spread else dict.fromkeys(("low", "high", "lower_bound", "upper_bound"), math.nan)
    kind = decide_spread(test["p_value"], test["smallest_p"], effect["lower_bound"], effect["upper_bound"], alpha, ratio_margin)
    return kind, test["p_value"], effect


def calibrate_cell(kind: str, n: int, studies: int, num_resamples: int = 399, seed: int = 0, alpha: float = 0.05, margin: float = NULL_DIFFERENCE,
                   kl_margin: float = 1.25, ratio_margin: float = 1.5) -> dict[str, Any]:
    """One cell of the calibration table: false verdicts, power, coverage of intervals, recovery of the planted spread.

    Args:    kind: one of CALIBRATION_KINDS. n: seeds an arm. studies: simulated studies. num_resamples: of the permutation test where
             not all labellings are enumerated.
    Returns: shares in [0, 1] under "false_supported", "power", "coverage" and "estimate"; their standard error is at most
             0.5 / sqrt(studies).
    """
    null = simulate_scores(kind, n, n, studies, 1.0, seed)
    # The null of H1 is a difference equal to the margin: where clipping at 0 or 1 shrank what was planted, the margin is what is left of it.
    true_on = null["true_score"][:, :, 0]
    true_difference = float(true_on[:, :n].mean() - true_on[:, n:].mean())
    counts: dict[str, list[float]] = {}
    def note(name: str, value: bool | float) -> None:
        counts.setdefault(name, []).append(float(value))
    base_mean = float(_problem_difficulties(kind)[0].mean())
    true_mean = float(true_on[:, n:].mean()) - base_mean
    total_variance = float(null["delta_j"][:, n:, 0].var(axis=1, ddof=1).mean())
    true_spread = float(null["true_score"][:, n:, 0].var(axis=1, ddof=1).mean())
    for s in range(studies):
        x, y = null["delta_j"][s, :n], null["delta_j"][s, n:]
        tost = tost_welch(x[:, 0], y[:, 0], true_difference, alpha)
        note("H1 false", decide_equal_means(tost, (x[:, 0], y[:, 0]), true_difference, alpha) == SUPPORTED)
        verdict, p, effect = _family_decision(x[:, 1:], y[:, 1:], num_resamples, s, alpha, ratio_margin)
        note("H2 false", verdict == SUPPORTED)
        note("H2 permutation alone", p < alpha)
        note("seed rule H2 false", 2 * sum(np.var(x[:, k]) > np.var(y[:, k]) for k in range(1, x.shape[1])) > CALIBRATION_OFF_TASKS)
        note("F test false", f_test(x[:, 1], y[:, 1])["p_value_greater"] < alpha)
        welch_test = welch(x[:, 0], y[:, 0])
        # The interval of a mean is of this base evaluation's dJ: the base's own sampling error is common to all runs and not in it.
        base_error = float(null["delta_j"][s, :, 0].mean() - (null["true_score"][s, :, 0].mean() - base_mean))
        low, high = mean_interval(y[:, 0])
        note("mean", low <= true_mean + base_error <= high)
        note("difference of means", welch_test["low"] <= true_difference <= welch_test["high"])
        low, high = variance_interval(y[:, 0])
        note("variance", low <= total_variance <= high)
        f = f_test(x[:, 1], y[:, 1])
        note("variance ratio of one task", f["low"] <= 1 <= f["high"])
        note("mean log variance ratio", effect["low"] <= 0 <= effect["high"])
        noise, own = null["noise_variance"][s, 1, 0], null["own_variance"][s, 1, 0]
        moment = between_run_variance(y[:, 0], noise)
        note("untruncated", moment)
        note("truncated", max(0.0, moment))
        note("share of zeros", moment <= 0)
        note("less own variance", sample_variance(y[:, 0]) - own)
        if noise > 0:
            low, high = q_profile_interval(y[:, 0], noise)
            note("between-run variance (Q-profile)", low <= true_spread <= high)
    powers: dict[str, dict[str, float]] = {}
    for ratio in PLANTED_RATIOS:
        data = simulate_scores(kind, n, n, studies, ratio, seed + 1)["delta_j"]
        found = [_family_decision(d[:n, 1:], d[n:, 1:], num_resamples, s, alpha, ratio_margin)[0] == SUPPORTED for s, d in enumerate(data)]
        planted = simulate_log_kl(kind, n, n, studies, ratio, 0.0, seed + 1)
        found_kl = [_family_decision(d[:n, 1:], d[n:, 1:], num_resamples, s, alpha, ratio_margin)[0] == SUPPORTED for s, d in enumerate(planted)]
        powers[f"{ratio:g}"] = {"H2": float(np.mean(found)), "H3 off-task": float(np.mean(found_kl))}
    # Off-task the spread differs so much that only the on-task part can stop a verdict. (gamma shapes below 1/50 underflow to log 0.)
    on_null = simulate_log_kl(kind, n, n, studies, 1000.0 if kind != "bounded" else 50.0, math.log(kl_margin), seed + 2)
    off_null = simulate_log_kl(kind, n, n, studies, 1.0, 0.0, seed + 3)
    for s in range(studies):
        for name, d in (("H3 false, on-task at the margin", on_null[s]), ("H3 false, off-task spread equal", off_null[s])):
            tost = tost_welch(d[:n, 0], d[n:, 0], math.log(kl_margin), alpha)
            on = SUPPORTED if tost["p_value"] < alpha else INCONCLUSIVE
            off = _family_decision(d[:n, 1:], d[n:, 1:], num_resamples, s, alpha, ratio_margin)[0]
            note(name, all_of([on, off]) == SUPPORTED)
            if d is off_null[s]:
                note("H3 on-task power", on == SUPPORTED)
        ratio_test = welch(on_null[s, :n, 0], on_null[s, n:, 0])
        note("KL ratio", ratio_test["low"] <= math.log(kl_margin) <= ratio_test["high"])
    mean = {k: float(np.nanmean(v)) for k, v in counts.items()}
    return {
        "kind": kind, "seeds": n, "studies": studies, "true_difference": true_difference,
        "false_supported": {k: mean[k] for k in ("H1 false", "H2 false", "H3 false, on-task at the margin", "H3 false, off-task spread equal")},
        "shown_beside": {k: mean[k] for k in ("H2 permutation alone", "F test false", "seed rule H2 false")},
        "power": powers,
        "coverage": {k: mean[k] for k in ("mean", "difference of means", "variance", "variance ratio of one task", "mean log variance ratio",
                                          "between-run variance (Q-profile)", "KL ratio") if k in mean},
        "estimate": {"planted": true_spread, **{k: mean[k] for k in ("untruncated", "truncated", "less own variance")}, "share of zeros": mean["share of zeros"]},
    }


def calibrate_decompositions(studies: int, seed: int = 0) -> dict[str, Any]:
    """Are planted variance components and 2 x 2 effects recovered? Mean estimates beside the truth, and coverage of the contrasts."""
    rng = np.random.default_rng([seed, 99])
    truth = {"seed": 4.0, "float_noise": 1.0, "evaluation_noise": 0.5}
    parts: dict[str, list[float]] = {"seed": [], "float_noise": []}
    for _ in range(studies):
        sizes = rng.integers(1, 5, 6)  # six seeds with one to four replicates each
        sizes[0] = max(sizes[0], 2)
        groups = [math.sqrt(truth["seed"]) * rng.standard_normal() + math.sqrt(truth["float_noise"] + truth["evaluation_noise"])
                  * rng.standard_normal(k) for k in sizes]
        found = nested_components(groups, truth["evaluation_noise"])
        for k in parts:
            parts[k].append(found[k])
    planted = {"storage": 0.03, "compute": -0.01, "interaction": 0.02}
    sd = (0.01, 0.02, 0.03, 0.05)  # unequal spread in the four cells
    means = [sum(planted[e] * w for e, w in (("storage", a), ("compute", b), ("interaction", a * b))) for a, b in ((0, 0), (0, 1), (1, 0), (1, 1))]
    # Main effects are averages over the other factor: half of the interaction belongs to each.
    expected = {"storage": planted["storage"] + planted["interaction"] / 2, "compute": planted["compute"] + planted["interaction"] / 2,
                "interaction": planted["interaction"]}
    log_truth = {e: float(np.dot(s, 2 * np.log(sd))) for e, s in FACTORIAL_EFFECTS.items()}
    effects: dict[str, list[list[float]]] = {e: [] for e in FACTORIAL_EFFECTS}
    for _ in range(studies):
        cells = [mu + s * rng.standard_normal(5) for mu, s in zip(means, sd)]
        for effect, signs in FACTORIAL_EFFECTS.items():
            on_mean = contrast(cells, signs)
            on_log = log_variance_contrast([c[:, None] for c in cells], signs)
            effects[effect].append([on_mean["estimate"], on_mean["low"] <= expected[effect] <= on_mean["high"], on_log["estimate"],
                                    on_log["low"] <= log_truth[effect] <= on_log["high"]])
    columns = {e: np.mean(v, axis=0) for e, v in effects.items()}
    return {"nested": {k: {"planted": truth[k], "mean_estimate": float(np.mean(v))} for k, v in parts.items()},
            "factorial": {e: {"planted": expected[e], "mean_estimate": float(c[0]), "coverage": float(c[1]), "planted_log_variance": log_truth[e],
                              "mean_log_variance": float(c[2]), "coverage_log_variance": float(c[3])} for e, c in columns.items()}}


def calibration_markdown(result: dict[str, Any]) -> str:
    """The calibration as Markdown tables (shares in %)."""
    def table(header: list[str], rows: list[list[str]]) -> list[str]:
        return ["| " + " | ".join(r) + " |" for r in [header, ["---"] * len(header), *rows]] + [""]
    def percent(value: float) -> str:
        return f"{100 * value:.1f}"
    cells = result["cells"]
    names = [[c["kind"], str(c["seeds"])] for c in cells]
    false, beside, cover = (list(cells[0][k]) for k in ("false_supported", "shown_beside", "coverage"))
    lines = ["# Calibration of the verdicts", "", f"Written by `python utils_stats.py --calibrate` (seed {result['seed']}). The rules are in the docstring of "
             "`analyze_results.py`. H1's null is a difference equal to the margin, H2's is equal spread, and H3 is tried with either of its parts "
             "untrue. \"Seed rule\": larger variance in more than half of the tasks.", "",
             f"{result['studies']} simulated studies a cell, {CALIBRATION_OFF_TASKS} off-task benchmarks of {CALIBRATION_PROBLEMS} problems x "
             f"{CALIBRATION_DRAWS} draws; standard error at 5 %: {percent(math.sqrt(0.05 * 0.95 / result['studies']))} points. All shares in %.", ""]
    lines += ["False verdicts \"supported\" (limit 6.5), and what single tests and the older rule would have said", ""]
    lines += table(["data", "seeds", *false, *beside], [[*n, *(percent(c["false_supported"][k]) for k in false), *(percent(c["shown_beside"][k]) for k in beside)]
                                                        for n, c in zip(names, cells)])
    lines += ["Power: share of \"supported\" at a planted variance ratio", ""]
    ratios = [f"{r:g}" for r in PLANTED_RATIOS]
    lines += table(["data", "seeds", *(f"{h}, ratio {r}" for h in ("H2", "H3 off-task") for r in ratios)],
                   [[*n, *(percent(c["power"][r][h]) for h in ("H2", "H3 off-task") for r in ratios)] for n, c in zip(names, cells)])
    lines += ["Coverage of 95 % intervals (92 to 98 asked for under the normal model)", ""]
    lines += table(["data", "seeds", *cover], [[*n, *(percent(c["coverage"][k]) for k in cover)] for n, c in zip(names, cells)])
    lines += ["Variance between runs, noise taken out, as a multiple of the planted one (1 is right)", ""]
    lines += table(["data", "seeds", "untruncated", "cut at zero (REML)", "share of zeros, %", "own sampling variance subtracted instead"],
                   [[*n, *(f"{c['estimate'][k] / c['estimate']['planted']:.3f}" for k in ("untruncated", "truncated")), percent(c["estimate"]["share of zeros"]),
                     f"{c['estimate']['less own variance'] / c['estimate']['planted']:.3f}"] for n, c in zip(names, cells)])
    d = result["decompositions"]
    lines += ["Planted decompositions", ""]
    lines += table(["what", "planted", "mean estimate", "coverage, %"],
                   [[f"variance: {k}", f"{v['planted']:g}", f"{v['mean_estimate']:.3f}", "-"] for k, v in d["nested"].items()]
                   + [[f"mean: {k}", f"{v['planted']:g}", f"{v['mean_estimate']:.4f}", percent(v["coverage"])] for k, v in d["factorial"].items()]
                   + [[f"log variance: {k}", f"{v['planted_log_variance']:.3f}", f"{v['mean_log_variance']:.3f}", percent(v["coverage_log_variance"])]
                      for k, v in d["factorial"].items()])
    return "\n".join(lines)


def main(cfg: Any) -> None:
    from pathlib import Path

    from config import UserError
    from utils_run import write_json, write_text
    if not cfg.calibrate:
        raise UserError("nothing to do; pass --calibrate (the analysis itself is analyze_results.py)")
    cells = []
    for kind in CALIBRATION_KINDS:
        for n in CALIBRATION_SEEDS:
            cells.append(calibrate_cell(kind, n, cfg.num_studies, cfg.num_resamples, cfg.seed))
            print(f"{kind}, {n} seeds: " + ", ".join(f"{k} {100 * v:.1f} %" for k, v in cells[-1]["false_supported"].items()), flush=True)
    result = {"studies": cfg.num_studies, "num_resamples": cfg.num_resamples, "seed": cfg.seed, "cells": cells,
              "decompositions": calibrate_decompositions(cfg.num_studies, cfg.seed)}
    text = calibration_markdown(result)
    print("\n" + text)
    if cfg.output_path:
        write_json(Path(cfg.output_path), result)
        write_text(Path(cfg.output_path).with_suffix(".md"), text)


if __name__ == "__main__":
    from config import StatsConfig
    from utils_run import run_script
    run_script(main, StatsConfig, description=__doc__)
