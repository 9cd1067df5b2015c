"""Plans exported for Megatron-LM, read by the parser and the validation of one of its releases.

The parser is in no wheel. `run.py` runs this file once per release, with the release's sources first on the path.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import typing
from unittest import mock

import typing_extensions

# Megatron-LM 0.18 and later are written for Python 3.12, and need nothing else of it to parse arguments.
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

from cases import Case, cases, outcome, tally
from megatron.core.package_info import __shortversion__ as release
from megatron_checks import SCHEDULES, compare, compare_way, reasons, some_model
from results import Result, done
from ways import WayCase, files_of, ways
from ways import refused_by as refused_way
from ways import tally as tally_ways


def parsed(case: Case) -> bool:
    """Whether Megatron-LM's own parser and checks understand the arguments as the case means them."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    files = outcome(case.given, "megatron", reasons(case))
    if files is None:
        return False
    os.environ.update(RANK="0", WORLD_SIZE=str(len(case.grid)), CUDA_DEVICE_MAX_CONNECTIONS="1")
    # What an export leaves to its user: a model, a length, a tokenizer; and no fused kernels, which need a GPU.
    sys.argv = ["pretrain_gpt.py", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8",
                "--max-position-embeddings", "8", "--lr", "1e-4", "--train-iters", "1", "--vocab-size", "32",
                "--tokenizer-type", "NullTokenizer", "--transformer-impl", "local", "--no-persist-layer-norm",
                "--no-gradient-accumulation-fusion", *shlex.split(files["arguments.txt"], comments=True)]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = validate_args(parse_args())
        compare(case, core_transformer_config_from_args(arguments))
    assert arguments.data_parallel_size == case.replicas[0]
    micro_batches = arguments.global_batch_size // (arguments.micro_batch_size * arguments.data_parallel_size)
    assert (arguments.micro_batch_size, micro_batches) == (case.share, case.micro_batches)
    assert bool(arguments.use_distributed_optimizer) == bool(case.zero)
    return True


def parsed_way(case: WayCase) -> bool:
    """Whether Megatron-LM's own parser and checks understand the arguments as the way means them."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    files = files_of(case, "megatron", refused_way("megatron", case))
    if files is None:
        return False
    os.environ.update(RANK="0", WORLD_SIZE=str(case.gpus), CUDA_DEVICE_MAX_CONNECTIONS="1")
    # What an export leaves to its user: a tokenizer and a rate; and no fused kernels, which need a GPU.
    sys.argv = ["pretrain_gpt.py", "--lr", "1e-4", "--train-iters", "1", "--tokenizer-type", "NullTokenizer",
                "--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion",
                "--no-rope-fusion", *shlex.split(files["arguments.txt"], comments=True)]  # fmt: skip
    # As above, of experts in 8 bits.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch("megatron.core.transformer.transformer_config.is_te_min_version", return_value=True),
    ):
        arguments = validate_args(parse_args())
        compare_way(case, core_transformer_config_from_args(arguments))
    assert arguments.data_parallel_size == case.dp
    micro_batches = arguments.global_batch_size // (arguments.micro_batch_size * arguments.data_parallel_size)
    assert (arguments.micro_batch_size, micro_batches) == (case.micro_batch_size, case.micro_batches)
    assert (arguments.seq_length, arguments.vocab_size) == (case.seq, case.model.vocab)
    assert arguments.untie_embeddings_and_output_weights != case.model.tied
    assert bool(arguments.use_distributed_optimizer) == (case.zero == 1)
    assert arguments.accumulate_allreduce_grads_in_fp32 == (case.precision != "fp16")
    return True


if __name__ == "__main__":
    read = tally(cases(200, SCHEDULES), parsed)
    read_ways = tally_ways(ways(200, some_model, often=(0, 1)), parsed_way)
    done(Result("megatron", f"the parser of Megatron-LM {release}", read, ways=read_ways))
