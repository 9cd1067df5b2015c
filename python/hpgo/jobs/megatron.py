"""Job folders for Megatron-LM: arguments, data, smoke run, and a check by Megatron-LM's own parser.

Source: `megatron/training/arguments.py` and `training_config.py` of Megatron-LM 0.16.1 to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.export.llm_for_megatron import RELEASES, arguments, is_hybrid, max_connections, releases_of, script_of
from hpgo.export.targets import Place
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts, Placeholder, Variable

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.llm.plan import LlmPlan

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.0")
"""Releases whose parser accepts the arguments."""
_REQUIREMENTS = (
    "torch==2.15.0",
    "# Needs a GPU, so it was not tested with these files.",
    "transformer-engine[pytorch]>=2.9",
    "transformers==5.23.0",
)
_DEEP_EP = (
    "# Tokens go between nodes with DeepEP. Install it from its sources: https://github.com/deepseek-ai/DeepEP",
    "# It was not tested with these files. HybridEP, for GB200 and GB300, is its branch hybrid-ep.",
)
"""Lines of requirements.txt for plans whose experts are on several nodes."""
_DEEP_EP_NOTE = (
    "Tokens go to experts on other nodes with DeepEP, as estimated: the ranks need its module `deep_ep`. Without it,"
    " use `--moe-token-dispatcher-type alltoall`, which sends more than estimated."
)
_MAMBA = (
    "# Scans of Mamba 2 have their kernels in these packages, which need a GPU.",
    "mamba-ssm>=2.2.4",
    "causal-conv1d>=1.5",
    "einops>=0.8",
)
"""Lines of requirements.txt for models with Mamba 2 scans."""
_DELTA_NET = (
    "# The gated delta net has its kernels in this package, which needs a GPU.",
    "flash-linear-attention>=0.4",
)
_CONVERSION = (
    "# The converter that Megatron-LM's documentation recommends. Then set LOAD, and add to data.txt:\n"
    "# --finetune --no-load-optim --no-load-rng\n"
    "python3 -c \"from megatron.bridge import AutoBridge; AutoBridge.import_ckpt('MODEL', 'FOLDER')\""
)
_DATA = """\
# Data, checkpoints and learning rate. Change them here; env.sh sets the variables. For a blend of data, write
# --data-path 0.3 /data/a 0.7 /data/b
--data-path "$DATA_PATH"
--split 99,1,0
--tokenizer-type HuggingFaceTokenizer
--tokenizer-model "$TOKENIZER_MODEL"
--save "$SAVE"
--load "${LOAD:-$SAVE}"
--save-interval 1000
# Save a checkpoint and exit when the time of the job is almost over.
--exit-signal-handler
--train-iters 100000
--lr 3e-4
--min-lr 3e-5
--lr-decay-style cosine
--lr-warmup-iters 2000
--weight-decay 0.1
--adam-beta1 0.9
--adam-beta2 0.95
--clip-grad 1.0
--eval-interval 1000
--eval-iters 10
--log-interval 10
--log-throughput
"""
_SMOKE = """\
# {steps} steps with synthetic tokens. NullTokenizer adds a word, so its vocabulary is one word smaller.
--mock-data
--tokenizer-type NullTokenizer
--vocab-size {words}
--lr 1e-4
--train-iters {steps}
--eval-interval 1000
--eval-iters 0
--log-interval 1
--log-throughput
"""
_CHECK = '''\
"""Let Megatron-LM's own parser read arguments, without a GPU: check_arguments.py RANKS ARGUMENTS…

