"""Job folders for torchtitan 0.3: a module with the configurations of the job, and a check by torchtitan's own parser.

Source: `torchtitan/config/manager.py`, `trainer.py` and `models/common` of torchtitan 0.3.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import filled, in_python
from hpgo.export.llm_for_torchtitan import REPLACED, registered
from hpgo.export.targets import Place
from hpgo.export.titan_sparse import is_sparse
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts, Placeholder, Variable
from hpgo.llm.plan import LlmPlan
from hpgo.llm.titan_shape import titan_package

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.model.transformer import Transformer
    from hpgo.planning.plans import Plan

STEP_LINE = "step:.*tps:"
"""Lines of torchtitan's log with the throughput of a step, with colors between the words."""
ALLOCATOR = Variable(
    name="PYTORCH_ALLOC_CONF",
    value="expandable_segments:True",
    why="less fragmentation of GPU memory; torchtitan's own start script sets it, too",
)
DATASET_CODE = """\
# A folder of parquet, JSON or text files, or a name on the hub, with a column named text.
DATASETS["text"] = DatasetConfig(
    path="",
    loader=lambda path: load_dataset(path, split="train", streaming=True),
    sample_processor=lambda sample: sample["text"],
)
"""
"""Registration of a data set of text, which both releases read alike."""
_COUNTING = """\
class Counting(IterableDataset):
    def __init__(self, vocab_size, seq_len, seed):
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed

    def __iter__(self):
        chance = torch.Generator().manual_seed(self.seed)
        while True:
            start = torch.randint(self.vocab_size, (1,), generator=chance)
            tokens = (start + torch.arange(self.seq_len + 1)) % self.vocab_size
            yield {"input": tokens[:-1]__BESIDE__}, tokens[1:]
"""
_JOB = '''\
"""Configurations of this job for torchtitan: `--config train`, or `--config smoke` for a run without data.

__NEW__
"""

__IMPORTS__

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1

__DATASET__

__BASE__


def train():
    """Return the configuration with the plan. The command line sets data, tokenizer and steps."""
    config = planned(base())
    config.optimizer = default_adamw(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    config.profiler.enable_profiling = False  # a profiler would change the step time
    return config


def smoke():
    """Return the same configuration with synthetic tokens, and without checkpoints."""
    config = train()
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = SyntheticTokens.Config(vocab_size=config.model_spec.model.vocab_size)
    config.checkpoint.enable = False
    config.metrics.log_freq = 1
    config.metrics.enable_tensorboard = False
    return config


class NoTokenizer(BaseTokenizer):
    """A tokenizer that is never used."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise RuntimeError("the smoke run has no tokenizer")

    decode = get_vocab_size = encode


class SyntheticTokens(ParallelAwareDataloader):
    """Sequences that count up from a random number, which a model learns soon."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        vocab_size: int = 2

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        sequences = Counting(config.vocab_size, seq_len, dp_rank)
        super().__init__(sequences, dp_rank, dp_world_size, batch_size=local_batch_size)


__COUNTING__'''
_IMPORTS = {
    "dataclasses": ["dataclass"],
    "datasets": ["load_dataset"],
    "planned": ["planned"],
    "torch.utils.data": ["IterableDataset"],
    "torchtitan.components.dataloader": ["ParallelAwareDataloader"],
    "torchtitan.components.optimizer": ["default_adamw"],
    "torchtitan.components.tokenizer": ["BaseTokenizer"],
    "torchtitan.hf_datasets": ["DatasetConfig"],
    "torchtitan.hf_datasets.text_datasets": ["DATASETS"],
}
# Models of the registry keep their own initialization, and new ones get the standard deviation of their configuration.
_REGISTERED = '''\
def base():
    """Return torchtitan's own configuration of this model."""
    config = __FUNCTION__()
__MODEL__    return config
'''
_NAMED = '''\
def base():
    """Return torchtitan's own configuration of your model, which MODEL_CONFIG in env.sh names."""
    module, _, function = os.environ["MODEL_CONFIG"].partition(":")
    return getattr(importlib.import_module(module), function)()
'''
_NEW = '''\
def base():
    """Return the configuration of a model of this SHAPE. Its trainer is that of torchtitan's Llama 3 8B."""
    config = llama3_8b()
    words, dim = SHAPE["vocab_size"], SHAPE["dim"]
    weights = {"weight": partial(nn.init.normal_, std=__STD__)}
    tied = {"weight": skip_param_init}  # the LM head initializes the weight that both share
    model = __MODEL__.Config(
        dim=dim,
        vocab_size=words,
        enable_weight_tying=SHAPE["tied"],
        tok_embeddings=Embedding.Config(
            num_embeddings=words, embedding_dim=dim, param_init=tied if SHAPE["tied"] else weights
        ),
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=words, param_init=weights),
        layers=[layer(dim, weights) for _ in range(SHAPE["layers"])],
    )
    config.model_spec = replace(model_registry("__FLAVOR__"), flavor="planned", model=model)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=words))
    return config


def layer(dim, weights):
    """Return a new block, because torchtitan changes the configuration of each."""
    head_dim = SHAPE["head_dim"]
    return __BLOCK__.Config(
        attention_norm=norm(dim),
        ffn_norm=norm(dim),
        attention=make_gqa_config(
            dim=dim,
            n_heads=SHAPE["n_heads"],
            n_kv_heads=SHAPE["n_kv_heads"],
            head_dim=head_dim,
            wqkv_param_init=weights,
            wo_param_init=weights,
            inner_attention=get_attention_config("flex"),
            rope=__ROPE__.Config(dim=head_dim, max_seq_len=__LENGTH__),
            fuse_qkv=True,
            qk_norm=norm(head_dim) if SHAPE["qk_norm"] else None,
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=SHAPE["ffn"], w1_param_init=weights, w2w3_param_init=weights
        ),
    )


def norm(width):
    """Return a norm over this number of values."""
    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})
'''
_NEW_SPARSE = '''\
def base():
    """Return the configuration of a model of this SHAPE. Its trainer is that of torchtitan's Llama 3 8B."""
    config = llama3_8b()
    words, dim = SHAPE["vocab_size"], SHAPE["dim"]
    weights = {"weight": partial(nn.init.normal_, std=__STD__)}
    tied = {"weight": skip_param_init}  # the LM head initializes the weight that both share
    model = __MODEL__.Config(
        dim=dim,
        vocab_size=words,
        enable_weight_tying=SHAPE["tied"],
        tok_embeddings=Embedding.Config(
            num_embeddings=words, embedding_dim=dim, param_init=tied if SHAPE["tied"] else weights
        ),
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=words, param_init=weights),
        layers=[layer(dim, weights, at in SHAPE["dense_layers"]) for at in range(SHAPE["layers"])],
    )
    config.model_spec = replace(model_registry("__FLAVOR__"), flavor="planned", model=model)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=words))
    return config


def layer(dim, weights, dense):
    """Return a new block, because torchtitan changes the configuration of each."""
    return __BLOCK__.Config(
        attention_norm=norm(dim),
        ffn_norm=norm(dim),
        attention=attention(dim, weights),
        feed_forward=network(dim, SHAPE["ffn"], weights) if dense else None,
        moe=None if dense else experts(dim, weights),
    )


__ATTENTION__


def network(dim, width, weights):
    """Return a dense feed-forward network."""
    return make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=weights, w2w3_param_init=weights)


def experts(dim, weights):
    """Return experts with their router. PyTorch exchanges the tokens."""
    held = SHAPE["experts"]
    sizes = {"dim": dim, "num_experts": held["num_experts"], "top_k": held["top_k"]}
    routing = ("score_func", "route_norm", "route_scale", "num_expert_groups", "num_limited_groups")
    return make_moe_config(
        num_experts=held["num_experts"],
        router=make_router_config(
            **sizes, gate_param_init=weights, **{name: held[name] for name in routing}
        ),
        routed_experts=make_routed_experts_config(
            **sizes,
            hidden_dim=held["hidden_dim"],
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), weights["weight"]),
            comm_backend="standard",
        ),
        shared_experts=network(dim, held["shared"], weights) if held["shared"] else None,
    )


def norm(width):
    """Return a norm over this number of values."""
    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})
'''
_GROUPED = '''\
def attention(dim, weights):
    """Return the attention of a block."""
    held = SHAPE["attention"]
    head_dim = held["head_dim"]
    return make_gqa_config(
        dim=dim,
        n_heads=held["n_heads"],
        n_kv_heads=held["n_kv_heads"],
        head_dim=head_dim,
        wqkv_param_init=weights,
        wo_param_init=weights,
        inner_attention=get_attention_config("flex"),
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=__LENGTH__),
        fuse_qkv=True,
        qk_norm=norm(head_dim) if held["qk_norm"] else None,
    )
'''
_LATENT = '''\
def attention(dim, weights):
    """Return the attention of a block, whose keys and values come from a latent vector."""
    held = SHAPE["attention"]
    return make_mla_attention_config(
        layer_id=0,
        dim=dim,
        **held,
        attn_backend="flex",
        linear_init=weights,
        norm_init={"weight": nn.init.ones_},
        depth_init=lambda layer_id: weights,
        rope=ComplexRoPE.Config(dim=held["qk_rope_head_dim"], max_seq_len=__LENGTH__),
    )
'''
# torchtitan accepts the names of its own data sets only, so job_config.py registers one more, named `text`.
_DATA = """\
# Tokenizer, data, checkpoints and steps. Change them here; env.sh sets the variables.
# job_config.py has the learning rate, the weight decay and the format of the data.
--config train
--hf_assets_path "$HF_ASSETS_PATH"
--dataloader.dataset text
--dataloader.dataset_path "$DATASET_PATH"
--dump_folder "$SAVE"
--checkpoint.enable
--checkpoint.interval 1000
# Start from the weights in HF_ASSETS_PATH:
# --checkpoint.initial_load_in_hf
--training.steps 10000
--lr_scheduler.warmup_steps 200
--metrics.log_freq 10
"""
_SMOKE = """\
# {steps} steps with synthetic tokens.
--config smoke
--training.steps {steps}
--lr_scheduler.warmup_steps 1
"""
# `update_from_config` refuses sequences longer than RoPE, degrees that do not divide heads, and tied weights in a
# pipeline.
_CHECK = '''\
"""Let torchtitan's own parser read a configuration and build the model, without a GPU: check_config.py RANKS WORDS…"""

import sys

import torch
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims

PARAMETERS = __PARAMETERS__
ranks, *words = sys.argv[1:]
config = ConfigManager().parse_args(words)
ParallelDims.from_config(config.parallelism, int(ranks))
model = config.model_spec.model
model.update_from_config(config=config)
with torch.device("meta"):
    found = sum(parameter.numel() for parameter in model.build().parameters())
if PARAMETERS not in {None, found}:
    sys.exit(f"error: the model has {found:,} parameters, but the plan is for {PARAMETERS:,}")
'''
TOKENIZER = Placeholder(
    name="HF_ASSETS_PATH",
    meaning="folder with the model's tokenizer, from scripts/download_hf_assets.py of torchtitan",
    kind="folder",
    example="/models/Llama-3.1-8B",
)
DATASET = Placeholder(
    name="DATASET_PATH",
    meaning="folder of parquet, JSON or text files, or a data set on the Hugging Face hub, with a column named text",
    example="/data/my_text",
)
SAVE = Placeholder(name="SAVE", meaning="folder for checkpoints and logs", example="/checkpoints/run-1")


