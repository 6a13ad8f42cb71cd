"""Log-probabilities of given tokens in bounded memory, KL estimators, and the exact per-prefix KL over the vocabulary.

Direction everywhere: KL(policy || reference) = E_{y ~ policy}[log policy(y|x) - log reference(y|x)], on tokens sampled from the
policy at temperature 1 and top-p 1. Prompts are excluded, the EOS token is included, all values are in nats.

Rows are right-padded and the base transformer runs causally without an attention mask: a pad at the end cannot influence an
earlier token, so padding changes nothing but rounding. Only hidden states that predict a response token pass through the output
head, a chunk of tokens at a time, and logits are upcast to float32 before anything else happens to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# One chunk of float32 logits. On a CPU 64 MiB keeps all temporaries of a chunk (about four of that size) under 400 MB; a GPU needs
# several hundred rows a product before it is limited by arithmetic and not by reading the head (512 MiB: 883 rows of 151,936).
CHUNK_LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# With gradients, logits up to this size in total are kept: recomputing them costs more than the memory is worth (the tiny model's
# micro-batch needs about 1 MiB). Above it each chunk is recomputed in the backward pass.
KEEP_LOGIT_BYTES = 64 << 20
# Below this |x| the series of expm1(x) - x is used: its first dropped term is 3e-9 of the value there, while the subtraction
# of float32 numbers has already lost 4e-6.
SERIES_LIMIT = 0.03
VOCABULARY_BLOCK = 16384  # entries compared at a time; the comparison needs six temporaries, which then stay small beside the logits
# Settings of other architectures that change logits after the head; honouring them silently wrong is worse than refusing.
HEAD_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


# --------------------------------------------------------------------------------------------------------------------
# Rows

@dataclass(frozen=True)
class PaddedRows:
    """Prompts with their responses, right-padded, and where the hidden state that predicts each response token lies.

    input_ids: (B, T) int64, prompt + response + pads. response_ids: (B, R) int64, pads where masked.
    response_mask: (B, R) bool, True on response tokens (EOS included), R = longest response.
    hidden_index: (N,) int64 into the flattened (B * T) hidden states, one per response token, in row order.
    cell_index: (N,) int64 into the flattened (B * R) outputs. targets: (N,) int64, the response tokens.
    """

    input_ids: Tensor
    response_ids: Tensor
    response_mask: Tensor
    hidden_index: Tensor
    cell_index: Tensor
    targets: Tensor

    @property
    def sequence(self) -> Tensor:
        """(N,) int64, the row that each response token belongs to."""
        return self.cell_index // max(1, self.response_mask.shape[1])


def pad_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int,
             device: torch.device | str = "cpu") -> PaddedRows:
    """Right-pad prompt + response rows.

    Args:    prompts, responses: B lists of token ids; a response may be empty, a prompt may not (nothing would predict
                 its first token). pad_id: any valid id; it never reaches a result. device: where the tensors go.
    Returns: PaddedRows with T = longest prompt + response, R = longest response.
    Raises:  ValueError if the numbers of rows differ, there are none, or a prompt is empty.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: need the same number, at least one")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("empty prompt: no hidden state would predict its first response token")
    batch = len(prompts)
    prompt_lengths = np.array([len(p) for p in prompts])
    response_lengths = np.array([len(r) for r in responses])
    total, longest = int((prompt_lengths + response_lengths).max()), int(response_lengths.max())
    input_ids = np.full((batch, total), pad_id, dtype=np.int64)
    response_ids = np.full((batch, longest), pad_id, dtype=np.int64)
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        input_ids[i, :len(prompt)] = prompt
        input_ids[i, len(prompt):len(prompt) + len(response)] = response
        response_ids[i, :len(response)] = response
    mask = np.arange(longest)[None, :] < response_lengths[:, None]                      # (B, R)
    # the hidden state at position p predicts token p + 1, so response token j comes from position len(prompt) - 1 + j
    positions = (np.arange(batch) * total + prompt_lengths - 1)[:, None] + np.arange(longest)[None, :]
    to = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
    return PaddedRows(to(input_ids), to(response_ids), to(mask), to(positions[mask]), to(np.flatnonzero(mask)),
                      to(response_ids[mask]))


