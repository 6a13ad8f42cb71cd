"""Log-probabilities, exact KL and estimators against float64 brute force, and against what must not matter."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import utils_kl
from utils_kl import (estimate_mean, estimate_ratio, exact_token_kl, expm1_minus, head_kl, head_logprobs, kl_k1, kl_k2, kl_k3, pack_rows,
                      pad_rows, response_hidden, token_logprobs)

# A tiny float32 transformer against itself in another layout: sums of at most 64 terms of size 1, a few ULPs of 1e-7 each.
LAYOUT_TOLERANCE = 2e-5
STUDY_VOCABULARY = 151_936  # Qwen2.5


def tiny_model(vocab_size: int = 50, seed: int = 0, kind: str = "qwen2", **changes):
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config
    torch.manual_seed(seed)
    shape = dict(vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if kind != "gpt_neox":
        shape["num_key_value_heads"] = 1
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig, "gpt_neox": GPTNeoXConfig}[kind](**shape, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def perturbed(model, scale: float, seed: int = 1):
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * scale)
    return other


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
RESPONSES = [[1, 2, 3, 4], [20, 21], [30]]


def reference_logprobs(model, prompt, response, temperature=1.0):
    """float64 log-probabilities of one row, without padding, from the whole model."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.tensor([prompt + response])).logits[0]
    log_p = (logits / temperature).log_softmax(-1)
    return torch.stack([log_p[len(prompt) - 1 + j, token] for j, token in enumerate(response)])


# --------------------------------------------------------------------------------------------------------------------
# Rows

def test_pad_rows_by_hand():
    rows = pad_rows([[7, 8], [9]], [[1], [2, 3, 4]], pad_id=0)
    assert rows.input_ids.tolist() == [[7, 8, 1, 0], [9, 2, 3, 4]]
    assert rows.response_ids.tolist() == [[1, 0, 0], [2, 3, 4]]
    assert rows.response_mask.tolist() == [[True, False, False], [True, True, True]]
    # token j of a response is predicted at position len(prompt) - 1 + j; row 1 starts at flat position 4
    assert rows.hidden_index.tolist() == [1, 4, 5, 6]
    assert rows.cell_index.tolist() == [0, 3, 4, 5] and rows.sequence.tolist() == [0, 1, 1, 1]
    assert rows.targets.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("prompts, responses", [([[1]], [[1], [2]]), ([], []), ([[1], []], [[1], [2]])])
def test_pad_rows_refuses_what_nothing_can_predict(prompts, responses):
    with pytest.raises(ValueError):
        pad_rows(prompts, responses, 0)


@pytest.mark.parametrize("row_tokens", [12, 20, 64])
def test_packing_several_problems_into_a_row_changes_no_logprob(row_tokens):
    model = tiny_model()
    groups = [([5, 6, 7], [[1, 2, 3, 4], [1, 9], [30]]), ([8], [[20, 21]]), ([9, 10, 11, 12, 13], [[30], [31, 32, 33]])]
    rows = pack_rows(groups, row_tokens, 0)
    flat = [(prompt, response) for prompt, responses in groups for response in responses]
    assert rows.sequence.tolist() == [i for i, (_, response) in enumerate(flat) for _ in response]
    assert rows.targets.tolist() == [token for _, response in flat for token in response]
    with torch.no_grad():
        packed = head_logprobs(model.lm_head, response_hidden(model, rows), rows.targets)[0]
    expected = torch.cat([reference_logprobs(model, prompt, response) for prompt, response in flat])
    assert torch.allclose(packed.double(), expected, atol=LAYOUT_TOLERANCE, rtol=0)


def test_packing_refuses_a_group_that_does_not_fit():
    with pytest.raises(ValueError, match="does not fit"):
        pack_rows([([1, 2, 3], [[4, 5, 6], [7, 8]])], 5, 0)  # 3 + 2 + 1 tokens
    assert pack_rows([([1, 2, 3], [[4, 5, 6], [7, 8]])], 6, 0).input_ids.tolist() == [[1, 2, 3, 4, 5, 7]]


