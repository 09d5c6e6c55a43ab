"""
SFT on images without padding, on one process or many.

Train a tiny random LLaVA to name colored shapes offline, on a CPU, in under a minute:

    python recipes/sft_vlm.py --config recipes/sft_vlm_tiny.yaml --use_cpu true

A real one (any flag of TRL's `trl sft`, and ours):

    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/sft_vlm.py \
        --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
        --dataset_name trl-lib/llava-instruct-mix \
        --padding_free true --prefix_sharing auto --max_length null \
        --per_device_train_batch_size 8 --learning_rate 1e-5 --output_dir runs/qwen-vl-sft
"""

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import transformers
import trl
from datasets import Dataset, DatasetDict, Features, Image, List, load_dataset
from PIL import Image as Pillow
from PIL import ImageDraw
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin, set_seed

from trl_padfix import SFTConfig, SFTTrainer
from trl_padfix.cli.user_errors import explain_errors
from trl_padfix.tools.tiny import CHAT_TEMPLATE, SHAPES, build_qwen2, built_once, train_tokenizer
from trl_padfix.trainers.resume import checkpoint_to_resume


COLORS = ("red", "green", "blue", "yellow", "white", "orange")
FORMS = {"circle": "ellipse", "square": "rectangle", "line": "line"}
SIZE, PATCH = 32, 8
"""Pixels of a picture and of a patch of it, along one side."""

IMAGE = "<image>"
PARTS = (
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
TEMPLATE = CHAT_TEMPLATE.replace("{{ message['content'] or '' }}", PARTS)
"""Chat template for messages whose content is a list of texts and pictures."""


@dataclass
class RecipeArguments(trl.ScriptArguments):
    """TRL's script arguments, and a switch for a model and pictures that are built instead of loaded."""

    dataset_name: str | None = field(default=None, metadata={"help": "Path or name of the dataset to load."})
    tiny: bool = field(
        default=False,
        metadata={"help": "Train a random LLaVA on pictures of colored shapes, both built on the spot: no download."},
    )


def draw_shapes(count: int, seed: int) -> Dataset:
    """Questions about one or two pictures of colored shapes, with the names of the shapes as answers."""
    draw = random.Random(seed)
    rows = {"images": [], "prompt": [], "completion": []}
    for _ in range(count):
        names, pictures = [], []
        for _ in range(draw.choice((1, 1, 2))):
            color, form = draw.choice(list(itertools.product(COLORS, FORMS)))
            names.append(f"a {color} {form}")
            pictures.append(draw_shape(draw, color, form))
        rows["images"].append(pictures)
        rows["prompt"].append([{"role": "user", "content": "What do you see?"}])
        rows["completion"].append([{"role": "assistant", "content": " and ".join(names)}])
    message = [{"role": "", "content": ""}]
    text = Dataset.from_dict({"prompt": [message], "completion": [message]}).features
    return Dataset.from_dict(rows, features=Features({"images": List(Image()), **text}))


def draw_shape(draw: random.Random, color: str, form: str) -> Pillow.Image:
    """One shape at a random place on a gray ground."""
    picture = Pillow.new("RGB", (SIZE, SIZE), "gray")
    left, top, side = draw.randint(1, 10), draw.randint(1, 10), draw.randint(14, 20)
    corners = (left, top, left + side, top + side)
    width = {"width": 3} if form == "line" else {}
    getattr(ImageDraw.Draw(picture), FORMS[form])(corners, fill=color, **width)
    return picture


def build_llava(tokenizer: PreTrainedTokenizerFast) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A random LLaVA (CLIP and Qwen2) and its processor; the image token is added to the tokenizer."""
    tokenizer.add_special_tokens({"extra_special_tokens": [IMAGE]})
    size = {"height": SIZE, "width": SIZE}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,  # CLIP's class token, which the strategy "full" keeps
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=build_qwen2(tokenizer, **SHAPES["tiny"] | {"vocab_size": len(tokenizer)}).config,
        image_token_id=processor.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(0)
    return transformers.LlavaForConditionalGeneration(config), processor


def build_tiny(directory: Path) -> str:
    """A tokenizer for the names of the shapes and a random LLaVA, saved like a downloaded one."""
    names = [f"a {color} {form} and" for color, form in itertools.product(COLORS, FORMS)]
    texts = [*names, "user\nWhat do you see?\nassistant\n"] * 2

    def build(folder: Path) -> None:
        model, processor = build_llava(train_tokenizer(texts, vocab_size=512))
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    return built_once(directory, {"model": "llava", "image_size": SIZE, "vocab_size": 512, "texts": texts}, build)


def main(script_args, training_args, model_args, dataset_args) -> None:
    set_seed(training_args.seed)
    model = model_args.model_name_or_path
    if script_args.tiny:
        if model or script_args.dataset_name or dataset_args.datasets:
            raise ValueError("`tiny` makes model and pictures: leave out `model_name_or_path` and the dataset.")
        model = build_tiny(Path(training_args.output_dir) / "initial_model")
        dataset = DatasetDict(train=draw_shapes(1024, seed=0), test=draw_shapes(64, seed=1))
    elif dataset_args.datasets:
        dataset = trl.get_dataset(dataset_args)
    else:
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    run(model, dataset, script_args, training_args, model_args)


def run(model: str, dataset: DatasetDict, script_args, training_args, model_args) -> None:
    """Train and save a model."""
    evaluates = training_args.eval_strategy != "no"
    checkpoint = checkpoint_to_resume(training_args.resume_from_checkpoint, training_args.output_dir)
    training_args.attn_implementation = model_args.attn_implementation
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision if model == model_args.model_name_or_path else None,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=trl.get_quantization_config(model_args),
        peft_config=trl.get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = trl.TrlParser((RecipeArguments, SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    with explain_errors("recipes/sft_vlm.py"):
        main(*parser.parse_args_and_config(fail_with_unknown_args=True))