Exit codes: 1 if it refuses them, 3 if this machine lacks a package of Megatron-LM.
"""

import importlib.util
import os
import re
import sys
import types
import typing

TESTED, NEEDED = {tested}, {needed}
ranks, *words = sys.argv[1:]
# Read the version from the text, because importing Megatron-LM needs packages that this machine may not have.
about = os.path.join(os.environ["MEGATRON_LM"], "megatron", "core", "package_info.py")
if not os.path.isfile(about):
    print(f"error: MEGATRON_LM has no sources of Megatron-LM: there is no {{about}}", file=sys.stderr)
    sys.exit(1)
with open(about, encoding="utf-8") as file:
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\\d+)", file.read(), re.MULTILINE))
if version in TESTED and version not in NEEDED:
    print(f"error: this is Megatron-LM {{version}}, which does not train this model", file=sys.stderr)
    print(f"hint: use {{' or '.join(NEEDED)}}", file=sys.stderr)
    sys.exit(1)
if version not in TESTED:
    print(f"note: this is Megatron-LM {{version}}; tested: {{', '.join(TESTED)}}", file=sys.stderr)
os.environ.update(RANK="0", WORLD_SIZE=ranks, LOCAL_RANK="0")
# Megatron-FSDP refuses the value that tensor parallelism needs.
if "--use-megatron-fsdp" not in words:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
try:
    import torch
    import typing_extensions

    # Megatron-LM 0.18 and later are written for Python 3.12, but their parser needs only this of it.
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    from megatron.core.transformer import transformer_config
    from megatron.training import arguments
except ImportError as error:
    print(f"note: the arguments were not checked here: {{error}}", file=sys.stderr)
    sys.exit(3)
if "flex" in words and importlib.util.find_spec("deep_ep") is None:
    print("error: the plan sends tokens between nodes with DeepEP, but python3 has no module deep_ep", file=sys.stderr)
    print("hint: install DeepEP; or write --moe-token-dispatcher-type alltoall into arguments.txt and delete", end=" ",
          file=sys.stderr)
    print("--moe-flex-dispatcher-backend, which sends more between nodes than estimated", file=sys.stderr)
    sys.exit(1)
if not torch.cuda.is_available():
    # Machines without a GPU often lack Transformer Engine, too. The ranks will have both.
    device = types.SimpleNamespace(name="GPU", major=9, minor=0, total_memory=0, multi_processor_count=1)
    torch.cuda.get_device_properties = lambda *_: device
    torch.cuda.get_device_capability = lambda *_: (device.major, device.minor)
    transformer_config.is_te_min_version = lambda *_args, **_named: True
    words += ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"]
    words += ["--no-rope-fusion"]
sys.argv = ["{script}", *words]
arguments.core_transformer_config_from_args(arguments.validate_args(arguments.parse_args()))
'''


def parts(plan: LlmPlan, target: Target) -> JobParts:
    """Return the parts of a job folder for Megatron-LM. Raises the errors of the export."""
    text = arguments(plan, target, Place())["arguments.txt"]
    config, minors, script = plan.estimate.parallelism, releases_of(plan, target), script_of(plan)
    flexible = "--moe-flex-dispatcher-backend" in text
    return JobParts(
        title=f"{target.title} {minors[0]}" + (f" to {minors[-1]}" if len(minors) > 1 else ""),
        # Not `-m pretrain_gpt`: the sources need not be installed, and the script puts its own folder on the path.
        command=("python3", f'"$MEGATRON_LM/{script}"'),
        arguments=("arguments.txt",),
        data=_DATA,
        smoke=_SMOKE.format(steps=SMOKE_STEPS, words=plan.transformer.vocab - 1),
        files=(
            JobFile(name="arguments.txt", text=text, holds="arguments of Megatron-LM: the plan and the model"),
            JobFile(
                name="check_arguments.py",
                text=_CHECK.format(tested=RELEASES, needed=minors, script=script),
                holds="lets Megatron-LM's parser read the arguments",
            ),
        ),
        placeholders=(
            Placeholder(
                name="MEGATRON_LM",
                meaning=f"folder of Megatron-LM's sources, with {script}",
                kind="folder",
                example="/opt/megatron-lm",
                needed="always",
            ),
            Placeholder(
                name="DATA_PATH",
                meaning="prefix of the .bin and .idx files of tools/preprocess_data.py",
                kind="prefix",
                example="/data/my_text_document",
            ),
            Placeholder(
                name="TOKENIZER_MODEL",
                meaning="folder of a Hugging Face tokenizer, or its name on the hub",
                example="/models/llama-3-8b",
            ),
            Placeholder(name="SAVE", meaning="folder for checkpoints", kind="text", example="/checkpoints/run-1"),
            Placeholder(
                name="LOAD",
                meaning="folder of the checkpoint to start from; SAVE if empty",
                kind="folder",
                needed="never",
            ),
        ),
        environment=(
            _connections(plan),
            *(
                (
                    Variable(
                        name="NVTE_CPU_OFFLOAD_V1",
                        value="1",
                        why="Megatron-LM requires it to offload modules with Transformer Engine from 2.10 on",
                    ),
                )
                if config.offload_modules
                else ()
            ),
            Variable(
                name="NVTE_DEBUG", value="1", why="Transformer Engine reports which attention it uses", active=False
            ),
        ),
        check=(
            'export PYTHONPATH="$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}"',
            'python3 check_arguments.py "$RANKS" "${arguments[@]}" > /dev/null',
        ),
        step_line="elapsed time per iteration",
        requirements=_requirements(plan, minors, flexible=flexible),
        conversion=_CONVERSION,
        notes=(
            "Megatron-LM prints step times on the last rank, and memory after the first step.",
            "With `--exit-signal-handler` in `data.txt`, the job saves a checkpoint when its time is almost over.",
            "Comments at the top of `arguments.txt` list what the estimate leaves out.",
            *((_DEEP_EP_NOTE,) if flexible else ()),
        ),
    )


def _connections(plan: LlmPlan) -> Variable:
    """Return the number of hardware queues, which decides what may overlap."""
    connections = max_connections(plan)
    why = (
        "the exchange of experts overlaps with passes only if there are several hardware queues"
        if connections not in {None, 1}
        else "Megatron-LM requires it for tensor and context parallelism before Blackwell"
    )
    return Variable(
        name="CUDA_DEVICE_MAX_CONNECTIONS", value=str(connections or 1), why=why, active=connections is not None
    )


def _requirements(plan: LlmPlan, minors: tuple[str, ...], *, flexible: bool) -> tuple[str, ...]:
    blocks = plan.transformer.blocks
    releases = [release for release in TESTED if release.rpartition(".")[0] in minors]
    clone = f"git clone --branch core_v{releases[-1]} https://github.com/NVIDIA/Megatron-LM"
    return (
        f"# Megatron-LM comes from its sources: {clone}",
        f"# Its parser accepts these arguments in the releases {', '.join(releases)}.",
        *_REQUIREMENTS,
        *(_DEEP_EP if flexible else ()),
        *(_MAMBA if is_hybrid(plan.transformer) else ()),
        *(_DELTA_NET if any(one.rule == "gated_delta" for block in blocks for one in block.scans) else ()),
    )