# --------------------------------------------------------------------------------------------------------------------
# Log-probabilities

@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt_neox"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_agree_with_the_whole_model_in_float64(kind, temperature):
    model = tiny_model(kind=kind)
    with torch.no_grad():
        logprobs, entropy = token_logprobs(model, pad_rows(PROMPTS, RESPONSES, 0), temperature)
    assert entropy is None and logprobs.dtype == torch.float32
    for row, prompt, response in zip(logprobs, PROMPTS, RESPONSES):
        expected = reference_logprobs(model, prompt, response, temperature)
        assert torch.allclose(row[:len(response)].double(), expected, atol=LAYOUT_TOLERANCE, rtol=0)
        assert row[len(response):].eq(0).all()


def test_entropy_is_that_of_the_whole_vocabulary_at_the_temperature():
    model = tiny_model()
    rows = pad_rows(PROMPTS, RESPONSES, 0)
    _, entropy = token_logprobs(model, rows, temperature=0.7, with_entropy=True)
    assert not entropy.requires_grad
    log_p = (copy.deepcopy(model).double()(torch.tensor([PROMPTS[0] + RESPONSES[0]])).logits[0] / 0.7).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)[len(PROMPTS[0]) - 1:-1]
    assert torch.allclose(entropy[0].double(), expected, atol=LAYOUT_TOLERANCE, rtol=0)
    assert entropy[2, 1:].eq(0).all()


def test_padding_and_row_order_and_chunks_do_not_matter():
    model = tiny_model()
    with torch.no_grad():
        together = token_logprobs(model, pad_rows(PROMPTS, RESPONSES, 0))[0]
        for pad_id, chunk in ((3, 0), (0, 1), (0, 2), (0, 5)):
            again = token_logprobs(model, pad_rows(PROMPTS, RESPONSES, pad_id), chunk_tokens=chunk)[0]
            assert torch.allclose(together, again, atol=LAYOUT_TOLERANCE, rtol=0)
        order = [2, 0, 1]
        turned = token_logprobs(model, pad_rows([PROMPTS[i] for i in order], [RESPONSES[i] for i in order], 0))[0]
        assert torch.allclose(together[order], turned, atol=LAYOUT_TOLERANCE, rtol=0)
        alone = token_logprobs(model, pad_rows(PROMPTS[:1], RESPONSES[:1], 0))[0]
    assert torch.allclose(together[:1, :4], alone, atol=LAYOUT_TOLERANCE, rtol=0)


def test_an_empty_response_gives_a_row_of_zeros():
    model = tiny_model()
    logprobs, entropy = token_logprobs(model, pad_rows([[1], [2]], [[], [3]], 0), with_entropy=True)
    assert logprobs.shape == (2, 1) and logprobs[0, 0] == 0 and logprobs[1, 0] < 0
    logprobs, entropy = token_logprobs(model, pad_rows([[1], [2]], [[], []], 0), with_entropy=True)
    assert logprobs.shape == entropy.shape == (2, 0)
    assert exact_token_kl(model, model, pad_rows([[1]], [[]], 0)).shape == (1, 0)


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_gradients_with_recomputed_logits_are_those_of_the_whole_graph(chunk, monkeypatch):
    monkeypatch.setattr(utils_kl, "KEEP_LOGIT_BYTES", 0)
    model = tiny_model()
    weights = torch.linspace(-1, 2, 12).view(3, 4)
    logprobs, entropy = token_logprobs(model, pad_rows(PROMPTS, RESPONSES, 0), 0.9, with_entropy=True, chunk_tokens=chunk)
    (logprobs * weights).sum().backward()
    double = copy.deepcopy(model).double()
    double.zero_grad()
    loss = 0
    for row, prompt, response in zip(weights, PROMPTS, RESPONSES):
        log_p = (double(torch.tensor([prompt + response])).logits[0] / 0.9).log_softmax(-1)
        loss = loss + sum(row[j] * log_p[len(prompt) - 1 + j, token] for j, token in enumerate(response))
    loss.backward()
    for (name, p), q in zip(model.named_parameters(), double.parameters()):
        # float32 backward through two layers: relative to the largest entry of each gradient
        assert (p.grad.double() - q.grad).abs().max() <= 2e-5 * q.grad.abs().max().clamp(min=1e-3), name


