"""Prompts in; sampled tokens, their log-probabilities and finish reasons out.

Sampling is Gumbel-max in its exponential-race form: the next token is argmax(log p - log E), with one exponential variable E per
vocabulary entry hashed from (seed, stream, problem, sample index, token index, vocabulary id). The random numbers therefore depend
neither on the batch nor on the number of processes, and every arm with one seed uses the same ones.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Iterable

import torch
from torch import Tensor, nn

from config import UserError, WorkError
from utils_precision import as_int32, hash_u32, stable_hash

CANDIDATE_NATS = 30.0  # tokens this far below the best one are never sampled: probability under V * e^-30, 1e-8 at V = 152k
COMPACT_BELOW = 0.75  # finished rows are dropped from the batch when fewer than this share of its rows is still running
FIRST_NUCLEUS = 64  # candidates looked at first for top-p; four times more while their mass is below top_p


@dataclass(frozen=True)
class SamplingParams:
    """Everything that defines the sampling distribution. temperature 0 is greedy; top_p 1 is the whole distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < 100.0:
            raise UserError(f"temperature {self.temperature}: must be at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p {self.top_p}: must be in (0, 1]")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Rollouts:
    """Flat results; row = prompt index * num_samples + sample index.

    prompts, responses: token ids (a response holds its end-of-sequence token). logprobs: natural log-probability of each response
    token under the sampling distribution (temperature and top-p applied). finish_reasons: "stop" or "length".
    """

    prompts: list[list[int]] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


def problem_key(problem_id: str) -> int:
    """A stable integer for a problem id, the part of the sampling hash that stands for the problem."""
    return stable_hash("problem", problem_id)


# --------------------------------------------------------------------------------------------------------------------
# Sampling

def race_variables(row_keys: Tensor, token_index: Tensor, vocabulary: Tensor) -> Tensor:
    """Exponential(1) variables hashed from their indices alone.

    Args:    row_keys: (B, 2) int32, the hash of (seed, stream, problem, sample). token_index: (B,) int32.
             vocabulary: (C,) or (B, C) int32 vocabulary ids.
    Returns: (B, C) float32, positive.
    """
    row = hash_u32(hash_u32(row_keys[:, 0] ^ hash_u32(token_index)) ^ row_keys[:, 1])
    bits = hash_u32(hash_u32(vocabulary ^ row[:, None]) + row[:, None])
    uniform = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0 ** -31  # in (0, 1]; small values keep full precision
    return -torch.log1p(-uniform.clamp(max=1 - 2.0 ** -24))  # the race is won by small values, so log1p, not log


def row_key(seed: int, stream: tuple[int, ...], problem: int, sample: int) -> tuple[int, int]:
    """Two 32-bit words that identify one response's random numbers."""
    value = stable_hash("row", seed, *stream, problem, sample)
    return as_int32(value), as_int32(value >> 32)


def nucleus_logprobs(logprobs: Tensor, top_p: float) -> Tensor:
    """log-probabilities of the smallest set of likeliest tokens whose mass reaches top_p, renormalised; -inf outside.

    Args:    logprobs: (B, V) float32. top_p: in (0, 1).
    No full sort: the likeliest FIRST_NUCLEUS tokens are looked at, four times more while any row's mass is below top_p.
    """
    vocabulary = logprobs.shape[-1]
    count = min(FIRST_NUCLEUS, vocabulary)
    while True:
        top, ids = logprobs.topk(count, dim=-1, sorted=True)
        mass = top.exp()
        # Exclusive running sum as a product with a triangular matrix: cumsum has no deterministic CUDA kernel.
        before = mass @ torch.ones(count, count, device=mass.device).triu_(diagonal=1)
        if count == vocabulary or bool((before[:, -1] + mass[:, -1] >= top_p).all()):
            break
        count = min(4 * count, vocabulary)
    kept = before < top_p  # the token that crosses top_p is in; the first one always
    top = top.masked_fill(~kept, -math.inf)
    top = top - torch.logsumexp(top, dim=-1, keepdim=True)
    return torch.full_like(logprobs, -math.inf).scatter_(1, ids, top)