def parts(plan: LlmPlan | Plan, target: Target) -> JobParts:
    """Return the parts of a job folder for torchtitan 0.3. Raises the errors of the export."""
    main, *others = target.write(plan, Place()).items()
    model = plan.transformer if isinstance(plan, LlmPlan) else None
    files = (
        JobFile(name=main[0], text=main[1], holds="the plan: `planned(config)` sets it and checks the model's shape"),
        *(JobFile(name=name, text=text, holds=holds_of(name)) for name, text in others),
        JobFile(name="job_config.py", text=_job_config(plan), holds="configurations `train` and `smoke` of the job"),
        JobFile(
            name="check_config.py",
            text=filled(_CHECK, {"PARAMETERS": in_python(model and model.parameters)}),
            holds="lets torchtitan's parser read a configuration and build the model",
        ),
    )
    named = Placeholder(
        name="MODEL_CONFIG",
        meaning="module and function of torchtitan's configuration of your model",
        example="torchtitan.models.llama3.config_registry:llama3_8b",
        needed="always",
    )
    return JobParts(
        title=f"{target.title} 0.3.0",
        command=("python3", "-m", "torchtitan.train", "--module", "job_config"),
        data=_DATA,
        smoke=_SMOKE.format(steps=SMOKE_STEPS),
        files=files,
        placeholders=(*([] if model else [named]), TOKENIZER, DATASET, SAVE),
        environment=(ALLOCATOR,),
        check=('python3 check_config.py "$RANKS" --module job_config "${arguments[@]}" > /dev/null',),
        needs="torchtitan",
        rate_in="job_config.py",
        step_line=STEP_LINE,
        requirements=("torchtitan==0.3.0", "torch==2.15.0"),
        notes=notes_of(plan),
    )


