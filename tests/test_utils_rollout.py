"""utils_rollout: the sampling distribution, independence of the batch, log-probabilities, end tokens, bad requests."""

import math

import pytest
import torch

import utils_precision as up
from config import UserError
from utils_rollout import (HFEngine, SamplingParams, nucleus_logprobs, problem_key, race_variables, row_key, sample_tokens)

VOCABULARY = 40
END = 39


class Tokenizer:
    """The part of a tokenizer that the engine asks: ids 0..36 and the end token exist; rows 37 and 38 stand for nothing."""

    eos_token_id = END

    def get_vocab(self):
        return {f"t{i}": i for i in range(VOCABULARY) if i not in (37, 38)}


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen2Config, Qwen2ForCausalLM
    up.setup_numerics(False)
    torch.manual_seed(3)
    config = Qwen2Config(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
                         attn_implementation=up.ATTENTION_NAME, initializer_range=0.2, eos_token_id=END, pad_token_id=0,
                         bos_token_id=None)
    return Qwen2ForCausalLM(config).eval()


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 16]]
KEYS = [problem_key(f"p{i}") for i in range(len(PROMPTS))]


def generate(model, prompts=PROMPTS, keys=KEYS, samples=3, batch_size=256, stream=(1,), **params):
    sampling = SamplingParams(**{"max_new_tokens": 20, "seed": 5, **params})
    return HFEngine(model, Tokenizer(), batch_size).generate(prompts, samples, sampling, stream, keys)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of a chi-square goodness-of-fit test over cells with an expected count of at least 5."""
    from scipy.stats import chisquare
    expected = probabilities.double() * counts.sum()
    kept = expected >= 5
    rest = torch.tensor([float(counts[~kept].sum())]), torch.tensor([float(expected[~kept].sum())])
    observed, expected = torch.cat([counts[kept].double(), rest[0]]), torch.cat([expected[kept], rest[1]])
    nonzero = expected > 0
    return float(chisquare(observed[nonzero].numpy(), (expected[nonzero] / expected[nonzero].sum() * observed[nonzero].sum()).numpy()).pvalue)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.8), (1.5, 0.95)])
def test_50000_sampled_tokens_follow_the_distribution(temperature, top_p):
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)) * 2
    rows = 50_000
    keys = torch.tensor([row_key(1, (2,), 3, j) for j in range(rows)], dtype=torch.int32)
    tokens, logprobs = sample_tokens(logits.expand(rows, -1), keys, torch.zeros(rows, dtype=torch.int32),
                                     SamplingParams(temperature, top_p), torch.arange(100, dtype=torch.int32))
    expected = (logits[0].double() / temperature).softmax(-1)
    if top_p < 1:
        order = expected.argsort(descending=True)
        before = expected[order].cumsum(0) - expected[order]
        expected[order[before >= top_p]] = 0
        expected /= expected.sum()
    counts = torch.bincount(tokens, minlength=100)
    assert int(counts[expected == 0].sum()) == 0
    assert chi_square(counts, expected) > 1e-3  # a right sampler fails once in a thousand seeds; this seed is fixed
    assert torch.allclose(logprobs.double(), expected[tokens].log(), atol=1e-5)  # float32 logsumexp


def test_race_variables_are_exponential_and_depend_on_indices_alone():
    from scipy.stats import kstest
    keys = torch.tensor([row_key(0, (1,), 2, j) for j in range(500)], dtype=torch.int32)
    vocabulary = torch.arange(200, dtype=torch.int32)
    values = race_variables(keys, torch.zeros(500, dtype=torch.int32), vocabulary)
    assert kstest(values.flatten().double().numpy(), "expon").pvalue > 1e-3
    assert torch.equal(values[7:9, 50:60], race_variables(keys[7:9], torch.zeros(2, dtype=torch.int32), vocabulary[50:60]))
    # neighbours in each index are uncorrelated: standard error of a correlation of 1e5 pairs is 0.0032
    for a, b in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.015


def test_same_tokens_whatever_the_batch(model):
    whole = generate(model, batch_size=64)
    for batch_size in (1, 2, 7):
        assert generate(model, batch_size=batch_size).responses == whole.responses
    order = [3, 1, 4, 0, 2]
    shuffled = generate(model, [PROMPTS[i] for i in order], [KEYS[i] for i in order])
    assert [shuffled.responses[order.index(i) * 3:order.index(i) * 3 + 3] for i in range(5)] == \
        [whole.responses[i * 3:i * 3 + 3] for i in range(5)]
    assert generate(model, samples=2).responses == [r for i, r in enumerate(whole.responses) if i % 3 < 2]


def test_other_seed_stream_or_problem_draws_other_tokens(model):
    base = generate(model).responses
    assert generate(model).responses == base
    assert generate(model, seed=6).responses != base
    assert generate(model, stream=(2,)).responses != base
    assert generate(model, keys=[k + 1 for k in KEYS]).responses != base
    assert base[0] != base[1]  # samples of one problem differ


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8)])
def test_logprobs_equal_a_full_forward_without_cache(model, temperature, top_p):
    out = generate(model, temperature=temperature, top_p=top_p)
    for prompt, response, logprobs in zip(out.prompts, out.responses, out.logprobs):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1].float()
        logits[:, [37, 38]] = -math.inf
        full = (logits / temperature).log_softmax(-1)
        if top_p < 1:
            full = nucleus_logprobs(full, top_p)
        expected = full.gather(1, torch.tensor(response)[:, None])[:, 0]
        # float32 through two layers in another order of operations
        assert torch.allclose(torch.tensor(logprobs), expected, atol=2e-5)


def test_left_or_right_padding_cannot_matter(model):
    """A prompt alone and the same prompt beside a much longer one."""
    alone = generate(model, [PROMPTS[3]], [KEYS[3]])
    beside = generate(model, [PROMPTS[3], [17] * 40], [KEYS[3], 99])
    assert beside.responses[:3] == alone.responses
    assert torch.allclose(torch.tensor(sum(beside.logprobs[:3], [])), torch.tensor(sum(alone.logprobs, [])), atol=1e-5)


def test_end_token_ends_and_is_part_of_the_response(model):
    out = generate(model, samples=20)
    assert {"stop", "length"} == set(out.finish_reasons)
    for response, reason, logprobs in zip(out.responses, out.finish_reasons, out.logprobs):
        assert END not in response[:-1] and len(logprobs) == len(response)
        assert (response[-1] == END) == (reason == "stop")
        assert reason == "stop" or len(response) == 20
        assert not {37, 38} & set(response)  # rows without a token are never sampled


def test_every_end_token_of_the_generation_config_ends(model):
    model.generation_config.eos_token_id = [END, 5]
    try:
        out = generate(model, samples=20)
    finally:
        model.generation_config.eos_token_id = END
    assert {response[-1] for response, reason in zip(out.responses, out.finish_reasons) if reason == "stop"} == {END, 5}
    assert all(not {END, 5} & set(response[:-1]) for response in out.responses)


def test_generation_config_values_do_not_leak_in(model):
    base = generate(model).responses
    model.generation_config.temperature, model.generation_config.top_p = 0.1, 0.1
    model.generation_config.repetition_penalty = 2.0
    assert generate(model).responses == base


def test_greedy_is_the_argmax_of_the_forward(model):
    out = generate(model, temperature=0.0, samples=1)
    prompt, response = out.prompts[0], out.responses[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
    logits[:, [37, 38]] = -math.inf
    assert logits.argmax(-1).tolist() == response


def test_one_new_token_and_a_prompt_that_ends_in_eos(model):
    assert all(len(r) == 1 for r in generate(model, max_new_tokens=1).responses)
    assert len(generate(model, [[3, END]], [1]).responses) == 3


@pytest.mark.parametrize("prompts, message", [([[]], "prompt 0 is empty"), ([[1] * 60], "context of 64"), ([[1, 400]], "outside the vocabulary")])
def test_bad_prompts_are_refused(model, prompts, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompts, [1])


def test_bad_sampling_parameters_are_refused():
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}):
        with pytest.raises(UserError):
            SamplingParams(**bad)


def test_low_precision_engine_runs_on_the_emulated_products():
    from transformers import Qwen2ForCausalLM
    up.setup_numerics(False, cpu_matmul="emulated")
    torch.manual_seed(3)
    from transformers import Qwen2Config
    config = Qwen2Config(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, attn_implementation=up.ATTENTION_NAME, initializer_range=0.2,
                         eos_token_id=END, pad_token_id=0, bos_token_id=None)
    low = Qwen2ForCausalLM(config).bfloat16().eval()
    up.emulate_low_precision(low)
    out = generate(low)
    assert all(all(math.isfinite(x) for x in row) for row in out.logprobs)
    up.setup_numerics(False)


def test_nan_weights_are_named(model):
    import copy

    from config import WorkError
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(WorkError, match="not finite"):
        generate(broken)