def test_no_logits_are_kept_for_the_backward_pass_of_a_large_vocabulary():
    torch.manual_seed(0)
    head = torch.nn.Linear(8, STUDY_VOCABULARY, bias=False)
    hidden = torch.randn(300, 8, requires_grad=True)
    assert 300 * STUDY_VOCABULARY * 4 > utils_kl.KEEP_LOGIT_BYTES
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        logprobs = head_logprobs(head, hidden, torch.arange(300))[0]
    chunk = utils_kl.chunk_size(STUDY_VOCABULARY, hidden.device)
    assert max(saved) <= head.weight.numel() < chunk * STUDY_VOCABULARY
    logprobs.sum().backward()
    assert hidden.grad.abs().sum() > 0 and head.weight.grad.abs().sum() > 0


def test_logprobs_are_within_1e5_of_float64_at_the_studys_vocabulary():
    torch.manual_seed(0)
    head = torch.nn.Linear(64, STUDY_VOCABULARY, bias=False)
    torch.nn.init.normal_(head.weight, std=0.4)  # logits of standard deviation 3, log-probabilities down to -30
    hidden = torch.randn(128, 64)
    targets = torch.randint(0, STUDY_VOCABULARY, (128,))
    with torch.no_grad():
        logits = head(hidden)
        ours = head_logprobs(head, hidden, targets, with_entropy=True)
    exact = logits.double().log_softmax(-1)  # of the same float32 logits: the product's own rounding is the model's
    assert (ours[0].double() - exact.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-5
    assert (ours[1].double() + (exact.exp() * exact).sum(-1)).abs().max() < 1e-5


def test_low_precision_logits_are_upcast_before_the_normaliser():
    model = tiny_model().bfloat16()
    with torch.no_grad():
        logprobs = token_logprobs(model, pad_rows(PROMPTS[:1], RESPONSES[:1], 0))[0]
        logits = model(torch.tensor([PROMPTS[0] + RESPONSES[0]])).logits[0, len(PROMPTS[0]) - 1:-1]
    assert logits.dtype == torch.bfloat16
    expected = logits.double().log_softmax(-1).gather(1, torch.tensor(RESPONSES[0])[:, None])[:, 0]
    # of the bf16 logits as they are: only float32 rounding remains, not the 2^-8 of a bf16 log-softmax
    assert torch.allclose(logprobs[0].double(), expected, atol=1e-5, rtol=0)


def test_a_model_that_changes_logits_after_its_head_is_refused():
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        token_logprobs(model, pad_rows([[1]], [[2]], 0))
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(tiny_model(), pad_rows([[1]], [[2]], 0), temperature=0.0)


MEASURE = """
    import resource, sys, time, torch
    sys.path.insert(0, {root!r})
    torch.set_num_threads(1)
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from utils_kl import exact_token_kl, pad_rows, token_logprobs
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size={vocab}, hidden_size={hidden}, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1)
    model = Qwen2ForCausalLM(config).eval()
    ids = torch.randint(0, {vocab}, (8, {tokens} // 8 + 1))
    rows = pad_rows([r[:1].tolist() for r in ids], [r[1:].tolist() for r in ids], 0)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with torch.no_grad():
        model.model(ids[:, :2])
        before, start = peak(), time.process_time()
        if {what!r} == "ours":
            token_logprobs(model, rows)
        elif {what!r} == "exact":
            exact_token_kl(model, model, rows)
        else:
            logits = model(ids).logits[:, :-1].float()
            logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
    print(peak() - before, time.process_time() - start)
"""


def measure(root, what: str, tokens: int, hidden: int = 64) -> tuple[float, float]:
    """Extra memory in MB (1e6 bytes would be 5 % more) and CPU seconds of one call in a fresh process."""
    code = textwrap.dedent(MEASURE.format(root=str(root), vocab=STUDY_VOCABULARY, hidden=hidden, what=what, tokens=tokens))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    megabytes, seconds = map(float, done.stdout.split())
    return megabytes, seconds


@pytest.mark.parametrize("what, tokens", [("ours", 1024), ("exact", 256)])
def test_memory_does_not_grow_with_the_number_of_tokens(repo_root, what, tokens):
    # 1,024 tokens x 151,936 logits x 4 bytes = 594 MB; two chunks of 64 MiB and their temporaries are what may exist
    assert measure(repo_root, what, tokens)[0] < 400


@pytest.mark.slow
def test_memory_and_time_at_4096_tokens_of_the_studys_vocabulary(repo_root):
    naive_mb, naive_s = measure(repo_root, "naive", 4096, hidden=256)
    ours_mb, ours_s = measure(repo_root, "ours", 4096, hidden=256)
    exact_mb, _ = measure(repo_root, "exact", 4096, hidden=256)
    assert naive_mb > 2300 and ours_mb < 400 and exact_mb < 400
    assert ours_s < 1.2 * naive_s


# --------------------------------------------------------------------------------------------------------------------
# Exact KL

END, LENGTH = 2, 5  # vocabulary {0, 1, 2}; a sequence ends with token 2 or after five tokens


def all_sequences() -> list[list[int]]:
    open_part = [list(s) for n in range(LENGTH) for s in itertools.product([0, 1], repeat=n)]
    return [s + [END] for s in open_part] + [list(s) for s in itertools.product([0, 1], repeat=LENGTH)]


def sequence_logprobs(model, prompt, sequences) -> torch.Tensor:
    """float64 log-probability of each whole sequence."""
    return torch.stack([reference_logprobs(model, prompt, s).sum() for s in sequences])


@pytest.fixture(scope="module")
def three_token_models():
    policy = tiny_model(vocab_size=3)
    return policy, perturbed(policy, 0.15)


def test_exact_kl_weighted_over_all_sequences_equals_brute_force(three_token_models):
    policy, ref = three_token_models
    prompt, sequences = [0, 1], all_sequences()
    log_p, log_q = (sequence_logprobs(m, prompt, sequences) for m in (policy, ref))
    assert log_p.exp().sum().item() == pytest.approx(1.0, abs=1e-12)  # the list is complete
    brute = (log_p.exp() * (log_p - log_q)).sum().item()
    assert brute > 0.05  # a test on equal models would show nothing
    exact = exact_token_kl(policy, ref, pad_rows([prompt] * len(sequences), sequences, 0)).double().sum(1)
    assert (log_p.exp() * exact).sum().item() == pytest.approx(brute, abs=1e-6)


def test_exact_and_monte_carlo_agree_with_brute_force_and_exact_varies_less(three_token_models):
    policy = three_token_models[0]
    ref = perturbed(policy, 0.02)  # a policy near its reference, as after training; far away the order can turn round
    prompt, sequences = [0, 1], all_sequences()
    log_p, log_q = (sequence_logprobs(m, prompt, sequences) for m in (policy, ref))
    brute = (log_p.exp() * (log_p - log_q)).sum().item()
    draws = torch.multinomial(log_p.exp(), 2000, replacement=True, generator=torch.Generator().manual_seed(0))
    rows = pad_rows([prompt] * len(sequences), sequences, 0)
    with torch.no_grad():
        log_ratio = (token_logprobs(policy, rows)[0] - token_logprobs(ref, rows)[0]).sum(1)
        exact = exact_token_kl(policy, ref, rows).sum(1)
    monte_carlo, rao_blackwell = (estimate_mean(x[draws][None].numpy()) for x in (log_ratio, exact))
    # one prompt, 2,000 draws: the sampling error is the whole error; three standard errors, fixed seed
    assert abs(monte_carlo.mean - brute) < 3 * monte_carlo.sampling_se
    assert abs(rao_blackwell.mean - brute) < 3 * rao_blackwell.sampling_se
    assert rao_blackwell.sampling_se < monte_carlo.sampling_se


def test_exact_kl_is_that_of_each_next_token_distribution():
    policy = tiny_model()
    ref = perturbed(policy, 0.05)
    kl = exact_token_kl(policy, ref, pad_rows(PROMPTS, RESPONSES, 0), chunk_tokens=2)
    for row, prompt, response in zip(kl, PROMPTS, RESPONSES):
        log_p, log_q = (copy.deepcopy(m).double()(torch.tensor([prompt + response])).logits[0].log_softmax(-1) for m in (policy, ref))
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)[len(prompt) - 1:-1]
        assert torch.allclose(row[:len(response)].double(), expected, atol=1e-5, rtol=1e-4)
        assert row[len(response):].eq(0).all()