def holds_of(name: str) -> str:
    """Return the description of a file that is exported beside the plan.

    >>> holds_of("order.csv")
    'actions of each pipeline rank, in order'
    """
    return {
        "order.csv": "actions of each pipeline rank, in order",
        "ranks.csv": "node and GPU of each rank",
    }[name]


def notes_of(plan: LlmPlan | Plan) -> tuple[str, ...]:
    """Return the sentences for README.md."""
    piped = plan.estimate.parallelism.pp > 1 if isinstance(plan, LlmPlan) else len(plan.stages) > 1
    return ("Only ranks of the last pipeline stage print the loss; the others print -1.",) if piped else ()


def _job_config(plan: LlmPlan | Plan) -> str:
    imports = {module: list(names) for module, names in _IMPORTS.items()}
    plain = ["torch"]
    if not isinstance(plan, LlmPlan):
        base, new = _NAMED, "Your model comes from torchtitan's registry: set MODEL_CONFIG in env.sh."
        plain += ["importlib", "os"]
    elif (found := registered(plan.transformer)) is None:
        base, more = _new_model(plan.transformer)
        for module, names in more.items():
            imports.setdefault(module, []).extend(names)
        new = "The model is new: torchtitan's registry has none of this shape, so `base` builds it."
    else:
        package, function, flavor = found
        imports[f"torchtitan.models.{package}.config_registry"] = [function]
        model = ""
        if why := REPLACED.get(flavor):
            imports[f"torchtitan.models.{package}"] = ["model_registry"]
            model = f'    config.model_spec = model_registry("{flavor}")  # {why}\n'
        base = filled(_REGISTERED, {"FUNCTION": function, "MODEL": model})
        new = f"The model is {flavor} of torchtitan's `{package}`."
    parts = {"NEW": new, "IMPORTS": _import_lines(plain, imports), "BASE": base.rstrip(), "DATASET": DATASET_CODE}
    parts["COUNTING"] = counting(', "positions": torch.arange(self.seq_len)')
    return filled(_JOB, parts)


