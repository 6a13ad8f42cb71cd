"""utils_precision: roundings, the optimizer against torch and float64, emulated products, lost updates, the audit."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import utils_precision as up
from config import PRECISION_MODES, PrecisionArm, WorkError


@pytest.fixture(autouse=True)
def restore_switches():
    """Each test leaves the global switches as it found them."""
    yield
    torch.use_deterministic_algorithms(False)
    up._EMULATE = False


class Net(nn.Module):
    """Two matrices and a norm-like vector: enough for an optimizer test."""

    def __init__(self, seed: int = 0, scale: float = 0.02) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.q_proj = nn.Parameter((torch.randn(64, 48, generator=generator) * scale).bfloat16().float())
        self.norm = nn.Parameter(torch.ones(48))
        self.down_proj = nn.Parameter((torch.randn(32, 64, generator=generator) * scale).bfloat16().float())


def set_grads(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad_dtype = dtype
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)


def run_master_adamw(arm: PrecisionArm, steps: int, lr: float, weight_decay: float = 0.1, seed: int = 0, **kwargs):
    model = Net(seed).to(up.DTYPES[arm.compute_dtype])
    optimizer = up.MasterAdamW(model, arm, lr, weight_decay=weight_decay, **kwargs)
    history = []
    for step in range(steps):
        set_grads(model, optimizer.grad_dtype, 1000 + step)
        history.append(optimizer.step())
    return model, optimizer, history


# --- the optimizer against references ------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode, dtype", [("fp32", torch.float32), ("bf16_pure", torch.bfloat16)])
def test_one_format_arms_equal_torch_adamw_bit_for_bit(mode, dtype):
    model, _, _ = run_master_adamw(PRECISION_MODES[mode], 100, 1e-3)
    reference = Net().to(dtype)
    torch_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    for step in range(100):
        set_grads(reference, dtype, 1000 + step)
        torch_optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(mine, theirs)


def test_bf16_masters_equal_the_float64_update_rounded_except_near_midpoints():
    arm, lr, decay = PRECISION_MODES["bf16"], 1e-3, 0.1
    model = Net().bfloat16()
    optimizer = up.MasterAdamW(model, arm, lr, weight_decay=decay)
    m = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in model.named_parameters()}
    v = copy.deepcopy(m)
    checked = 0
    for step in range(1, 31):
        set_grads(model, torch.float32, step)
        before = {n: p.detach().double() for n, p in model.named_parameters()}
        grads = {n: p.grad.double() for n, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            m[name] = 0.9 * m[name] + 0.1 * grads[name]
            v[name] = 0.999 * v[name] + 0.001 * grads[name] ** 2
            exact = before[name] * (1 - lr * decay) - lr * (m[name] / (1 - 0.9 ** step)) / (
                (v[name] / (1 - 0.999 ** step)).sqrt() + 1e-8)
            rounded = exact.float().bfloat16()
            differs = p.detach() != rounded
            # Distance from the exact value to the midpoint between the two bf16 values in question.
            midpoint = (p.detach().double() + rounded.double()) / 2
            # The step runs in float32: decay, update and their sum err by at most one ULP each, the moments by another.
            float32_ulp = up.ulp(exact.float()).double()
            assert bool(((exact - midpoint).abs() <= 4 * float32_ulp)[differs].all())
            checked += differs.numel()
    assert checked > 100_000


def test_moments_in_bf16_never_decay_with_beta2_0999():
    """v * 0.999 rounds back to v for every bf16 mantissa, so the second moment cannot fall (papers: Adam in bf16)."""
    v = torch.arange(128, 256, dtype=torch.float32).bfloat16()  # every mantissa of one binade
    assert torch.equal(v * 0.999, v)
    arm = dataclasses.replace(PRECISION_MODES["bf16"], optimizer_state_dtype="bfloat16")
    model = Net().bfloat16()
    optimizer = up.MasterAdamW(model, arm, 1e-6)
    set_grads(model, torch.float32, 1)
    optimizer.step()
    first = {n: t.clone() for n, t in optimizer.exp_avg_sq.items()}
    for _ in range(50):
        for p in model.parameters():
            p.grad = torch.zeros(p.shape)
        optimizer.step()
    assert all(torch.equal(optimizer.exp_avg_sq[n], first[n]) for n in first)


def test_bf16_masters_freeze_about_98_percent_at_lr_1e6():
    """Weights with s.d. 0.02: a full Adam step of 1e-6 moves only |w| below 4.9e-4, about 2 % of a Gaussian."""
    _, _, history = run_master_adamw(PRECISION_MODES["bf16"], 1, 1e-6, weight_decay=0.0)
    matrices = [history[-1].kinds[k] for k in ("q", "down")]
    lost = sum(int(c["lost"]) for c in matrices) / sum(int(c["nonzero"]) for c in matrices)
    assert 0.96 < lost < 0.99  # 5,120 elements: binomial standard error 0.2 %, on the analytic 98.0 %


def test_float32_masters_read_in_bf16_change_more_with_every_step():
    _, _, history = run_master_adamw(PRECISION_MODES["bf16_mixed"], 60, 1e-6, weight_decay=0.0)
    shares = [s.reduce()["precision/changed_share_vs_base_bf16"] for s in history]
    assert shares[0] < shares[19] < shares[59] and shares[59] > 3 * shares[0]
    frozen = [s.reduce()["precision/changed_share_vs_base_bf16"] for s in run_master_adamw(PRECISION_MODES["bf16"], 60, 1e-6, 0.0)[2]]
    assert frozen[59] < 2 * frozen[0] < 0.1


def test_kahan_tracks_float32_masters_where_nearest_stalls():
    steps, lr = 1000, 1e-5
    def final(mode):
        model = Net().to(up.DTYPES[PRECISION_MODES[mode].compute_dtype])
        optimizer = up.MasterAdamW(model, PRECISION_MODES[mode], lr)
        for _ in range(steps):  # a constant gradient: a persistent small drift, what nearest rounding loses
            for p in model.parameters():
                p.grad = torch.ones(p.shape)
            optimizer.step()
        return {n: t.float() for n, t in optimizer.masters.items()}
    base = {n: p.detach() for n, p in Net().named_parameters()}
    exact, kahan, nearest = final("fp32"), final("bf16_kahan"), final("bf16")
    for name in base:
        bound = 2 * up.ulp(torch.maximum(base[name].abs(), exact[name].abs()).bfloat16())
        assert bool(((kahan[name] - exact[name]).abs() <= bound).all()), name
    assert torch.equal(nearest["norm"], base["norm"])  # 1e-5 is far below half an ULP of 1.0
    assert float((exact["norm"] - base["norm"]).abs().min()) > 5e-3


def test_chunked_update_equals_the_whole(monkeypatch):
    for mode in ("bf16", "bf16_stochastic", "bf16_kahan"):
        whole, _, stats = run_master_adamw(PRECISION_MODES[mode], 3, 1e-3, seed=0)
        monkeypatch.setattr(up, "UPDATE_CHUNK", 100)
        parts, _, part_stats = run_master_adamw(PRECISION_MODES[mode], 3, 1e-3, seed=0)
        monkeypatch.undo()
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters()))
        assert stats[-1].reduce() == part_stats[-1].reduce()


# --- rounding ------------------------------------------------------------------------------------------------------------

def test_stochastic_rounding_is_unbiased_and_hits_only_the_neighbours():
    values = torch.tensor([1.0, 1.0 + 2 ** -9, -1.003, 3.14159, 1e-30, -7.7e5])
    repeats = 10_000
    x = values.repeat(repeats, 1)
    rounded = up.round_stochastic(x, up.stochastic_bits(x.shape, 12345, 0, x.device)).double()
    gap = up.ulp(values.bfloat16()).double()
    share = ((values.double() / gap) % 1)                                  # distance from the value below, in gaps
    standard_error = (share * (1 - share)).sqrt() * gap / repeats ** 0.5
    # 4 standard errors, plus what 16 random bits cannot resolve of the distance
    assert bool(((rounded.mean(0) - values.double()).abs() <= 4 * standard_error + gap * 2 ** -16).all())
    assert bool(((rounded - values.double()).abs() <= gap).all())


def test_stochastic_bits_depend_on_the_global_index_alone():
    whole = up.stochastic_bits(torch.Size([1000]), 99, 0, torch.device("cpu"))
    assert torch.equal(whole[400:], up.stochastic_bits(torch.Size([600]), 99, 400, torch.device("cpu")))
    assert not torch.equal(whole, up.stochastic_bits(torch.Size([1000]), 100, 0, torch.device("cpu")))
    # 16 bits, uniform: chi-square over 256 cells of the high byte, 0.999 quantile of 255 degrees of freedom is 330.5
    counts = torch.bincount(up.stochastic_bits(torch.Size([1 << 18]), 7, 0, torch.device("cpu")) >> 8, minlength=256).double()
    expected = (1 << 18) / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 330.5


def test_stochastic_rounding_passes_non_finite_values():
    x = torch.tensor([float("inf"), -float("inf"), float("nan")])
    out = up.round_stochastic(x, torch.full((3,), 65535, dtype=torch.int32))
    assert out[0] == float("inf") and out[1] == -float("inf") and torch.isnan(out[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_is_the_distance_to_the_next_larger_magnitude(dtype):
    x = torch.tensor([1.0, 1.5, 0.0078, 3.0, -2.0, 0.0]).to(dtype)
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    above = (x.abs().view(integer) + 1).view(dtype)
    assert torch.equal(up.ulp(x), above.float() - x.abs().float())


# --- lost updates --------------------------------------------------------------------------------------------------------

def test_lost_updates_are_counted_by_hand():
    """|w| = 1: half an ULP below is 2^-9 = 1.95e-3, so a step of 1e-3 is lost and one of 3e-3 is not."""
    model = nn.ParameterDict({"norm": nn.Parameter(torch.ones(4).bfloat16())})
    for lr, lost in ((1e-3, 1.0), (3e-3, 0.0)):
        copy_ = copy.deepcopy(model)
        optimizer = up.MasterAdamW(copy_, PRECISION_MODES["bf16"], lr)
        copy_["norm"].grad = torch.tensor([1.0, 1.0, 0.0, 1.0])
        metrics = optimizer.step().reduce()
        assert metrics["precision/lost_update_share"] == lost
        assert metrics["precision/nonzero_update_share"] == 0.75
        assert metrics["precision/changed_share_vs_base"] == 0.75 * (1 - lost)
        assert metrics["precision/lost_update_share_by_kind"] == {"norm": lost}
        # first Adam step is lr exactly; ULP of 1 is 2^-7
        assert metrics["precision/update_over_ulp_median"] == pytest.approx(lr * 128, rel=0.42)  # within half an octave


def test_no_gradient_no_statistics_but_no_crash():
    model = nn.ParameterDict({"norm": nn.Parameter(torch.ones(4))})
    optimizer = up.MasterAdamW(model, PRECISION_MODES["fp32"], 1e-3)
    model["norm"].grad = torch.zeros(4)
    assert optimizer.step().reduce()["precision/lost_update_share"] is None


# --- masters and copies --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", list(PRECISION_MODES))
def test_module_always_holds_the_rounded_master(mode):
    arm = PRECISION_MODES[mode]
    model, optimizer, _ = run_master_adamw(arm, 5, 1e-3)
    for name, p in model.named_parameters():
        assert optimizer.masters[name].dtype == up.DTYPES[arm.param_dtype]
        assert p.dtype == up.DTYPES[arm.compute_dtype]
        assert torch.equal(p, optimizer.masters[name].to(p.dtype))
        shared = p.data_ptr() == optimizer.masters[name].data_ptr()
        assert shared == (arm.param_dtype == arm.compute_dtype)


@pytest.mark.parametrize("mode", list(PRECISION_MODES))
def test_state_round_trip_continues_bit_for_bit(mode):
    arm = PRECISION_MODES[mode]
    model, optimizer, _ = run_master_adamw(arm, 4, 1e-3)
    other = Net().to(up.DTYPES[arm.compute_dtype])
    restored = up.MasterAdamW(other, arm, 1e-3, weight_decay=0.1)
    restored.load_state({n: t.clone() for n, t in optimizer.masters.items()},
                        {n: t.clone() for n, t in optimizer.state_tensors().items()}, optimizer.step_count)
    for m, o in ((model, optimizer), (other, restored)):
        set_grads(m, o.grad_dtype, 77)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_gradients_accumulate_in_the_arms_format():
    """100 gradients of 1 and one of 2^-8: bf16 accumulation loses the small one, float32 keeps it."""
    for mode, expected in (("bf16", 256.0 + 0.5), ("bf16_pure", 256.0)):
        p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        model = nn.ParameterDict({"norm": p})
        up.MasterAdamW(model, PRECISION_MODES[mode], 1e-3)
        for value in (256.0, 0.5):
            (p * torch.tensor([value], dtype=torch.bfloat16)).sum().backward()
        assert float(p.grad) == expected


def test_clip_grad_norm_matches_torch_and_leaves_non_finite_alone():
    model, reference = Net(), Net()
    optimizer = up.MasterAdamW(model, PRECISION_MODES["fp32"], 1e-3)
    set_grads(model, torch.float32, 3)
    set_grads(reference, torch.float32, 3)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0, foreach=False)
    assert up.clip_grad_norm(optimizer, 1.0) == pytest.approx(float(expected), rel=1e-6)  # float32 sums in two orders
    for a, b in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=0)
    model.norm.grad[0] = float("nan")
    assert up.clip_grad_norm(optimizer, 1.0) != up.clip_grad_norm(optimizer, 1.0)  # NaN


# --- emulated products ---------------------------------------------------------------------------------------------------

def test_emulated_linear_equals_the_float64_product_rounded_once():
    generator = torch.Generator().manual_seed(5)
    k = 256
    x, weight = torch.randn(400, k, generator=generator).bfloat16(), torch.randn(250, k, generator=generator).bfloat16()
    bias = torch.randn(250, generator=generator).bfloat16()
    layer = nn.Linear(k, 250).bfloat16()
    layer.weight.data, layer.bias.data = weight, bias
    up.emulate_low_precision(nn.ModuleList([layer]))
    out = layer(x)
    exact = x.double() @ weight.double().t() + bias.double()
    wrong = out != exact.to(torch.bfloat16)
    # float32 accumulation of K products errs by at most K 2^-24 sum|a b|; typical |sum| / sum|ab| is 1/sqrt(K) here, so the
    # error is at most 2^-24 K^1.5 = 2.4e-4 of the value; typical (random signs) 1e-6. A bf16 gap is 2^-8: under 0.1 % of the
    # values lie that close to a midpoint.
    assert float(wrong.double().mean()) < 0.005 and out.numel() >= 100_000
    nearest_distance = (out.double() - exact).abs()
    bound = up.ulp(exact.to(torch.bfloat16)).double() / 2 + 2 ** -24 * k * (x.double().abs() @ weight.double().abs().t() + bias.double().abs())
    assert bool((nearest_distance <= bound).all())


def test_emulated_gradients_equal_float64_products_rounded_once():
    generator = torch.Generator().manual_seed(6)
    layer = nn.Linear(64, 32).bfloat16()
    up.emulate_low_precision(nn.ModuleList([layer]))
    x = torch.randn(3, 50, 64, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(3, 50, 32, generator=generator).bfloat16()
    layer(x).backward(grad)
    rows, flat = grad.double().view(-1, 32), x.detach().double().view(-1, 64)
    for found, exact in ((x.grad.view(-1, 64), rows @ layer.weight.detach().double()), (layer.weight.grad, rows.t() @ flat),
                         (layer.bias.grad, rows.sum(0))):
        assert float((found != exact.to(torch.bfloat16)).double().mean()) < 0.005  # as above


def test_emulated_embedding_gradient_is_summed_in_float32():
    layer = nn.Embedding(4, 2).bfloat16()
    up.emulate_low_precision(nn.ModuleList([layer]))
    # 1 + 300 terms of 2^-8: in bf16 each addition rounds back to 1; the sum is 2.171875, in bf16 2.171875
    ids = torch.zeros(301, dtype=torch.int64)
    grad = torch.full((301, 2), 2.0 ** -8).bfloat16()
    grad[0] = 1.0
    layer(ids).backward(grad)
    assert float(layer.weight.grad[0, 0]) == float(torch.tensor(1 + 300 * 2.0 ** -8).bfloat16())


def test_cached_float32_image_follows_every_write():
    layer = nn.Linear(8, 8, bias=False).bfloat16()
    up.emulate_low_precision(nn.ModuleList([layer]))
    optimizer = up.MasterAdamW(nn.ModuleDict({"q_proj": layer}), PRECISION_MODES["bf16"], 0.1)
    x = torch.randn(2, 8).bfloat16()
    for _ in range(3):
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = nn.Linear(8, 8, bias=False).bfloat16()
        fresh.weight.data = layer.weight.detach().clone()
        up.emulate_low_precision(nn.ModuleList([fresh]))
        assert torch.equal(layer(x), fresh(x))
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()  # an image made under inference mode must not poison a later training pass


# --- audit ---------------------------------------------------------------------------------------------------------------

def tiny_qwen(dtype: torch.dtype):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, attn_implementation=up.ATTENTION_NAME)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).bfloat16().to(dtype)


def audited(mode: str, **changes):
    arm = PRECISION_MODES[mode]
    low = torch.float16 if arm.compute_dtype == "float16" else torch.bfloat16
    numerics = up.setup_numerics(arm.deterministic, low_precision=low)
    model = tiny_qwen(up.DTYPES[arm.compute_dtype])
    if numerics.cpu_matmul == "emulated":
        up.emulate_low_precision(model)
    up.set_dropout(model, arm.dropout)
    return model, up.MasterAdamW(model, arm, 1e-3), arm, numerics


@pytest.mark.parametrize("mode", list(PRECISION_MODES))
def test_audit_passes_for_every_arm_and_raises_on_tampering(mode):
    model, optimizer, arm, numerics = audited(mode)
    rollout = [up.DTYPES[arm.rollout_dtype]]
    report = up.audit(model, optimizer, arm, numerics, rollout_dtypes=rollout)
    assert report["measured product"]["relative_error"] <= report["measured product"]["limit"]
    wrong = torch.float64
    for tamper, name in ((lambda: optimizer.exp_avg.update({"x": torch.zeros(1, dtype=wrong)}), "first moments"),
                         (lambda: optimizer.masters.update({"x": torch.zeros(1, dtype=wrong)}), "master weights"),
                         (lambda: model.register_parameter("x", nn.Parameter(torch.zeros(1, dtype=wrong))), "module weights")):
        model, optimizer, arm, numerics = audited(mode)
        tamper()
        with pytest.raises(WorkError, match=f"{name}.*arm says.*machine has.*float64"):
            up.audit(model, optimizer, arm, numerics, rollout_dtypes=rollout)
    model, optimizer, arm, numerics = audited(mode)
    with pytest.raises(WorkError, match="accumulated gradients"):
        up.audit(model, optimizer, arm, numerics, grads={"x": wrong}, rollout_dtypes=rollout)
    with pytest.raises(WorkError, match="rollout weights"):
        up.audit(model, optimizer, arm, numerics, rollout_dtypes=[wrong])


def test_audit_sees_switches_that_were_turned():
    model, optimizer, arm, numerics = audited("fp32")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(WorkError, match="cuda_matmul_fp32_precision.*ieee.*tf32"):
        up.audit(model, optimizer, arm, numerics)
    model, optimizer, arm, numerics = audited("fp32")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(WorkError, match="warn_only"):
        up.audit(model, optimizer, arm, numerics)


def test_audit_sees_a_stale_compute_copy():
    model, optimizer, arm, numerics = audited("bf16_mixed")
    with torch.no_grad():
        next(iter(optimizer.masters.values())).add_(1.0)
    with pytest.raises(WorkError, match="differ from their masters"):
        up.audit(model, optimizer, arm, numerics)


def test_no_low_precision_matrix_kernel_runs_under_emulation():
    """A dispatch hook sees every kernel of a training step and of generation-like no_grad forwards: none multiplies in bf16."""
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if any(part in name for part in ("mm", "linear", "attention", "matmul", "dot")):
                seen.append(name)
                low = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in up.LOW_PRECISION]
                assert not low, f"{name} in {low}"
            return func(*args, **(kwargs or {}))

    up.setup_numerics(False, cpu_matmul="emulated")
    model = tiny_qwen(torch.bfloat16)
    up.emulate_low_precision(model)
    ids = torch.randint(0, 64, (2, 10))
    with Spy():
        model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
        with torch.no_grad():
            model(input_ids=ids)
    assert len(seen) > 20  # the hook did see the step


def test_bf16_mixed_and_bf16_have_the_same_forward():
    """Both run the same function of the same rounded weights."""
    up.setup_numerics(False, cpu_matmul="emulated")
    outputs = []
    for mode in ("bf16", "bf16_mixed"):
        model = tiny_qwen(torch.bfloat16)
        up.emulate_low_precision(model)
        up.MasterAdamW(model, PRECISION_MODES[mode], 1e-3)
        outputs.append(model(input_ids=torch.arange(12)[None]).logits)
    assert torch.equal(*outputs)


# --- several processes ----------------------------------------------------------------------------------------------------

def sharded_worker(rank: int, world: int, folder: str) -> None:
    """Two gloo processes: in every arm, shard the net, take the single process's gradients, gather the masters."""
    import os

    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=open(f"{folder}/port").read())
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    results = {}
    for mode, arm in PRECISION_MODES.items():
        model = Net()
        fully_shard(model)
        optimizer = up.MasterAdamW(model, arm, 1e-3, weight_decay=0.1)
        norms = []
        for step in range(3):
            whole = Net()
            set_grads(whole, optimizer.grad_dtype, 1000 + step)
            for p, q in zip(model.parameters(), whole.parameters()):
                p.grad = distribute_tensor(q.grad.float(), p.device_mesh, p.placements)
            norms.append(up.clip_grad_norm(optimizer, 1.0))
            optimizer.step()
        results[mode] = {name: p.full_tensor().detach() for name, p in model.named_parameters()}, norms
    if rank == 0:
        torch.save(results, f"{folder}/result")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sharded_results(tmp_path_factory):
    import socket
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(probe.getsockname()[1]))
    torch.multiprocessing.spawn(sharded_worker, (2, str(folder)), nprocs=2)
    return torch.load(folder / "result", weights_only=True)


@pytest.mark.parametrize("mode", list(PRECISION_MODES))
def test_two_processes_give_the_bits_of_one(mode, sharded_results):
    masters, norms = sharded_results[mode]
    arm = PRECISION_MODES[mode]
    model = Net().to(up.DTYPES[arm.compute_dtype])
    optimizer = up.MasterAdamW(model, arm, 1e-3, weight_decay=0.1)
    for step in range(3):
        set_grads(model, optimizer.grad_dtype, 1000 + step)
        assert up.clip_grad_norm(optimizer, 0.0) == pytest.approx(norms[step], rel=1e-6)  # partial sums in another order
        for grad in optimizer.grads():  # clipped by the sharded run's own norm: the same gradient in both
            # A sharded gradient lies in a float32 container, so it is clipped before it is rounded to the arm's format.
            grad.copy_(grad.float() * (1.0 / (torch.tensor(norms[step]) + 1e-6)))
        optimizer.step()
    for name, master in optimizer.masters.items():
        assert torch.equal(master.float(), masters[name])