@dataclass(frozen=True)
class PackedRows:
    """Several problems in one row, each prompt once with all of its responses behind it; a mask keeps them apart.

    input_ids, position_ids: (B, T) int64; a response's positions continue its prompt's. visible: (B, 1, T, T) bool, True where
    a token (row of the matrix) may look. hidden_index, targets: (N,) as in PaddedRows. sequence: (N,) int64, the response that
    each token belongs to, counted over all groups in order.
    """

    input_ids: Tensor
    position_ids: Tensor
    visible: Tensor
    hidden_index: Tensor
    targets: Tensor
    sequence: Tensor


def pack_rows(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], row_tokens: int, pad_id: int,
              device: torch.device | str = "cpu") -> PackedRows:
    """Pack (prompt, its responses) groups into as few rows as a first-fit finds.

    A response's last token is never an input: it predicts nothing that is asked for. Against pad_rows() this saves the repeated prompts
    and most pads; the attention matrix is computed over whole rows, so it suits many short responses.

    Args:    groups: prompts with at least one token each. row_tokens: T, no group may need more (see packed_length()).
    Raises:  ValueError for an empty prompt or a group that does not fit.
    """
    fill: list[int] = []  # tokens used in each row
    place: list[tuple[int, int]] = []  # row and first position of each group
    for prompt, responses in groups:
        need = packed_length(prompt, responses)
        if not prompt or need > row_tokens:
            raise ValueError("empty prompt" if not prompt else f"a group of {need} tokens does not fit into rows of {row_tokens}")
        row = next((r for r, used in enumerate(fill) if used + need <= row_tokens), len(fill))
        if row == len(fill):
            fill.append(0)
        place.append((row, fill[row]))
        fill[row] += need
    shape = (len(fill), max(fill))
    ids, positions = np.full(shape, pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    group_of = np.full(shape, -1, dtype=np.int64)
    response_of = np.zeros(shape, dtype=np.int64)  # 0: prompt; responses of a group count from 1
    hidden_index, targets, sequence = [], [], []
    count = 0
    for g, ((prompt, responses), (row, start)) in enumerate(zip(groups, place)):
        at, first = start + len(prompt), row * shape[1] + start
        ids[row, start:at], positions[row, start:at] = prompt, np.arange(len(prompt))
        for r, response in enumerate(responses, start=1):
            end = at + max(0, len(response) - 1)
            ids[row, at:end] = response[:-1]
            positions[row, at:end] = len(prompt) + np.arange(end - at)
            response_of[row, at:end] = r
            if len(response):  # the first token is predicted by the prompt's last position
                hidden_index += [first + len(prompt) - 1, *range(row * shape[1] + at, row * shape[1] + end)]
            targets += response
            sequence += [count] * len(response)
            at, count = end, count + 1
        group_of[row, start:at] = g
    same = (group_of[:, :, None] == group_of[:, None, :]) & np.tri(shape[1], dtype=bool)
    visible = same & ((response_of[:, None, :] == 0) | (response_of[:, None, :] == response_of[:, :, None]))    # (B, T, T)
    visible[:, np.arange(shape[1]), np.arange(shape[1])] = True  # pads see themselves: a row of nothing would be 0 / 0
    arrays = (ids, positions, visible[:, None], *(np.array(x, dtype=np.int64) for x in (hidden_index, targets, sequence)))
    return PackedRows(*(torch.from_numpy(array).to(device) for array in arrays))


def packed_length(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> int:
    """Tokens that a group takes in a packed row."""
    return len(prompt) + sum(max(0, len(r) - 1) for r in responses)


# --------------------------------------------------------------------------------------------------------------------
# Log-probabilities of given tokens

def output_head(model: Any) -> torch.nn.Module:
    """The module that turns hidden states into logits. Raises ValueError if the model transforms logits after it."""
    for name in HEAD_TRANSFORMS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{type(model).__name__} changes its logits after the head ({name}); not supported")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head (not a causal language model)")
    return head


def response_hidden(model: Any, rows: PaddedRows | PackedRows) -> Tensor:
    """Final hidden states that predict the response tokens: (N, H), in the model's compute dtype."""
    layout = {"position_ids": rows.position_ids, "attention_mask": rows.visible} if isinstance(rows, PackedRows) else {"attention_mask": None}
    hidden = model.base_model(input_ids=rows.input_ids, use_cache=False, **layout).last_hidden_state  # (B, T, H)
    return hidden.flatten(0, 1).index_select(0, rows.hidden_index)


def chunk_size(vocab_size: int, device: torch.device, share: float = 1.0) -> int:
    """Tokens per chunk so that their float32 logits fill ``share`` of CHUNK_LOGIT_BYTES."""
    budget = CHUNK_LOGIT_BYTES.get(device.type, CHUNK_LOGIT_BYTES["cuda"]) * share
    return max(1, int(budget) // (4 * vocab_size))


def token_logprobs(model: Any, rows: PaddedRows, temperature: float = 1.0, with_entropy: bool = False,
                   chunk_tokens: int = 0) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the response tokens under ``model``, with or without gradients.

    The (B, T, V) tensor of logits never exists. With gradients and more than KEEP_LOGIT_BYTES of logits, each chunk is
    recomputed in the backward pass.

    Args:    model: causal language model. rows: from pad_rows(), on the model's device. temperature: logits are divided
                 by it. with_entropy: also the entropy of the distribution that each token was drawn from.
             chunk_tokens: tokens per pass through the head (0: from CHUNK_LOGIT_BYTES).
    Returns: logprobs (B, R) float32 in nats, zero where masked; entropy (B, R) float32 in nats over the whole vocabulary,
             detached, or None.
    Raises:  ValueError for a temperature that is not positive, or a model whose logits are changed after the head.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    head = output_head(model)
    if len(rows.targets) == 0:
        empty = rows.response_mask.float()
        return empty, torch.zeros_like(empty) if with_entropy else None
    hidden = response_hidden(model, rows)                                               # (N, H)
    logprobs, entropy = head_logprobs(head, hidden, rows.targets, temperature, with_entropy, chunk_tokens)
    return scatter_rows(logprobs, rows), scatter_rows(entropy, rows) if with_entropy else None


def head_logprobs(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: float = 1.0,
                  with_entropy: bool = False, chunk_tokens: int = 0) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets`` from final hidden states, in chunks of tokens.

    Args:    head: module (N, H) -> (N, V) logits. hidden: (N, H). targets: (N,) int64. Others: as in token_logprobs().
    Returns: (N,) float32 log-probabilities in nats; (N,) float32 entropy, detached, or None.
    """
    vocab_size = head.weight.shape[0]
    chunk = chunk_tokens or chunk_size(vocab_size, hidden.device)
    keep = not torch.is_grad_enabled() or 4 * vocab_size * len(targets) <= KEEP_LOGIT_BYTES
    parts = []
    for h, t in zip(hidden.split(chunk), targets.split(chunk)):
        args = (head, h, t, temperature, with_entropy)
        # The head has no dropout, so no random state needs saving for the second pass.
        parts.append(_chunk_logprobs(*args) if keep else
                     checkpoint(_chunk_logprobs, *args, use_reentrant=False, preserve_rng_state=False))
    logprobs = torch.cat([p[0] for p in parts])
    return logprobs, torch.cat([p[1] for p in parts]) if with_entropy else None


def _chunk_logprobs(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: float,
                    with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float()                                                       # (C, V)
    if temperature != 1.0:
        logits = logits / temperature
    # never log_softmax: torch's CPU kernel is biased by 4e-5 at a vocabulary of 151,936
    log_normalizer = torch.logsumexp(logits, dim=-1)                                    # (C,)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():  # last, so that a recomputation in the backward pass stops before it
        log_p = logits.detach() - log_normalizer.detach()[:, None]
        entropy = -(log_p.exp().mul_(log_p)).sum(dim=-1)
    return logprobs, entropy


def scatter_rows(values: Tensor, rows: PaddedRows) -> Tensor:
    """(N,) values of response tokens as (B, R), zero where masked. Differentiable and deterministic."""
    flat = values.new_zeros(rows.response_mask.numel())
    return flat.index_copy(0, rows.cell_index, values).view(rows.response_mask.shape)


# --------------------------------------------------------------------------------------------------------------------
# Exact KL per prefix

def exact_token_kl(policy: Any, ref: Any, rows: PaddedRows, chunk_tokens: int = 0) -> Tensor:
    """KL(policy || ref) of the next-token distribution at each response position, summed over the whole vocabulary.

    Averaged over responses drawn from the policy, the row sums estimate the sequence KL without bias. Near the reference their variance
    is far below that of the drawn tokens' log-ratios (these are of the order of the step, the exact KL of its square). Further away
    it need not be: a log-ratio and the KL of the prefixes it leads to can balance each other.

    Args:    policy, ref: causal language models over one vocabulary. rows: from pad_rows(). chunk_tokens: as in token_logprobs().
    Returns: (B, R) float32, nats per token, never negative, zero where masked; exactly 0 where both models give equal logits.
    Raises:  ValueError if the vocabularies differ.
    Source:  Amini, Vieira, Cotterell 2025, https://arxiv.org/abs/2504.10637
    """
    with torch.no_grad():
        if len(rows.targets) == 0:
            return rows.response_mask.float()
        kl = head_kl(output_head(policy), output_head(ref), response_hidden(policy, rows), response_hidden(ref, rows),
                     chunk_tokens)
        return scatter_rows(kl, rows)


@torch.no_grad()
def head_kl(policy_head: Callable[[Tensor], Tensor], ref_head: Callable[[Tensor], Tensor], policy_hidden: Tensor,
            ref_hidden: Tensor, chunk_tokens: int = 0) -> Tensor:
    """Exact KL(policy || ref) per token from the final hidden states of both models.

    Args:    *_head: modules (N, H) -> (N, V). *_hidden: (N, H) each (the two H may differ).
    Returns: (N,) float32, nats.
    Raises:  ValueError if the vocabularies differ.
    """
    return _head_statistics(policy_head, ref_head, policy_hidden, ref_hidden, None, chunk_tokens)[0]


@torch.no_grad()
def compare_tokens(policy_head: Callable[[Tensor], Tensor], ref_head: Callable[[Tensor], Tensor], policy_hidden: Tensor,
                   ref_hidden: Tensor, targets: Tensor, chunk_tokens: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What an evaluation needs of each response token, from one pass of either head.

    Args:    as in head_kl(); targets: (N,) int64, the response tokens.
    Returns: exact KL, log-probability under the policy, log-probability under the reference: (N,) float32 each, nats.
    Raises:  ValueError if the vocabularies differ.
    """
    return _head_statistics(policy_head, ref_head, policy_hidden, ref_hidden, targets, chunk_tokens)


def _head_statistics(policy_head, ref_head, policy_hidden, ref_hidden, targets, chunk_tokens):
    vocab_size, ref_size = policy_head.weight.shape[0], ref_head.weight.shape[0]
    if vocab_size != ref_size:
        raise ValueError(f"policy and reference have vocabularies of {vocab_size} and {ref_size} entries")
    chunk = chunk_tokens or chunk_size(vocab_size, policy_hidden.device)
    kl, logprobs, ref_logprobs = (torch.zeros(len(policy_hidden), device=policy_hidden.device) for _ in range(3))
    for start in range(0, len(policy_hidden), chunk):
        window = slice(start, start + chunk)
        log_p, log_q = policy_head(policy_hidden[window]).float(), ref_head(ref_hidden[window]).float()  # (C, V)
        log_p = log_p.sub_(torch.logsumexp(log_p, dim=-1, keepdim=True))
        log_q = log_q.sub_(torch.logsumexp(log_q, dim=-1, keepdim=True))
        if targets is not None:
            chosen = targets[window, None]
            logprobs[window] = log_p.gather(-1, chosen).squeeze(-1)
            ref_logprobs[window] = log_q.gather(-1, chosen).squeeze(-1)
        kl[window] = _kl_of_log_distributions(log_p, log_q)
    return kl, logprobs, ref_logprobs


def _kl_of_log_distributions(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v p (log p - log q) along the last axis, written as sum_v p (expm1(x) - x) with x = log q - log p.

    Both are equal because p and q sum to 1. Every term of the second form is >= 0, and an error d in a log-normaliser enters
    as d^2 / 2 and not as d: in float32 the first form has noise near 1e-6 nats, as large as the KL of a hardly moved model.
    """
    total = torch.zeros(log_p.shape[:-1], device=log_p.device)
    for log_p, log_q in zip(log_p.split(VOCABULARY_BLOCK, dim=-1), log_q.split(VOCABULARY_BLOCK, dim=-1)):
        x, p = log_q - log_p, log_p.exp()
        # q - p - p x, and not p (exp(x) - 1 - x): where p underflows, exp(x) may overflow, and 0 * inf is no number
        terms = torch.where(x.abs() < SERIES_LIMIT, p * _expm1_minus_series(x), log_q.exp().sub_(p).sub_(p * x))
        total += terms.clamp_min_(0.0).sum(dim=-1)
    return total


def _expm1_minus_series(x: Tensor) -> Tensor:
    return x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120))))


def expm1_minus(x: Tensor) -> Tensor:
    """exp(x) - 1 - x without cancellation; never negative."""
    # expm1: at log-ratios near 1e-4, float32 exp(x) - 1 - x is off by 4x its size
    return torch.where(x.abs() < SERIES_LIMIT, _expm1_minus_series(x), torch.expm1(x) - x)


# --------------------------------------------------------------------------------------------------------------------
# Sampled estimators

def _log_ratios(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_ref on True positions: (n,). Selected before any exp, so that masked values cannot overflow."""
    if not logprobs.shape == ref_logprobs.shape == mask.shape:
        raise ValueError(f"shapes differ: {tuple(logprobs.shape)}, {tuple(ref_logprobs.shape)}, mask {tuple(mask.shape)}")
    for name, tensor in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {tensor.dtype}: a KL needs float32 or better")
    selected = logprobs[mask] - ref_logprobs[mask]
    if selected.numel() == 0:
        raise ValueError("mask is all False: a mean over no tokens")
    return selected


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean k1 estimate, log pi - log pi_ref, of KL(pi || pi_ref) on tokens sampled from pi, in nats per token.

    Unbiased, high variance, single values may be negative.

    Args:    logprobs, ref_logprobs: (B, T) float32, log-probability of the sampled tokens.
             mask: (B, T) bool, True on response tokens.
    Returns: scalar float32, mean over all True positions (not a mean of per-response means).
    Raises:  ValueError if shapes differ, a dtype is below float32, or mask is all False.
    Source:  Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    return _log_ratios(logprobs, ref_logprobs, mask).mean()


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean k2 estimate, (log pi - log pi_ref)^2 / 2, of KL(pi || pi_ref) on tokens sampled from pi, in nats per token.

    Biased, low variance, never negative.

    Args:    logprobs, ref_logprobs: (B, T) float32, log-probability of the sampled tokens.
             mask: (B, T) bool, True on response tokens.
    Returns: scalar float32, mean over all True positions (not a mean of per-response means).
    Raises:  ValueError if shapes differ, a dtype is below float32, or mask is all False.
    Source:  Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    return 0.5 * _log_ratios(logprobs, ref_logprobs, mask).square().mean()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean k3 estimate, (r - 1) - log r with r = pi_ref / pi, of KL(pi || pi_ref) on tokens sampled from pi, in nats per token.

    Unbiased, never negative, low variance unless r has heavy tails.

    Args:    logprobs, ref_logprobs: (B, T) float32, log-probability of the sampled tokens.
             mask: (B, T) bool, True on response tokens.
    Returns: scalar float32, mean over all True positions (not a mean of per-response means).
    Raises:  ValueError if shapes differ, a dtype is below float32, or mask is all False.
    Source:  Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    return expm1_minus(-_log_ratios(logprobs, ref_logprobs, mask)).mean()


# --------------------------------------------------------------------------------------------------------------------
# Means over problems and draws, with their errors

@dataclass(frozen=True)
class Estimate:
    """A mean over P problems x K draws and its two standard errors (None where they are not defined).

    se: over problems, as if the problems were drawn from a population (draws of one problem are averaged first, they are
        not independent of each other); needs P >= 2.
    sampling_se: over the draws alone, for these very problems; needs K >= 2.
    """

    mean: float
    se: float | None
    sampling_se: float | None


def estimate_mean(values: Any) -> Estimate:
    """Mean of (P, K) values, e.g. nats per sequence: rows are problems, columns draws.

    Raises:  ValueError unless values is a non-empty (P, K) array.
    Source:  Miller 2024, Adding Error Bars to Evals, https://arxiv.org/abs/2411.00640
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"need problems x draws, not an array of shape {array.shape}")
    problems, draws = array.shape
    by_problem = array.mean(axis=1)
    se = float(by_problem.std(ddof=1) / np.sqrt(problems)) if problems > 1 else None
    sampling_se = float(np.sqrt((array.var(axis=1, ddof=1) / draws).sum()) / problems) if draws > 1 else None
    return Estimate(float(by_problem.mean()), se, sampling_se)


def estimate_ratio(totals: Any, counts: Any) -> Estimate:
    """Sum of totals over sum of counts, e.g. nats per token: every token weighs the same, whatever response it is in.

    Errors are those of the linearised ratio (delta method), clustered by problem.

    Args:    totals, counts: (P, K), e.g. nats and tokens of each response.
    Raises:  ValueError if shapes differ or all counts are 0.
    """
    totals, counts = np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if totals.shape != counts.shape or counts.sum() <= 0:
        raise ValueError(f"totals {totals.shape} and counts {counts.shape}: need equal shapes and at least one token")
    ratio = totals.sum() / counts.sum()
    residual = estimate_mean((totals - ratio * counts) / counts.mean())
    return Estimate(float(ratio), residual.se, residual.sampling_se)