def test_kl_of_a_model_with_itself_is_exactly_zero_in_every_estimator():
    model = tiny_model()
    rows = pad_rows(PROMPTS, RESPONSES, 0)
    twin = copy.deepcopy(model)
    assert exact_token_kl(model, twin, rows).eq(0).all()
    with torch.no_grad():
        a, b = (token_logprobs(m, rows)[0] for m in (model, twin))
    assert [f(a, b, rows.response_mask).item() for f in (kl_k1, kl_k2, kl_k3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-3])
def test_exact_kl_of_a_hardly_moved_distribution_keeps_its_digits(scale):
    torch.manual_seed(0)
    identity = torch.nn.Linear(5000, 5000, bias=False)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(5000))
    z = 3 * torch.randn(8, 5000)
    moved = z + scale * torch.randn(8, 5000)
    kl = head_kl(identity, identity, z, moved)
    log_p, log_q = z.double().log_softmax(-1), moved.double().log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    plain = (z.log_softmax(-1).exp() * (z.log_softmax(-1) - moved.log_softmax(-1))).sum(-1)
    # log-ratios are differences of float32 log-probabilities near -8 (ULP 5e-7 to 1e-6), squared: at scale 1e-5 a tenth of each
    # is noise, whose square adds 1 % on average
    assert torch.allclose(kl.double(), expected, rtol=0.02 if scale == 1e-5 else 2e-3, atol=0)
    if scale == 1e-5:
        assert (plain.double() - expected).abs().max() > 10 * (kl.double() - expected).abs().max()  # why the other form is used


