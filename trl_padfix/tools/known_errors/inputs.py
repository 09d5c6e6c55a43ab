"""Data, tokens, configurations, files and the Hub."""

from __future__ import annotations

from .entry import KnownError


__all__ = ["ERRORS"]

ERRORS = (
    # Data and configurations
    KnownError(
        "the argument `tokenizer`",
        r"unexpected keyword argument 'tokenizer'",
        "TRL's trainers take the tokenizer or processor as `processing_class` since 0.12.",
        "Write `processing_class=tokenizer`.",
        "a `TypeError` of Python",
    ),
    KnownError(
        "a field that TRL does not have any more",
        r"Config\.__init__\(\) got an unexpected keyword argument '(?!tokenizer)\w+'"
        r"|unexpected keyword argument '(max_prompt_length|evaluation_strategy|dataset_text_field|max_seq_length)'",
        "The configuration has no field of this name: it was removed or renamed (`evaluation_strategy` is "
        "`eval_strategy`, `max_seq_length` is `max_length`), or belongs to another configuration.",
        "Delete or rename it. The page of options of this documentation and `trl-padfix dpo --help` list the fields.",
        "a `TypeError` of Python",
    ),
    KnownError(
        "generation without a mask",
        r"attention mask and the pad token id were not set",
        "`generate` was called with ids alone. It cannot tell padding from text then, and where pad and EOS are one "
        "token its answer is unreliable.",
        "Hand over `attention_mask`, and set `pad_token_id`. `trl_padfix.generate(model, inputs)` takes a batch "
        "padded on any side.",
        "transformers 5.23, generation/utils.py",
    ),
    KnownError(
        "rows of different lengths in one tensor",
        r"Unable to create tensor, you should probably activate truncation and/or padding",
        "A collator was given rows of different lengths and did not pad them, or a column that is no list of numbers.",
        "Leave the collator to the trainer, or use the `DataCollator...` of `trl_padfix`; drop columns of text.",
        "transformers 5.23, tokenization_utils_base.py",
    ),
    KnownError(
        "images and their tokens do not match",
        r"Image features and image tokens do not match|Mismatch in `?image`? token count",
        "A row has another number of image tokens than its images give: `max_length` cut some of them off, or the "
        "text names more images than the row has.",
        "`max_length=None` for images, or one that holds them all; one placeholder for each image.",
        "transformers 5.23, models/qwen3_vl/modeling_qwen3_vl.py; transformers 5.23, "
        "models/gemma3/processing_gemma3.py",
    ),
    KnownError(
        "generations that do not divide the batch",
        r"batch[ _]size \(.{1,30}\) must be divisible by",
        "GRPO and RLOO put all completions of a prompt into one step, so the batch must be a multiple of them.",
        "Change `per_device_train_batch_size`, `gradient_accumulation_steps` or `num_generations`.",
        "trl 1.16, trainer/grpo_config.py",
    ),
    KnownError(
        "prefix caching",
        r"prefix[ _-]caching",
        "Prefix caching belongs to vLLM, which generates: it keeps the cache of prompts. It is not `prefix_sharing`, "
        "which computes common prefixes once in training. vLLM switches it off for models that it cannot serve so.",
        "A warning can stay. To switch it off, `vllm_kwargs` or `--no-enable-prefix-caching`; `prefix_sharing` is "
        "not concerned.",
        "vLLM: https://github.com/vllm-project/vllm/pull/23716",
    ),
    # Tokens
    KnownError(
        "an id beyond the vocabulary",
        r"index out of range in self|srcIndex < srcSelectDimSize|the embedding of \w+ has \d+ rows",
        "A token id is as large as the embedding or larger: another model's tokenizer, or tokens that were added "
        "without resizing.",
        "Use the model's own tokenizer, or `model.resize_token_embeddings(len(tokenizer))`.",
        "torch 2.13, lib/libtorch_cpu.so; https://github.com/AkariAsai/self-rag/issues/91; trl_padfix, "
        "core/decoder.py",
    ),
    KnownError(
        "device-side assert",
        r"device-side assert triggered",
        "A kernel checked its input and stopped; mostly an id beyond the vocabulary, or a label that is not -100 and "
        "not in it. The line of the traceback is not where it happened.",
        "Run one step with `use_cpu=True`, which names it, or with `CUDA_LAUNCH_BLOCKING=1`.",
        "torch built for CUDA: https://github.com/huggingface/trl/issues/1995",
    ),
    KnownError(
        "no pad token",
        r"does not have a padding token|no padding token is defined|neither a pad token nor an EOS token",
        "Batches are padded with the tokenizer's pad token, and it has none.",
        "`tokenizer.pad_token = tokenizer.eos_token`, and for a sequence classifier also `model.config.pad_token_id "
        "= tokenizer.pad_token_id`.",
        "transformers 5.23, tokenization_utils_base.py; transformers 5.23, modeling_layers.py; trl_padfix, "
        "trainers/checks.py",
    ),
    KnownError(
        "no chat template",
        r"tokenizer\.chat_template is not set|does not have a chat template",
        "The data is conversations, and a base model's tokenizer has no template to write them as text with.",
        "Use the model's instruct variant, set `chat_template_path`, or `trl.clone_chat_template`.",
        "transformers 5.23, tokenization_utils_base.py; transformers 5.23, processing_utils.py",
    ),
    KnownError(
        "rows longer than the model",
        r"sequence length is longer than the specified maximum sequence length",
        "A warning while tokenizing: a row is longer than the model was made for. What is trained on is cut to "
        "`max_length` later.",
        "Nothing, if `max_length` is below it; see how many rows that cuts with `trl-padfix stats`.",
        "transformers 5.23, tokenization_utils_base.py",
    ),
    KnownError(
        "tokenizers and forked processes",
        r"current process just got forked, after parallelism has already been used",
        "A warning: data loader workers were forked after a fast tokenizer used its threads, so these are switched "
        "off.",
        "`TOKENIZERS_PARALLELISM=false` in the environment.",
        "tokenizers: https://github.com/NVIDIA/garak/issues/750",
    ),
    # Saving, loading and resuming
    KnownError(
        "tensors that share memory",
        r"Some tensors share memory",
        "safetensors does not save one tensor twice, and two weights are one: tied embeddings, after a change of the "
        "model that its class does not know of.",
        "`model.save_pretrained(folder)` of the transformers model itself, which knows its tied weights; "
        "`model.tie_weights()` after resizing. `remove_padding` adds no tensor to a model.",
        "safetensors 0.8, torch.py",
    ),
    KnownError(
        "another size of the embeddings",
        r"size mismatch for .*(embed|lm_head|wte)|tokenizer has new PAD/BOS/EOS tokens"
        r"|new embeddings will be initialized from a multivariate normal",
        "Tokenizer and model have different numbers of tokens, or other special tokens: tokens were added, or the "
        "adapter was trained on a resized model.",
        "`model.resize_token_embeddings(len(tokenizer))` before loading the adapter or checkpoint; the warning about "
        "new special tokens can stay where it names the ones that you set.",
        "torch 2.13, nn/modules/module.py; transformers 5.23, trainer_utils.py; transformers 5.23, modeling_utils.py",
    ),
    KnownError(
        "no checkpoint to resume from",
        r"No valid checkpoint found in output directory|Can't find a valid checkpoint at",
        "`resume_from_checkpoint` finds no whole checkpoint in that folder, or `save_strategy` was `no`.",
        "Name a `checkpoint-...` folder, or leave it out. `trl-padfix dpo --resume_from_checkpoint latest` passes "
        "over half-written ones.",
        "transformers 5.23, trainer.py",
    ),
    KnownError(
        "a weight file that is cut short",
        r"Error while deserializing header|SafetensorError|incomplete metadata, file not fully covered",
        "A `.safetensors` file is not whole: a download or a save was stopped, or it is a pointer of Git LFS.",
        "Delete it and download it again; take the checkpoint before.",
        "safetensors 0.8, _safetensors_rust.abi3.so",
    ),
    KnownError(
        "pickled weights are refused",
        r"upgrade torch to at least v2\.6|Weights only load failed",
        "Weights are a pickle, which can hold code, and torch or transformers does not load it.",
        "Convert the model to safetensors, or use a torch of 2.6 or later.",
        "transformers 5.23, utils/import_utils.py; torch 2.13, serialization.py",
    ),
    KnownError(
        "disk full",
        r"No space left on device|\[Errno 28\]",
        "The disk of the output folder or of the cache is full.",
        "`save_total_limit=1`, `save_only_model=True`; `HF_HOME` on a larger disk. The newest whole checkpoint stays.",
        "the operating system (`ENOSPC`)",
    ),
    # The Hub
    KnownError(
        "a gated or private repository",
        r"Cannot access gated repo|401 Client Error|gated repo|GatedRepoError",
        "The model or data needs an agreement or a login.",
        "Accept its terms on its page, then `hf auth login` (or `HF_TOKEN`).",
        "huggingface_hub 2.4, utils/_http.py; transformers 5.23, utils/hub.py",
    ),
    KnownError(
        "offline, and not in the cache",
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|Cannot reach .* offline mode is enabled",
        "A name of the Hub is not in the local cache, and there is no network (or `HF_HUB_OFFLINE=1`).",
        "Download it first (`hf download NAME`), or name a local folder.",
        "huggingface_hub 2.4, file_download.py; datasets 5.2, utils/file_utils.py",
    ),
    KnownError(
        "no such repository",
        r"RepositoryNotFoundError|is not a local folder and is not a valid model identifier",
        "There is neither a folder nor a repository of this name that you can see.",
        "Check the spelling and the working folder; a local path begins with `./`.",
        "transformers 5.23, utils/hub.py",
    ),
)
