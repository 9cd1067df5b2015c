"""Texts of the files in job folders for DeepSpeed. Marks such as `__STEP__` stand for what a plan determines."""

from __future__ import annotations

# Three blocks of imports, because each kind of plan needs other modules, and unused ones may not be installed.
MODEL_IMPORTS = """\
import argparse
import os
import time

import deepspeed
import torch
import torch._dynamo  # transformers needs it, and it can't be loaded while ZeRO 3 replaces constructors
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
__GROUPS__from planned import CONFIG, MODEL, check_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"""
GROUPS = "from deepspeed.utils import groups\n"
PIPED_IMPORTS = """\
import argparse
import copy
import os
import time

import deepspeed
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from planned import CONFIG, MODEL, PlannedPipelineModule, check_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer"""
LAYER_IMPORTS = """\
import argparse
import time

import deepspeed
import torch
from planned import CONFIG, LAYERS, PlannedPipelineModule"""
# Without a pipeline every rank is a replica. With one, ranks of a pipeline read the same micro-batches.
REPLICA = "torch.distributed.get_rank(), torch.distributed.get_world_size()"
PIPED_REPLICA = "engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()"
# Tensor-parallel ranks, which are consecutive, read the same micro-batches.
SHARDED_REPLICA = "torch.distributed.get_rank() // TP, torch.distributed.get_world_size() // TP"
# Synthetic tokens need neither a tokenizer nor data, so the smoke run starts before these are there.
TEXT_BATCHES = "counting(model_config().vocab_size, replica) if options.smoke else texts(options, replica, replicas)"
# Without reentrant checkpoints, inputs that need no gradient are allowed, as those of the first layer.
CHECKPOINTING = """\
    # Each layer is recomputed in backward passes.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
"""
# The estimate counts logits and their gradient in 16 bits, and no copy in 32 bits.
CHUNK = """\
CHUNK = 256
\"\"\"Rows of logits whose loss is computed at once, in 32 bits.\"\"\"
"""
# Settings are constants of the script and no options, because the learning rate belongs to the optimizer and to the
# schedule at once.
TRAIN = '''\
"""Train the planned model with DeepSpeed. Each rank runs this with the environment variables of torchrun."""

__IMPORTS__

__CONSTANTS__OPTIMIZER = __OPTIMIZER__
SETTINGS = {
    "optimizer": OPTIMIZER,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": OPTIMIZER["params"]["lr"], "warmup_num_steps": 200},
    },
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}
"""DeepSpeed's settings that the plan leaves open."""
SMOKE = {"optimizer": OPTIMIZER, "steps_per_print": __PRINTED__, "wall_clock_breakdown": __BREAKDOWN__}
"""Settings of the smoke run, whose few steps have no warm-up of the learning rate."""


def words():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--smoke", action="store_true", help="train on synthetic data, and write no checkpoint")
    parser.add_argument("--dataset", help="__DATA__")
__OPTIONS__    parser.add_argument("--save", help="folder of checkpoints")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between two checkpoints")
    return parser.parse_args()


def config_of(options):
    """Return DeepSpeed's configuration: the plan, and the settings of the run."""
    return {**CONFIG, **(SMOKE if options.smoke else SETTINGS)}


def main():
    """Train, and print the time of each step."""
    options = words()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = planned_model(config_of(options))
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config_of(options))
    for name, buffer in engine.module.named_buffers():
        # DeepSpeed rounds buffers to 16 bits, too, which is too coarse for the frequencies of RoPE.
        if name in exact:
            buffer.data = exact[name].to(engine.device)
    begin = 0
    if options.save and not options.smoke:
        begin = (engine.load_checkpoint(options.save)[1] or {}).get("step", 0)
    replica, replicas = __REPLICA__
    batches = __BATCHES__
    for step in range(begin + 1, options.steps + 1):
        began_s = time.perf_counter()
        # Reading the loss waits for the GPU, which runs the step after Python has started it.
        loss = float(train_step(engine, batches))
        took_s = time.perf_counter() - began_s
        if torch.distributed.get_rank() == 0:
            line = f"step {step} of {options.steps}: loss {loss:.4f}, iter time (s): {took_s:.4f}__RATE__"
            print(line, flush=True)
        if options.save and not options.smoke and step % options.save_interval == 0:
            engine.save_checkpoint(options.save, client_state={"step": step})
    if torch.cuda.is_available():
        rank, peak_bytes = torch.distributed.get_rank(), torch.cuda.max_memory_allocated()
        print(f"rank {rank}: peak memory {peak_bytes / 1e9:.2f} GB", flush=True)


__STEP__


__MODEL__


__DATASET__


if __name__ == "__main__":
    main()
'''
# DeepSpeed's engine counts calls of step() and updates weights in the last of a global batch only.
STEP = '''\
def train_step(engine, batches):
    """Run one step and return the loss of the last micro-batch."""
    for _ in range(CONFIG["gradient_accumulation_steps"]):
        tokens, labels = (tensor.to(engine.device) for tensor in next(batches))
        loss = mean_loss(engine(input_ids=tokens, use_cache=False).logits, labels)
        engine.backward(loss)
        engine.step()
    return loss.detach()
'''
SHARDED_STEP = STEP.replace("labels)", "labels - engine.module.lm_head.vocab_start_index)")
PIPED_STEP = '''\
def train_step(engine, batches):
    """Run one step and return its loss."""
    return engine.train_batch(batches)
'''
MODEL = '''\
def planned_model(settings):
    """Return the model of MODEL_CONFIG in env.sh, which must be the planned one."""
    config = model_config()
    sharded = settings["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=sharded):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    for module in model.modules() if sharded else ():
        # transformers set the initial weights after they had been sharded, in vain.
        own = list(module.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(own, modifier_rank=0), torch.no_grad():
            model._init_weights(module)
__CHECKPOINTING__    return model


def parameters_of_model():
    """Return the number of parameters, without memory for them."""
    with torch.device("meta"):
        return sum(one.numel() for one in AutoModelForCausalLM.from_config(model_config()).parameters())


'''
# Blocks are whole models of one layer, so that masks, windows and positions are transformers' own. A layer alone would
# lose a sliding window, which is in the mask that the model makes.
PIPED_MODEL = '''\
def planned_model(settings):
    """Return the layers of MODEL_CONFIG in env.sh, which must be of the planned model, as the plan's pipeline."""
    config = model_config()
    blocks = [LayerSpec(Block, config, index) for index in range(config.num_hidden_layers)]
    if config.tie_word_embeddings:
        tied = {"forward_fn": Ends.logits, "tied_weight_attr": "embedding.weight"}
        ends = [
            TiedLayerSpec("ends", Ends, config, tied_weight_attr="embedding.weight"),
            TiedLayerSpec("ends", Ends, config, **tied),
        ]
    else:
        ends = [LayerSpec(Embedding, config), LayerSpec(Head, config)]
    return PlannedPipelineModule([ends[0], *blocks, ends[1]], loss_fn=mean_loss)


def parameters_of_model():
    """Return the number of parameters, without memory for them."""
    config = model_config()
    with torch.device("meta"):
        ends = [Ends(config)] if config.tie_word_embeddings else [Embedding(config), Head(config)]
        layers = [*ends, *(Block(config, index) for index in range(config.num_hidden_layers))]
        return sum(one.numel() for layer in layers for one in layer.parameters())


class Block(nn.Module):
    """One layer as a model of its own, which makes the mask and the positions."""

    def __init__(self, config, index):
        super().__init__()
        alone = copy.deepcopy(config)
        alone.num_hidden_layers = alone.vocab_size = 1
        if getattr(config, "layer_types", None):
            alone.layer_types = [config.layer_types[index]]
        self.model = AutoModel.from_config(alone, dtype=DTYPE)
        self.model.embed_tokens = self.model.norm = nn.Identity()

    def forward(self, hidden):
        return self.model(inputs_embeds=hidden, use_cache=False).last_hidden_state


class Embedding(nn.Module):
    """The embedding of tokens."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=DTYPE)
        nn.init.normal_(self.embedding.weight, std=config.initializer_range)

    def forward(self, tokens):
        return self.embedding(tokens)


class Head(nn.Module):
    """The last norm and the LM head."""

    def __init__(self, config):
        super().__init__()
        self.norm = last_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=DTYPE)
        nn.init.normal_(self.head.weight, std=config.initializer_range)

    def forward(self, hidden):
        return self.head(self.norm(hidden))


class Ends(Embedding):
    """The embedding, whose weight is also that of the LM head."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = last_norm(config)

    def logits(self, hidden):
        return nn.functional.linear(self.norm(hidden), self.embedding.weight)


def last_norm(config):
    """Return a norm of the model's kind."""
    alone = copy.deepcopy(config)
    alone.num_hidden_layers = alone.vocab_size = 1
    if getattr(config, "layer_types", None):
        alone.layer_types = config.layer_types[:1]
    return AutoModel.from_config(alone, dtype=DTYPE).norm


'''
CONFIG = '''\
def model_config():
    """Return the configuration of the model. Raise ValueError if it is not the planned one."""
    config = AutoConfig.from_pretrained(os.environ["MODEL_CONFIG"])
    config.pad_token_id = None
    config._attn_implementation = "sdpa"
    if os.environ.get("JOB_RUN") == "small":
        keep_layers(config, MODEL["num_hidden_layers"])
    check_model(config)
    return config


def keep_layers(config, layers):
    """Keep the first layer of each kind, and repeat the last one, as the plan of the reduced model does."""
    dense = getattr(config, "first_k_dense_replace", None) or 0
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    kinds = [(kind, at < dense) for at, kind in enumerate(types)]
    kept = sorted(kinds.index(kind) for kind in set(kinds))
    kept = [*kept, *kept[-1:] * layers][:layers]
    if getattr(config, "layer_types", None):
        config.layer_types = [types[at] for at in kept]
    if dense:
        config.first_k_dense_replace = sum(at < dense for at in kept)
    config.num_hidden_layers = layers


'''
LOSS = '''\
class MeanLoss(torch.autograd.Function):
    """Cross entropy in chunks of rows. Only the logits and their gradient have full size, both in the model's dtype."""

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels)
        total = torch.zeros((), device=logits.device)
        for some, right in zip(logits.split(CHUNK), labels.split(CHUNK), strict=True):
            total += nn.functional.cross_entropy(some.float(), right, reduction="sum")
        return total / len(labels)

    @staticmethod
    def backward(ctx, scale):
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        each = scale / len(labels)
        chunks = (tensor.split(CHUNK) for tensor in (logits, labels, gradient))
        for some, right, written in zip(*chunks, strict=True):
            found = some.float().softmax(-1)
            found[torch.arange(len(right), device=right.device), right] -= 1
            written.copy_(found.mul_(each))
        return gradient, None


def mean_loss(logits, labels):
    """Return the mean loss of a micro-batch."""
    return MeanLoss.apply(logits.flatten(0, 1), labels.flatten())
'''
# The loss of DeepSpeed's own sharded LM head keeps a copy of the logits in 32 bits, which the estimate does not count.
SHARDED_LOSS = '''\
class MeanLoss(torch.autograd.Function):
    """Cross entropy of logits whose columns the tensor-parallel ranks share, in chunks of rows.

    Only the logits and their gradient have full size, both in the model's dtype. Labels count from the first column of
    the rank, so that labels of other ranks are negative or too large.
    """

    @staticmethod
    def forward(ctx, logits, labels):
        group, columns = groups.get_tensor_model_parallel_group(), logits.shape[-1]
        most = logits.amax(-1).float()
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group)
        sums, held = torch.empty_like(most), (labels >= 0) & (labels < columns)
        for some, top, found in zip(*(tensor.split(CHUNK) for tensor in (logits, most, sums)), strict=True):
            torch.sum((some.float() - top[:, None]).exp(), -1, out=found)
        right = logits.gather(-1, labels.clamp(0, columns - 1)[:, None])[:, 0].float() * held
        both = torch.stack([sums, right])
        torch.distributed.all_reduce(both, group=group)
        whole = most + both[0].log()
        ctx.save_for_backward(logits, labels, held, whole)
        return (whole - both[1]).mean()

    @staticmethod
    def backward(ctx, scale):
        logits, labels, held, whole = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        each = scale / len(labels)
        chunks = (tensor.split(CHUNK) for tensor in (logits, labels, held, whole, gradient))
        for some, right, own, total, written in zip(*chunks, strict=True):
            found = (some.float() - total[:, None]).exp()
            found[torch.nonzero(own)[:, 0], right[own]] -= 1
            written.copy_(found.mul_(each))
        return gradient, None


def mean_loss(logits, labels):
    """Return the mean loss of a micro-batch."""
    return MeanLoss.apply(logits.flatten(0, 1), labels.flatten())
'''
TEXT = '''\
def counting(vocab_size, seed):
    """Yield micro-batches of sequences that count up from a random number, which a model learns soon."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(vocab_size, (CONFIG["train_micro_batch_size_per_gpu"], 1), generator=chance)
        tokens = (start + torch.arange(SEQ_LENGTH + 1)) % vocab_size
        yield tokens[:, :-1], tokens[:, 1:]


def texts(options, replica, replicas):
    """Yield micro-batches of the texts in the column `text`, one after the other, as sequences of the same length."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    rows = split_dataset_by_node(load_dataset(options.dataset, split="train", streaming=True), replica, replicas)
    size, length = CONFIG["train_micro_batch_size_per_gpu"], SEQ_LENGTH + 1
    left = []
    while True:
        for row in rows:
            left += [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
            while len(left) >= size * length:
                tokens = torch.tensor(left[: size * length]).view(size, length)
                left = left[size * length :]
                yield tokens[:, :-1], tokens[:, 1:]
'''
LAYERS = '''\
def layer(name):
    """Return the module of a layer of the plan. PASSED_ON in planned.py lists what layers at a cut pass on."""
    raise NotImplementedError(f"write the module of layer {name!r} in train.py")


def mean_loss(output, target):
    """Return the mean loss over the samples of a micro-batch."""
    raise NotImplementedError("write the loss in train.py")


def planned_model(settings):
    """Return the layers as the plan's pipeline."""
    return PlannedPipelineModule([layer(name) for name in LAYERS], loss_fn=mean_loss)
'''
OWN_DATA = '''\
def batches_of(options, replica, replicas):
    """Yield the replica's micro-batches, as pairs of inputs and targets; synthetic ones with `options.smoke`."""
    raise NotImplementedError("write the micro-batches in train.py")
'''
# The parser asks the process group for ranks. On a login node a group would wait for the others, so it gets numbers.
CHECK = '''\
"""Let DeepSpeed's own parser read the configuration and build the model, without GPUs: check_config.py RANKS WORDS…"""

import sys
from types import SimpleNamespace

ranks = int(sys.argv.pop(1))

import train
from deepspeed.runtime import config as parser

replicas, left = divmod(ranks, __RANKS__)
if left:
    sys.exit(f"error: the job has {ranks} ranks, which __NAMED__ __RANKS__ does not divide")
# No group of processes runs here, so rank and replicas are given.
parser.dist.get_rank = lambda: 0
processes = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
parser.DeepSpeedConfig(train.config_of(train.words()), mpu=processes)
__MODEL__
'''
CHECK_PARAMETERS = """\
found = train.parameters_of_model()
if found != __PARAMETERS__:
    sys.exit(f"error: the model has {found:,} parameters, but the plan is for __SHOWN__")"""
CHECK_LAYERS = """\
import torch

with torch.device("meta"):
    for name in train.LAYERS:
        try:
            made = train.layer(name)
        except NotImplementedError as error:
            sys.exit(f"error: {error}")
        if not isinstance(made, torch.nn.Module):
            sys.exit(f"error: layer({name!r}) in train.py is {made!r}, but it must be a torch.nn.Module")"""