def test_exact_kl_stays_finite_where_a_probability_underflows():
    identity = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(3))
    z, other = torch.tensor([[0.0, -300.0, -1.0]]), torch.tensor([[-300.0, 0.0, -1.0]])
    log_p, log_q = z.double().log_softmax(-1), other.double().log_softmax(-1)
    assert head_kl(identity, identity, z, other).item() == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item(), rel=1e-6)


def test_models_of_two_vocabularies_are_refused():
    with pytest.raises(ValueError, match="50 and 49"):
        exact_token_kl(tiny_model(), tiny_model(vocab_size=49), pad_rows([[1]], [[2]], 0))


# --------------------------------------------------------------------------------------------------------------------
# Estimators

def test_estimators_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    logprobs, ref = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]]), torch.tensor([[-1.5, -1.0], [-0.5, 0.0]])
    # log-ratios 0.5, -1, 0 on three tokens: not the mean of row means (-0.25 and 0)
    assert kl_k1(logprobs, ref, mask).item() == pytest.approx(-0.5 / 3, abs=1e-7)
    assert kl_k2(logprobs, ref, mask).item() == pytest.approx((0.25 + 1) / 2 / 3, abs=1e-7)
    expected = (np.exp(-0.5) - 1 + 0.5) + (np.exp(1.0) - 1 - 1.0)
    assert kl_k3(logprobs, ref, mask).item() == pytest.approx(expected / 3, abs=1e-6)