def counting(beside: str = "") -> str:
    """Return the code of a data set of synthetic tokens. `beside` is code for more entries of its inputs."""
    return filled(_COUNTING, {"BESIDE": beside})


def _import_lines(plain: list[str], names: dict[str, list[str]]) -> str:
    standard = {"dataclasses", "functools", "importlib", "os"}
    lines = [(module, f"import {module}") for module in plain]
    lines += [(module, f"from {module} import {', '.join(sorted(found))}") for module, found in names.items()]

    def block(own: bool) -> str:
        chosen = [(module, line) for module, line in lines if (module in standard) == own]
        return "\n".join(line for _, line in sorted(chosen, key=lambda pair: (pair[1].startswith("from"), pair[0])))

    return "\n\n".join(part for part in (block(True), block(False)) if part)


def _new_model(model: Transformer) -> tuple[str, dict[str, list[str]]]:
    """Return the function that builds a model which torchtitan's registry does not have, and its imports."""
    package = titan_package(model, sparse=True)
    sparse, flavor, block, decoder = is_sparse(model), *_PARTS[package]
    flavor = "30B-A3B" if model.experts and package == "qwen3" else flavor
    # All forms rotate the same angles. Each package's own is the one that its checkpoints of Hugging Face convert to.
    rope = "CosSinRoPE" if package == "qwen3" else "ComplexRoPE"
    std = 0.02 if model.arithmetic is None else model.arithmetic.init_std
    length = in_python(max(model.longest, 1 << 17))
    attention = filled(_LATENT if package == "deepseek_v3" else _GROUPED, {"LENGTH": length}) if sparse else ""
    own = {"ATTENTION": attention.rstrip()} if sparse else {"ROPE": rope, "LENGTH": length}
    text = filled(
        _NEW_SPARSE if sparse else _NEW,
        {"STD": in_python(std), "MODEL": decoder, "FLAVOR": flavor, "BLOCK": block, **own},
    )
    latent = ["make_mla_attention_config"] if package == "deepseek_v3" else []
    makers = ["make_ffn_config", *([] if latent else ["get_attention_config", "make_gqa_config"])]
    makers += ["make_moe_config", "make_routed_experts_config", "make_router_config"] if sparse else []
    imports = {
        "dataclasses": ["replace"],
        "functools": ["partial"],
        "planned": ["SHAPE"],
        "torch": ["nn"],
        "torchtitan.components.loss": ["ChunkedLossWrapper", "CrossEntropyLoss"],
        "torchtitan.models.common": [rope, "Embedding", "Linear", "RMSNorm"],
        "torchtitan.models.common.config_utils": makers,
        "torchtitan.models.common.param_init": ["skip_param_init"],
        f"torchtitan.models.{package}": ["model_registry", *latent],
        f"torchtitan.models.{package}.model": [block, decoder],
        "torchtitan.models.llama3.config_registry": ["llama3_8b"],
    }
    return text, imports


_PARTS = {
    "llama3": ("8B", "Llama3TransformerBlock", "Llama3Model"),
    "qwen3": ("8B", "Qwen3TransformerBlock", "Qwen3Model"),
    "deepseek_v3": ("16B", "DeepSeekV3TransformerBlock", "DeepSeekV3Model"),
}
"""A flavor of each package of torchtitan 0.3, and the classes of its blocks and of its model."""