def sample_tokens(logits: Tensor, row_keys: Tensor, token_index: Tensor, sampling: SamplingParams,
                  vocabulary: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by exponential race, and its log-probability under the sampling distribution.

    Args:    logits: (B, V) float32, rows without a token at -inf. row_keys, token_index: see race_variables.
             vocabulary: (V,) int32 ids, 0 .. V-1.
    Returns: tokens (B,) int64, logprobs (B,) float32.
    """
    if sampling.temperature == 0.0:
        tokens = logits.argmax(dim=-1)
        return tokens, torch.zeros(tokens.shape, device=tokens.device)  # greedy: the chosen token has probability one
    scaled = logits / sampling.temperature if sampling.temperature != 1.0 else logits
    logprobs = scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)
    if sampling.top_p < 1.0:
        logprobs = nucleus_logprobs(logprobs, sampling.top_p)
    race = logprobs - race_variables(row_keys, token_index, vocabulary).log()
    race = race.masked_fill(logprobs < logprobs.amax(dim=-1, keepdim=True) - CANDIDATE_NATS, -math.inf)
    tokens = race.argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


# --------------------------------------------------------------------------------------------------------------------
# Token sets

def end_token_ids(model: nn.Module, tokenizer) -> list[int]:
    """Every id that ends a response: the generation config's (one or several), the model config's and the tokenizer's."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, (list, tuple)) else [ids] if ids is not None else [])
    if not found:
        raise UserError("neither the model nor its tokenizer names an end-of-sequence token")
    return sorted(found)


def unused_vocabulary(model: nn.Module, tokenizer) -> list[int]:
    """Vocabulary rows of the model that stand for no token (padding of the embedding matrix)."""
    used = set(tokenizer.get_vocab().values())
    return [i for i in range(model.get_output_embeddings().weight.shape[0]) if i not in used]


def check_requests(prompts: list[list[int]], num_samples: int, sampling: SamplingParams, context: int, vocabulary: int) -> None:
    """UserError for an empty prompt, an id outside the vocabulary, or prompt + response beyond the model's context."""
    if num_samples < 1:
        raise UserError(f"num_samples {num_samples}: must be at least 1")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty")
        if len(prompt) + sampling.max_new_tokens > context:
            raise UserError(f"prompt {i} has {len(prompt)} tokens; with {sampling.max_new_tokens} new ones it exceeds the model's "
                            f"context of {context}")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise UserError(f"prompt {i} holds a token id outside the vocabulary of {vocabulary}")


# --------------------------------------------------------------------------------------------------------------------
# hf engine

class SlotCache:
    """Key/value cache with one slot per position and row: prompt tokens at 0..len-1, generated ones after them, no left padding.

    Speaks the part of transformers' Cache interface that a decoder layer calls (``update``) and its mask helper asks (lengths).
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.write_at: Tensor | None = None  # (B,) slot of this step's token; None while the prompts are read
        self.rows: Tensor | None = None
        self.used = 0  # slots that any row uses

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used + query_length, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.write_at is None:  # prompts: (P, H, L, D)
            self.keys.append(key)
            self.values.append(value)
            return key, value
        self.keys[layer_idx][self.rows, :, self.write_at] = key[:, :, 0]
        self.values[layer_idx][self.rows, :, self.write_at] = value[:, :, 0]
        return self.keys[layer_idx][:, :, :self.used], self.values[layer_idx][:, :, :self.used]

    def expand(self, num_samples: int, slots: int) -> None:
        """One row per sample, with room for ``slots`` positions."""
        def grow(t: Tensor) -> Tensor:
            p, h, length, d = t.shape
            out = t.new_zeros(p, num_samples, h, slots, d)
            out[:, :, :, :length] = t[:, None]
            return out.view(p * num_samples, h, slots, d)
        self.keys = [grow(t) for t in self.keys]
        self.values = [grow(t) for t in self.values]

    def select(self, rows: Tensor) -> None:
        self.keys = [t[rows] for t in self.keys]
        self.values = [t[rows] for t in self.values]


class HFEngine:
    """Samples from a transformers model in this process.

    Args: model: causal language model, in the arm's rollout format. tokenizer: names the tokens that exist.
          batch_size: responses sampled together. follow: master weights by name, which sync() copies into ``model``; None where
          ``model`` is the trainer's own module.
    """

    name = "hf"

    def __init__(self, model: nn.Module, tokenizer, batch_size: int = 256, follow: dict[str, Tensor] | None = None) -> None:
        self.model, self.batch_size, self.follow = model, batch_size, follow
        self.device = next(model.parameters()).device
        self.vocabulary_size = model.get_output_embeddings().weight.shape[0]
        self.context = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        self.end_ids = torch.tensor(end_token_ids(model, tokenizer), device=self.device)
        self.unused = torch.tensor(unused_vocabulary(model, tokenizer), dtype=torch.int64, device=self.device)
        self.vocabulary = torch.arange(self.vocabulary_size, dtype=torch.int32, device=self.device)

    def describe(self) -> dict[str, Any]:
        """Engine, versions and formats, for the result files."""
        import transformers
        return {"engine": self.name, "version": transformers.__version__, "torch": torch.__version__,
                "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()})),
                "end_token_ids": self.end_ids.tolist(), "context": self.context, "batch_size": self.batch_size}

    def weight_dtypes(self) -> Iterable[torch.dtype]:
        return (p.dtype for p in self.model.parameters())

    @torch.no_grad()
    def sync(self) -> None:
        """Take over the trainer's newest weights."""
        if self.follow is not None:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.follow[name])

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], num_samples: int, sampling: SamplingParams, stream: tuple[int, ...],
                 problem_keys: list[int], progress=None) -> Rollouts:
        """Sample ``num_samples`` responses for each prompt.

        Args:    prompts: token ids. stream: integers that, with the seed, name this use of random numbers (step, batch, ...).
                 problem_keys: one integer per prompt (see problem_key). progress: called with the number of finished responses.
        Returns: Rollouts in the order of the prompts, whatever the order in which they were computed.
        Raises:  UserError for an empty prompt or one that exceeds the context with its response.
        """
        check_requests(prompts, num_samples, sampling, self.context, self.vocabulary_size)
        was_training = self.model.training
        self.model.eval()
        rows: list[tuple[list[int], list[float], str] | None] = [None] * (len(prompts) * num_samples)
        # Similar lengths together: less padding. A chunk holds whole groups; a group larger than the batch is split.
        samples = min(num_samples, self.batch_size)
        groups = max(1, self.batch_size // samples)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first_sample in range(0, num_samples, samples):
            count = min(samples, num_samples - first_sample)
            for start in range(0, len(order), groups):
                chunk = order[start:start + groups]
                keys = [row_key(sampling.seed, stream, problem_keys[i], first_sample + j) for i in chunk for j in range(count)]
                done = self._generate_chunk([prompts[i] for i in chunk], count, sampling, keys)
                for k, i in enumerate(chunk):
                    for j in range(count):
                        rows[i * num_samples + first_sample + j] = done[k * count + j]
                if progress:
                    progress(len(done))
        self.model.train(was_training)
        return Rollouts([p for p in prompts for _ in range(num_samples)], [r[0] for r in rows], [r[1] for r in rows],
                        [r[2] for r in rows])

    def _hidden_to_logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        if len(self.unused):
            logits.index_fill_(1, self.unused, -math.inf)
        return logits

    def _generate_chunk(self, prompts: list[list[int]], num_samples: int, sampling: SamplingParams,
                        keys: list[tuple[int, int]]) -> list[tuple[list[int], list[float], str]]:
        device, body = self.device, self.model.base_model
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = int(lengths.max())
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, :len(prompt)] = torch.tensor(prompt)
        cache = SlotCache()
        # Right padding and causal attention: pads come after every real token of their row, so no mask is needed.
        hidden = body(input_ids=ids.to(device), past_key_values=cache, use_cache=True).last_hidden_state
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        logits = self._hidden_to_logits(last).repeat_interleave(num_samples, dim=0)
        cache.expand(num_samples, longest + sampling.max_new_tokens)

        total = len(prompts) * num_samples
        position = lengths.repeat_interleave(num_samples)  # slot and position of the next token
        row_keys = torch.tensor(keys, dtype=torch.int32, device=device)
        active = torch.arange(total, device=device)
        tokens = torch.zeros(total, sampling.max_new_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros(total, sampling.max_new_tokens, device=device)
        out_length = torch.full((total,), sampling.max_new_tokens, device=device)
        stopped = torch.zeros(total, dtype=torch.bool, device=device)

        running = torch.ones(total, dtype=torch.bool, device=device)  # of the rows still in the batch
        for t in range(sampling.max_new_tokens):
            step_index = torch.full((len(active),), t, dtype=torch.int32, device=device)
            chosen, chosen_logprobs = sample_tokens(logits, row_keys, step_index, sampling, self.vocabulary)
            tokens[active, t], logprobs[active, t] = chosen, chosen_logprobs
            ended = torch.isin(chosen, self.end_ids) & running
            out_length[active[ended]] = t + 1
            stopped[active[ended]] = True
            running &= ~ended
            left = int(running.sum())
            if left == 0 or t + 1 == sampling.max_new_tokens:
                break
            if left < COMPACT_BELOW * len(active):
                keep = running.nonzero()[:, 0]
                cache.select(keep)
                active, chosen, position, row_keys = active[keep], chosen[keep], position[keep], row_keys[keep]
                running = running[keep]
            cache.used = int(position.max()) + 1
            cache.write_at, cache.rows = position, torch.arange(len(active), device=device)
            visible = (torch.arange(cache.used, device=device)[None] <= position[:, None])[:, None, None]
            hidden = body(input_ids=chosen[:, None], position_ids=position[:, None], attention_mask=visible,
                          past_key_values=cache, use_cache=True).last_hidden_state
            logits = self._hidden_to_logits(hidden[:, 0])
            position = position + 1
        tokens, logprobs, ends, flags = tokens.cpu(), logprobs.cpu(), out_length.tolist(), stopped.tolist()
        if not bool(torch.isfinite(logprobs).all()):
            raise WorkError("the sampler's log-probabilities are not finite: the weights hold NaN or infinity")
        return [(tokens[i, :n].tolist(), logprobs[i, :n].tolist(), "stop" if flag else "length")
                for i, (n, flag) in enumerate(zip(ends, flags))]


# --------------------------------------------------------------------------------------------------------------------
# vllm engine

# Largest |difference| in nats between the engine's and the trainer's log-probabilities of the probe sequence right after a sync.
# float32: other kernels, same format (5e-5 measured on a CPU). Low precision: two implementations that round at other places.
PROBE_TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
PROBE_LENGTH = 16  # tokens of the fixed sequence


class VLLMEngine:
    """Samples with vLLM in this process; the trainer's weights are streamed into it, and every sync is proven by a probe.

    Args:   path: base model folder or hub id. tokenizer: names the tokens that exist. dtype: weights in the sampler.
            trainer: module whose weights sync() streams; None in evaluation. max_length: prompt + response tokens.
    Raises: UserError if vllm is not installed.
    """

    name = "vllm"

    def __init__(self, path: str, tokenizer, dtype: str, trainer: nn.Module | None = None, gpu_memory_fraction: float = 0.4,
                 tensor_parallel_size: int = 1, max_length: int = 4096, revision: str | None = None) -> None:
        import os
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that weights can be handed over
        if torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available():
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        try:
            import vllm
        except ImportError:
            raise UserError("--rollout_engine vllm: vllm is not installed; run scripts/setup_env.sh --with-vllm, or use hf") from None
        self.trainer, self.dtype, self.version = trainer, dtype, vllm.__version__
        self.llm = vllm.LLM(model=path, revision=revision, tokenizer_revision=revision, dtype=dtype, enforce_eager=True,
                            generation_config="vllm", logprobs_mode="processed_logprobs", max_model_len=max_length,
                            gpu_memory_utilization=gpu_memory_fraction, tensor_parallel_size=tensor_parallel_size,
                            enable_prefix_caching=True, seed=0)
        config = self.llm.llm_engine.model_config.hf_config
        self.context = min(max_length, int(config.max_position_embeddings))
        self.vocabulary_size = int(config.vocab_size)
        used = set(tokenizer.get_vocab().values())
        self.unused = [i for i in range(self.vocabulary_size) if i not in used]
        self.allowed = sorted(used) if self.unused else None
        ends = {tokenizer.eos_token_id}
        for source in (config, getattr(trainer, "generation_config", None)):
            ids = getattr(source, "eos_token_id", None)
            ends |= set(ids if isinstance(ids, (list, tuple)) else [ids])
        self.end_ids = sorted(i for i in ends if i is not None)
        ids = sorted(used)
        self.probe = [ids[stable_hash("probe", i) % len(ids)] for i in range(PROBE_LENGTH)]

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name, "version": self.version, "torch": torch.__version__, "dtype": self.dtype,
                "end_token_ids": self.end_ids, "context": self.context}

    def weight_dtypes(self) -> Iterable[torch.dtype]:
        return self.llm.apply_model(lambda model: sorted({p.dtype for p in model.parameters()}, key=str))[0]

    @torch.no_grad()
    def sync(self) -> None:
        """Stream the trainer's weights into the engine, drop cached prefixes, and prove that the engine follows."""
        if self.trainer is None:
            return
        self.push(self.trainer)
        self.llm.reset_prefix_cache()
        self.check_probe()

    def push(self, module: nn.Module) -> None:
        """Stream the weights of ``module`` tensor by tensor; tied ones once."""
        weights = ((name, p.detach()) for name, p in module.named_parameters())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def check_probe(self) -> float:
        """Largest |difference| in nats on the probe sequence; WorkError if the engine does not follow the trainer."""
        from vllm import SamplingParams as VSampling
        out = self.llm.generate([{"prompt_token_ids": self.probe}], VSampling(max_tokens=1, temperature=1.0, prompt_logprobs=0),
                                use_tqdm=False)[0]
        engine = torch.tensor([entry[token].logprob for token, entry in zip(self.probe[1:], out.prompt_logprobs[1:])])
        device = next(self.trainer.parameters()).device
        logits = self.trainer(input_ids=torch.tensor([self.probe], device=device), use_cache=False).logits[0, :-1].float()
        trainer = (logits - torch.logsumexp(logits, -1, keepdim=True)).gather(1, torch.tensor(self.probe[1:], device=device)[:, None])
        difference = float((engine - trainer[:, 0].cpu()).abs().max())
        if not difference <= PROBE_TOLERANCE_NATS[self.dtype]:
            raise WorkError(f"stale rollout engine: after the weight sync its log-probabilities differ from the trainer's by "
                            f"{difference:.3g} nats (limit {PROBE_TOLERANCE_NATS[self.dtype]})")
        return difference

    def generate(self, prompts: list[list[int]], num_samples: int, sampling: SamplingParams, stream: tuple[int, ...],
                 problem_keys: list[int], progress=None) -> Rollouts:
        """As HFEngine.generate; each response has a seed of its own, hashed from the same indices."""
        from vllm import SamplingParams as VSampling
        check_requests(prompts, num_samples, sampling, self.context, self.vocabulary_size)
        requests, parameters = [], []
        for prompt, key in zip(prompts, problem_keys, strict=True):
            for j in range(num_samples):
                requests.append({"prompt_token_ids": prompt})
                parameters.append(VSampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=0, min_p=0.0,
                                            repetition_penalty=1.0, max_tokens=sampling.max_new_tokens, logprobs=0,
                                            seed=stable_hash("vllm", sampling.seed, *stream, key, j) >> 1,
                                            stop_token_ids=self.end_ids, allowed_token_ids=self.allowed, detokenize=False))
        out = Rollouts()
        for request, answer in zip(requests, self.llm.generate(requests, parameters, use_tqdm=False)):
            completion = answer.outputs[0]
            tokens = list(completion.token_ids)
            out.prompts.append(request["prompt_token_ids"])
            out.responses.append(tokens)
            out.logprobs.append([entry[token].logprob for token, entry in zip(tokens, completion.logprobs)])
            out.finish_reasons.append("stop" if completion.finish_reason == "stop" else "length")
            if progress:
                progress(1)
        return out