def test_a_masked_value_cannot_reach_the_result_whatever_it_is():
    mask = torch.tensor([[True, False]])
    for bad in (float("nan"), float("inf"), -1e4):
        logprobs, ref = torch.tensor([[-1.0, bad]], requires_grad=True), torch.tensor([[-1.2, 0.0]])
        value = kl_k3(logprobs, ref, mask)
        value.backward()
        assert value.item() == pytest.approx(np.exp(-0.2) - 1 + 0.2, rel=1e-5)
        assert logprobs.grad[0, 1] == 0 and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-3, 0.02, 0.029, 0.031, 0.5, 5.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_terms_keep_their_digits_and_are_never_negative(size, sign):
    x = sign * size * torch.linspace(0.5, 1.5, 1001)
    exact = torch.expm1(x.double()) - x.double() if size > 1e-3 else x.double() ** 2 / 2 + x.double() ** 3 / 6 + x.double() ** 4 / 24
    value = expm1_minus(x)
    assert value.min() >= 0
    # 2e-5 just above the limit of the series, where the subtraction starts to lose digits; 1e-6 elsewhere would hold
    assert torch.allclose(value.double(), exact, rtol=2e-5, atol=0)


def test_k3_is_unbiased_where_k2_is_not():
    generator = torch.Generator().manual_seed(0)
    log_p = torch.tensor([0.7, 0.2, 0.1]).log()
    log_q = torch.tensor([0.2, 0.3, 0.5]).log()
    truth = (log_p.exp() * (log_p - log_q)).sum().item()
    tokens = torch.multinomial(log_p.exp(), 200_000, replacement=True, generator=generator)[None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    a, b = log_p[tokens], log_q[tokens]
    # standard errors at 200,000 draws are below 0.003; k2 is off by 0.061
    assert kl_k1(a, b, mask).item() == pytest.approx(truth, abs=0.01)
    assert kl_k3(a, b, mask).item() == pytest.approx(truth, abs=0.01)
    assert abs(kl_k2(a, b, mask).item() - truth) > 0.04


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_estimators_refuse_wrong_input(estimator):
    a, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes"):
        estimator(a, a[:, :2], mask)
    with pytest.raises(ValueError, match="bfloat16"):
        estimator(a.bfloat16(), a, mask)
    with pytest.raises(ValueError, match="all False"):
        estimator(a, a, ~mask)


def test_mean_and_both_standard_errors_by_hand():
    values = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    estimate = estimate_mean(values)
    assert estimate.mean == 0.5
    assert estimate.se == pytest.approx(np.std([0.5, 1.0, 0.0], ddof=1) / np.sqrt(3))
    # only the first problem's draws differ: variance 0.5 over 2 draws, divided by 3 problems
    assert estimate.sampling_se == pytest.approx(np.sqrt(0.5 / 2) / 3)
    assert estimate_mean([[1.0, 2.0]]).se is None and estimate_mean([[1.0], [2.0]]).sampling_se is None
    for wrong in ([], [[]], [1.0, 2.0]):
        with pytest.raises(ValueError):
            estimate_mean(wrong)


def test_standard_error_of_a_ratio_matches_its_spread_over_repetitions():
    generator = np.random.default_rng(0)

    def experiment():
        counts = generator.integers(1, 20, size=(60, 4))
        level = generator.normal(1.0, 0.5, size=(60, 1))  # problems differ: draws of one problem are not independent
        return estimate_ratio(counts * (level + generator.normal(0, 0.3, size=(60, 4))), counts)

    repeated = [experiment() for _ in range(400)]
    spread = np.std([e.mean for e in repeated], ddof=1)
    # 400 repetitions know the spread to 3.5 %; the linearisation is good to a few percent at 60 problems
    assert np.mean([e.se for e in repeated]) == pytest.approx(spread, rel=0.12)
    assert estimate_ratio([[2.0, 4.0]], [[1, 3]]).mean == 1.5
    with pytest.raises(ValueError):
        estimate_ratio([[1.0]], [[0]])
